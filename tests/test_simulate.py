from __future__ import annotations

import itertools
import math
import runpy
from pathlib import Path

import numpy as np
import pytest

from megarl.core.choices.stopping import SamplingRule, Uniform, ada_seq_balance, ada_seq_pos
from megarl.core.sampling.collector import Collector

TOOL = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "simulate.py"))
DEFAULT_RATES, Budget = TOOL["DEFAULT_RATES"], TOOL["Budget"]
stopping_law = TOOL["stopping_law"]
arms, evaluate, moments, parse_rates = TOOL["arms"], TOOL["evaluate"], TOOL["moments"], TOOL["parse_rates"]


def enumerate_moments(rule: SamplingRule, most: int, rate: float) -> np.ndarray:
    """The same five numbers from every sequence of ``most`` rewards, through the collector that training uses."""
    total, first, second = np.zeros(3), 0.0, 0.0
    for rewards in itertools.product((0.0, 1.0), repeat=most):
        chance = math.prod(rate if reward else 1 - rate for reward in rewards)
        collector = Collector(rule, 1)
        waiting = collector.start()
        drawn: list[float] = []
        while waiting:
            ask = waiting.pop(0)
            for sample in ask.samples:
                drawn.append(rewards[sample])
                waiting += collector.add(0, sample, rewards[sample])
        trained = np.asarray(collector.select().rewards)
        advantages = trained - np.mean(drawn)
        gradient = float(np.mean(advantages * (trained - rate)))
        wording = float(np.sum(advantages**2)) / len(trained) ** 2
        total += chance * np.array([len(drawn), len(trained), len(set(drawn)) == 2])
        first, second = first + chance * gradient, second + chance * (gradient**2 + wording)
    return np.array([*total, second - first**2, first**2])


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.85])
@pytest.mark.parametrize(
    ("rule", "most"),
    [
        (Uniform(4), 4),
        (Uniform(7, 4, "balance"), 7),
        (ada_seq_pos(2, round_size=3, max_samples=8), 8),
        (ada_seq_balance(2, round_size=2, max_samples=8), 8),
    ],
)
def test_moments_are_those_of_every_sequence_of_rewards(rule, most, rate):
    np.testing.assert_allclose(moments(rule, rate), enumerate_moments(rule, most, rate), atol=1e-12)


def test_known_numbers():
    """Hand-computed: p = 1/4 and 3/4, groups of 4, and the laws of Ada-Seq with its defaults."""
    rates = np.array([0.25, 0.75])
    by_name = {arm.name: evaluate(arm, rates) for arm in arms(rates, Budget())}
    contrast = 1 - 0.25**4 - 0.75**4
    assert by_name["uniform 4"].contrast == pytest.approx(contrast)
    assert by_name["uniform 4"].cost == pytest.approx(4 / contrast)
    assert by_name["ada-seq-balance"].samples == pytest.approx(stopping_law(ada_seq_balance(), 0.25).expected_samples)
    tenth = np.array([0.1])
    known = {arm.name: evaluate(arm, tenth).samples for arm in arms(tenth, Budget())}
    assert known["ada-seq-balance"] == pytest.approx(20.9625, abs=1e-4)
    assert known["ada-seq-pos"] == pytest.approx(13.5643, abs=1e-4)


def test_rules_that_divide_a_budget_spend_it_exactly():
    rates = parse_rates(DEFAULT_RATES)
    assert rates.size == 100
    for arm in arms(rates, Budget(samples=6)):
        if arm.name.startswith(("allotted", "ada-est", "gvm")):
            assert evaluate(arm, rates).samples == pytest.approx(6)
        if arm.name == "gvm":
            assert all(rule.next_samples(0, 0, 0, 0) == 0 for rule in arm.rules[:19])  # p = 0: nothing to learn


def test_from_the_command_line(capsys):
    assert TOOL["main"](["--rates", "0.1:3", "0.5", "--samples", "4", "--max-samples", "8"]) == 0
    shown = capsys.readouterr().out
    assert "4 prompts, mean pass rate 0.200" in shown
    assert all(name in shown for name in ("ada-seq-balance", "dapo 4", "gvm"))
