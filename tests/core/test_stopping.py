"""Rules that stop sampling a prompt, and the exact law of what they draw."""

from __future__ import annotations

import math
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.choices.stopping import Allotted, Sequential, Uniform, ada_seq_balance, ada_seq_pos, pass_tiers
from megarl.core.sampling import expected_samples
from megarl.errors import ConfigError


def test_uniform_and_allotted_ask_once():
    assert [Uniform(8).next_samples(0, asked, 0, 0) for asked in (0, 8)] == [8, 0]
    rule = Allotted((3, 0))
    assert [rule.next_samples(0, 0, 0, 0), rule.next_samples(0, 3, 0, 0), rule.next_samples(1, 0, 0, 0)] == [3, 0, 0]


def test_tiers_reuse_samples_and_cost_what_the_oracle_says():
    rule, costs = pass_tiers(), []
    for solved_after in (4, 32, 256, 10**9):  # a prompt whose first success is the last sample of a tier, or never
        asked = 0
        while more := rule.next_samples(0, asked, int(asked >= solved_after), asked - int(asked >= solved_after)):
            asked += more
        costs.append(asked)
    assert costs == [4, 32, 256, 256]
    assert np.dot([0.627, 0.169, 0.017, 0.187], costs) == pytest.approx(60.14)
    assert rule.keeps(1, 3) == "balance"
    assert rule.keeps(0, 256) == "pos"
    for tiers in ((4, 4), (8, 4), (0, 4)):
        with pytest.raises(ConfigError, match="expected to rise"):
            pass_tiers(tiers=tiers)


def test_rounds_until_both_classes_are_there():
    """The released defaults: rounds of 8, at most 4."""
    assert (ada_seq_pos().train_size, ada_seq_pos().threshold) == (4, 0.7)
    odd, rule = ada_seq_balance(5), ada_seq_balance()
    assert (odd.positives, odd.negatives) == (2, 3)
    assert rule.next_samples(0, 0, 0, 0) == 8
    assert rule.next_samples(0, 8, 1, 7) == 8
    assert rule.next_samples(0, 8, 7, 1) == 8
    assert rule.next_samples(0, 8, 2, 6) == 0
    assert rule.next_samples(0, 32, 0, 32) == 0
    rule = Sequential(1, 1, round_size=5, max_samples=12)
    assert [rule.next_samples(0, asked, 0, asked) for asked in (0, 5, 10, 12)] == [5, 5, 2, 0]
    rule = ada_seq_balance()
    # one sample failed: it counts as drawn
    assert rule.next_samples(0, 32, 1, 30) == 0
    assert ada_seq_pos().next_samples(0, 8, 8, 0) == 0


def test_what_trains_after_an_exit_and_after_giving_up():
    rule = ada_seq_pos(positives=5)
    assert (rule.keeps(5, 3), rule.keeps(4, 28)) == ("balance", "pos")
    rule = ada_seq_balance()
    assert (rule.keeps(2, 6), rule.keeps(1, 31)) == ("balance", "balance")
    assert Sequential(2, 2, fallback="any").keeps(1, 31) == "any"
    assert Uniform(8, 2, "balance").keeps(0, 8) == "balance"
    assert Allotted((8,)).train_size is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Uniform(4, train_size=5), "train_size is 5"),
        (lambda: Sequential(0, 0), "0 positives and 0 negatives"),
        (lambda: Sequential(20, 20), "max_samples = 32"),
        (lambda: Sequential(1, -1), "-1 negatives"),
        (lambda: Sequential(1, 1, train_size=0), "train_size is 0"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_records_that_a_configuration_makes_load_nothing_heavy():
    code = (
        "import sys, megarl.core.choices.stopping, megarl.core.choices.credit\n"
        "sys.exit(any(name in sys.modules for name in ('numpy', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


stopping_law = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "simulate.py"))["stopping_law"]

RULES = [
    ada_seq_balance(),
    ada_seq_pos(),
    ada_seq_pos(positives=3),
    Sequential(2, 1, 3, 13),
    Uniform(6),
    Allotted((5,)),
]


def close(actual, expected, tol=1e-9):
    assert abs(actual - expected) <= tol, f"{actual} is not {expected}"


def expected_rate(law):
    """E[positives / samples]: not p where the rule looks at what it draws."""
    return float(law.probabilities @ (law.positives / law.samples))


def test_the_law_by_hand():
    """Rounds of 8, at most 4, until there are 2 and 2, or one positive."""
    balance = ada_seq_balance()
    for rate, samples in ((0.1, 20.96248198548135), (0.9, 20.96248198548135), (0.5, 8.56667423248291)):
        close(stopping_law(balance, rate).expected_samples, samples)
    close(stopping_law(balance, 0.05).expected_samples, 27.31465819273196)
    law = stopping_law(balance, 0.1)
    close(law.probabilities[(law.positives >= 2) & (law.samples - law.positives >= 2)].sum(), 0.8435766259644532)
    close(stopping_law(ada_seq_pos(), 0.1).expected_samples, 13.564285375696443)


@settings(max_examples=40, deadline=None)
@given(
    rate=st.floats(0, 1),
    size=st.integers(1, 5),
    rounds=st.integers(1, 6),
    good=st.integers(0, 3),
    bad=st.integers(0, 3),
)
def test_is_what_survives_each_round(rate, size, rounds, good, bad):
    if not 1 <= good + bad <= size * rounds:
        return
    rule = Sequential(good, bad, size, size * rounds, train_size=None)
    alive = 0.0
    for r in range(rounds):
        drawn = r * size
        pmf = [math.comb(drawn, s) * rate**s * (1 - rate) ** (drawn - s) for s in range(drawn + 1)]
        alive += sum(x for s, x in enumerate(pmf) if s < good or drawn - s < bad)
    law = stopping_law(rule, rate)
    close(law.expected_samples, size * alive)
    close(law.probabilities.sum(), 1.0)


def test_a_solved_or_hopeless_prompt_stops_at_the_cap():
    for rate in (0.0, 1.0):
        law = stopping_law(ada_seq_balance(), rate)
        assert law.samples.tolist() == [32]
        assert law.contrast == 0
    with pytest.raises(ValueError, match="pass rate is"):
        stopping_law(Uniform(2), 1.5)


@pytest.mark.parametrize("rule", RULES)
def test_sums_over_prompts_are_unbiased(rule):
    """Wald: E[positives] = p E[samples], whatever the rule looks at."""
    law = stopping_law(rule, 0.13)
    close(law.probabilities @ law.positives, 0.13 * law.expected_samples, 1e-12)


def test_large_counts_do_not_overflow():
    law = stopping_law(Uniform(3000), 0.5)
    close(law.probabilities.sum(), 1)
    close(expected_rate(law), 0.5)
    assert 2000 < expected_samples(0.5, 1000, 1000) < 2100


@pytest.mark.parametrize(
    ("rate", "good", "bad", "samples"),
    [
        (0.1, 1, 1, 10.11111111111111),
        (0.5, 4, 4, 10.1875),
        (0.8, 4, 0, 5),
        (0.05, 0, 4, 4 / 0.95),
        (0.0, 0, 3, 3),
        (0.3, 0, 0, 0),
        (0, 1, 0, math.inf),
        (1, 0, 1, math.inf),
        (0, 2, 2, math.inf),
    ],
)
def test_expected_samples_by_hand(rate, good, bad, samples):
    assert expected_samples(rate, good, bad) == pytest.approx(samples, abs=1e-9)
    assert expected_samples(1 - rate, bad, good) == pytest.approx(samples, abs=1e-9)
    for wrong in ((-0.1, 1, 1), (0.5, -1, 1), (math.nan, 1, 1)):
        with pytest.raises(ValueError, match="expected"):
            expected_samples(*wrong)


@settings(max_examples=40, deadline=None)
@given(rate=st.floats(0.1, 0.9), good=st.integers(0, 4), bad=st.integers(0, 4))
def test_mean_against_a_walk(rate, good, bad):
    """The chance of every pair of counts, sample by sample."""
    alive, first = {(good, bad): 1.0}, 0.0
    for _ in range(600):
        left = {key: x for key, x in alive.items() if key != (0, 0)}
        first += sum(left.values())
        alive = {}
        for (g, b), x in left.items():
            for key, chance in (((max(g - 1, 0), b), rate), ((g, max(b - 1, 0)), 1 - rate)):
                alive[key] = alive.get(key, 0.0) + x * chance
    close(expected_samples(rate, good, bad), first, 1e-9)
