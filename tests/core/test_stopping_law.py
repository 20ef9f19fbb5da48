from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.choices.stopping import Allotted, Sequential, Uniform, ada_seq_balance, ada_seq_pos
from megarl.core.sampling import expected_samples

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


def test_hand_computed():
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


def test_rounds_of_one_reach_the_closed_form():
    for rate, good, bad in ((0.5, 4, 4), (0.3, 1, 1), (0.2, 3, 0)):
        law = stopping_law(Sequential(good, bad, 1, 200, train_size=None), rate)
        close(law.expected_samples, expected_samples(rate, good, bad), 1e-6)
    close(expected_rate(stopping_law(ada_seq_pos(round_size=1, max_samples=300), 0.1)), -0.1 * math.log(0.1) / 0.9)


def test_a_solved_or_hopeless_prompt_stops_at_the_cap():
    for rate in (0.0, 1.0):
        law = stopping_law(ada_seq_balance(), rate)
        assert law.samples.tolist() == [32]
        assert law.contrast == 0
    with pytest.raises(ValueError, match="pass rate is"):
        stopping_law(Uniform(2), 1.5)


def test_contrast():
    close(stopping_law(Uniform(8), 0.1).contrast, 1 - 0.9**8 - 0.1**8)
    # 43 % of groups of 8 are all wrong at p = 0.1, not the 19 % that a source prints
    close(1 - stopping_law(Uniform(8), 0.1).contrast - 0.1**8, 0.4304672100000001)
    close(stopping_law(Uniform(4), 0.5).contrast, 0.875)


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
    ("k", "rate", "samples"),
    [
        (1, 0.05, 20.05263157894737),
        (1, 0.1, 10.11111111111111),
        (1, 0.5, 3),
        (1, 0.8, 5.25),
        (4, 0.05, 80.00033287828948),
        (4, 0.1, 40.00506444444444),
        (4, 0.5, 10.1875),
        (4, 0.8, 20.07328),
    ],
)
def test_both_classes(k, rate, samples):
    close(expected_samples(rate, k, k), samples)
    close(expected_samples(1 - rate, k, k), samples)
    if k == 1:
        close(expected_samples(rate, 1, 1), 1 / (rate * (1 - rate)) - 1)


def test_one_class():
    close(expected_samples(0.8, 4, 0), 5)
    close(expected_samples(0.05, 4, 0), 80)
    close(expected_samples(0.05, 0, 4), 4 / 0.95)
    assert expected_samples(0.0, 0, 3) == 3
    assert expected_samples(0.3, 0, 0) == 0


@pytest.mark.parametrize(("rate", "good", "bad"), [(0, 1, 0), (1, 0, 1), (0, 2, 2), (1, 1, 1)])
def test_a_class_that_never_comes(rate, good, bad):
    assert expected_samples(rate, good, bad) == math.inf


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


@pytest.mark.parametrize(
    "call",
    [
        lambda: expected_samples(-0.1, 1, 1),
        lambda: expected_samples(0.5, -1, 1),
        lambda: expected_samples(math.nan, 1, 1),
    ],
)
def test_what_is_no_rate_or_count(call):
    with pytest.raises(ValueError, match="expected"):
        call()
