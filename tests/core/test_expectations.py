from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.sampling.stopping_law import expected_samples


def close(actual, expected, tol=1e-9):
    assert abs(actual - expected) <= tol, f"{actual} is not {expected}"


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
def test_refusals(call):
    with pytest.raises(ValueError, match="expected"):
        call()
