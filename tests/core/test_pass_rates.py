"""Pass rates of prompts as sampling learns them, and of an evaluation with their intervals."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.sampling.pass_at_k import mean_interval, pass_at_k, wilson_interval
from megarl.core.sampling.pass_rates import PassRateCounts
from megarl.errors import CheckpointError


def test_hand_computed():
    rates = PassRateCounts(3)
    assert rates.rates().tolist() == [0.5] * 3
    expected = [0.16666666666666666, 0.14705882352941177, 0.2886497064579257]
    for samples, positives, rate in zip((4, 8, 8), (0, 1, 4), expected, strict=True):
        rates.update([1], [samples], [positives])
        np.testing.assert_allclose(rates.rates([1]), [rate], rtol=0, atol=1e-12)
    assert rates.rates([0, 2]).tolist() == [0.5, 0.5]


def test_a_pooled_prior_learns_from_prompts_that_came_before():
    """Prompts of an unknown data set, never seen twice: the estimate of the next ones nears the mean of all."""
    generator, pooled, fixed = np.random.default_rng(0), PassRateCounts(400, pooled=True), PassRateCounts(400)
    truth = generator.beta(0.5, 4.5, size=400)
    for step in range(10):
        prompts = np.arange(step * 32, step * 32 + 32)
        for rates in (pooled, fixed):
            rates.update(prompts, [8] * 32, generator.binomial(8, truth[prompts]))
    unseen = np.arange(320, 400)
    assert abs(pooled.rates(unseen)[0] - truth.mean()) < 0.03
    assert (
        np.abs(pooled.rates(unseen) - truth[unseen]).mean() < 0.5 * np.abs(fixed.rates(unseen) - truth[unseen]).mean()
    )
    # (alpha + sum of shares) / (alpha + beta + prompts), then (K + 2 m) / (N + 2)
    hand = PassRateCounts(3, decay=1.0, pooled=True)
    hand.update([0, 1], [4, 2], [1, 2])
    mean = (1 + 1 / 4 + 1) / (2 + 2)
    np.testing.assert_allclose(hand.rates(), [(1 + 2 * mean) / 6, (2 + 2 * mean) / 4, mean])
    again = PassRateCounts(3, decay=1.0, pooled=True)
    again.load_state_dict(hand.state_dict())
    np.testing.assert_array_equal(again.rates(), hand.rates())


def test_no_decay_counts_and_full_decay_forgets():
    counts, last = PassRateCounts(1, decay=1.0, alpha=2, beta=6), PassRateCounts(1, decay=0.0)
    for k in (4, 0):
        counts.update([0], [4], [k])
        last.update([0], [4], [k])
    assert counts.rates()[0] == (4 + 2) / (8 + 8)
    assert last.rates()[0] == 1 / 6


def test_a_prompt_that_occurs_twice_counts_as_one_draw():
    twice, once = PassRateCounts(4), PassRateCounts(4)
    for rates in (twice, once):
        rates.update([3, 0], [8, 2], [2, 1])
    twice.update([3, 0, 3], [4, 1, 4], [1, 0, 2])
    once.update([0, 3], [1, 8], [0, 3])
    np.testing.assert_array_equal(twice.rates(), once.rates())


def test_state_goes_round():
    rates = PassRateCounts(3)
    rates.update([0, 2], [8, 8], [1, 8])
    state = rates.state_dict()
    other = PassRateCounts(3)
    other.load_state_dict(state)
    np.testing.assert_array_equal(other.rates(), rates.rates())
    other.update([0], [8], [8])
    rates.update([0], [8], [8])
    np.testing.assert_array_equal(other.rates(), rates.rates())
    # neither shares its arrays with the state
    assert state["samples"].tolist() == [8, 0, 8]
    with pytest.raises(CheckpointError, match=r"samples is \[3\], expected \[4\]"):
        PassRateCounts(4).load_state_dict(state)
    with pytest.raises(CheckpointError, match="positives is missing"):
        other.load_state_dict({"samples": state["samples"]})
    np.testing.assert_array_equal(other.rates(), rates.rates())


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 8), data=st.data())
def test_pass_at_k_is_the_share_of_subsets(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    outcomes = [1] * c + [0] * (n - c)
    subsets = list(itertools.combinations(outcomes, k))
    assert abs(pass_at_k([n], [c], k)[0] - sum(map(any, subsets)) / len(subsets)) < 1e-12
    # C(100000, 256) is far beyond a float
    assert abs(pass_at_k([100_000], [1], 256)[0] - 256 / 100_000) < 1e-9


def test_mean_interval():
    found = mean_interval([0.0, 0.5, 1.0, 0.5])
    half = 1.959963984540054 * math.sqrt(0.5 / 3) / 2
    np.testing.assert_allclose([found.value, found.low, found.high], [0.5, 0.5 - half, 0.5 + half], atol=1e-12)
    assert mean_interval([0.0, 1.0], 0.5).high < mean_interval([0.0, 1.0], 0.9).high


def test_wilson():
    found = wilson_interval(2, 10)
    # the ends solve (x - p)^2 = z^2 x (1 - x) / n
    for end in (found.low, found.high):
        assert abs((end - 0.2) ** 2 - 1.959963984540054**2 * end * (1 - end) / 10) < 1e-12
    assert found.low < 0.2 < found.high
    assert wilson_interval(0, 10).low == 0
    assert wilson_interval(0, 10).high > 0.2
    assert wilson_interval(10, 10).high == 1
