from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.sampling.expectations import (
    balanced_slope,
    expected_samples,
    inverse_sampling_mean,
    inverse_sampling_rate,
    samples_variance,
    tier_cost,
)


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
    close(samples_variance(0.05, 4, 0), 4 * 0.95 / 0.05**2)
    assert expected_samples(0.0, 0, 3) == 3
    assert expected_samples(0.3, 0, 0) == 0


@pytest.mark.parametrize(("rate", "good", "bad"), [(0, 1, 0), (1, 0, 1), (0, 2, 2), (1, 1, 1)])
def test_a_class_that_never_comes(rate, good, bad):
    assert expected_samples(rate, good, bad) == math.inf
    assert samples_variance(rate, good, bad) == math.inf


@settings(max_examples=40, deadline=None)
@given(rate=st.floats(0.1, 0.9), good=st.integers(0, 4), bad=st.integers(0, 4))
def test_mean_and_variance_against_a_walk(rate, good, bad):
    """The chance of every pair of counts, sample by sample."""
    alive, first, second = {(good, bad): 1.0}, 0.0, 0.0
    for drawn in range(600):
        left = {key: x for key, x in alive.items() if key != (0, 0)}
        first += sum(left.values())
        second += (2 * drawn + 1) * sum(left.values())
        alive = {}
        for (g, b), x in left.items():
            for key, chance in (((max(g - 1, 0), b), rate), ((g, max(b - 1, 0)), 1 - rate)):
                alive[key] = alive.get(key, 0.0) + x * chance
    close(expected_samples(rate, good, bad), first, 1e-9)
    close(samples_variance(rate, good, bad), second - first**2, 1e-6)


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.45, 0.5, 0.55, 0.99, 1.0])
@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_share_under_inverse_sampling(rate, k):
    total, chance = 0.0, rate**k
    for n in range(k, 6000):
        total += k / n * chance
        chance *= n / (n - k + 1) * (1 - rate)
    close(inverse_sampling_mean(rate, k), total, 1e-10)


def test_share_under_inverse_sampling_is_too_large():
    close(inverse_sampling_mean(0.1, 1), 0.2558427881104495)
    assert inverse_sampling_mean(0.0, 3) == 0
    assert inverse_sampling_mean(0.1, 100) > 0.1


@pytest.mark.parametrize(("rate", "k"), [(0.1, 2), (0.4, 5)])
def test_the_corrected_share_is_unbiased(rate, k):
    total, chance = 0.0, rate**k
    for n in range(k, 4000):
        total += inverse_sampling_rate(k, n) * chance
        chance *= n / (n - k + 1) * (1 - rate)
    close(total, rate, 1e-10)


def test_slope_of_the_balanced_batch():
    for rate, slope in ((0.5, 1.0), (0.1, 4.5555555556), (0.01, 49.5050505051)):
        close(balanced_slope(rate), slope, 1e-10)
        close(balanced_slope(1 - rate), slope, 1e-10)


@settings(max_examples=40, deadline=None)
@given(rate=st.floats(0.05, 0.95), share=st.floats(0, 1))
def test_slope_is_that_of_the_gradient(rate, share):
    """A Bernoulli policy with logit t: d ln P(r) / dt = r - p, and dp/dt = p q."""
    q = 1 - rate
    gradient = share * (1 - rate) * q + (1 - share) * (-rate) * (-rate)
    close(gradient, balanced_slope(rate, share) * rate * q)
    close(balanced_slope(rate, rate), 1.0)

    def objective(p):
        return math.log(p / (1 - p)) / 2 - p

    close((objective(rate + 1e-6) - objective(rate - 1e-6)) / 2e-6, balanced_slope(rate), 1e-5)


def test_tiers():
    tiers, solved = (4, 32, 256), (0.627, 0.169, 0.017)
    close(tier_cost(tiers, solved), 4 + 28 * 0.373 + 224 * 0.204)
    close(tier_cost(tiers, solved), 60.14)
    close(tier_cost(tiers, solved, reuse=False), 68.16)
    # what a post prints lacks the prompts that are never solved
    close(tier_cost(tiers, solved) - 0.187 * 256, 12.268)
    assert tier_cost([8], [0.0]) == 8


@pytest.mark.parametrize(
    "call",
    [
        lambda: expected_samples(-0.1, 1, 1),
        lambda: expected_samples(0.5, -1, 1),
        lambda: samples_variance(math.nan, 1, 1),
        lambda: inverse_sampling_mean(0.5, 0),
        lambda: inverse_sampling_rate(1, 5),
        lambda: inverse_sampling_rate(6, 5),
        lambda: balanced_slope(0.0),
        lambda: balanced_slope(0.5, 1.5),
        lambda: tier_cost((32, 4), (0.1, 0.1)),
        lambda: tier_cost((4, 32), (0.9, 0.2)),
        lambda: tier_cost((4, 32), (0.9,)),
    ],
)
def test_refusals(call):
    with pytest.raises(ValueError, match="expected"):
        call()
