from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.sampling.subsampling import subsample
from megarl.errors import ConfigError, NumericsError

pools = st.lists(st.sampled_from([0.0, 0.2, 0.7, 0.71, 1.0]), max_size=20)


@pytest.mark.parametrize(
    ("rewards", "n", "rule", "chosen"),
    [
        # the first two of each class
        ([0, 1, 0, 0, 1, 1], 4, "balance", [0, 1, 2, 4]),
        # n odd: the larger half is negative
        ([1, 1, 1, 0, 0, 0], 5, "balance", [0, 1, 3, 4, 5]),
        # one class is short, or absent: filled from the other
        ([0, 0, 0, 1, 0, 0], 4, "balance", [0, 1, 2, 3]),
        ([1, 1, 1, 1, 1, 0], 4, "balance", [0, 1, 2, 5]),
        ([0, 0, 0, 0, 0], 4, "balance", [0, 1, 2, 3]),
        ([1, 1, 1, 1, 1], 4, "balance", [0, 1, 2, 3]),
        # fewer than n: all
        ([0, 1, 0], 4, "balance", [0, 1, 2]),
        ([], 4, "balance", []),
        # ceil(4 * 5 / 8) = 3 positives; at least one, and at most all but one
        ([1, 1, 1, 1, 1, 0, 0, 0], 4, "pos", [0, 1, 2, 5]),
        ([0, 0, 0, 0, 0, 0, 0, 1], 4, "pos", [0, 1, 2, 7]),
        ([1, 1, 1, 1, 1, 1, 1, 0], 4, "pos", [0, 1, 2, 7]),
        ([0] * 8, 4, "pos", [0, 1, 2, 3]),
        ([1] * 8, 4, "pos", [0, 1, 2, 3]),
        ([0, 1], 1, "pos", [1]),
        ([0, 0, 1, 0, 1], 2, "any", [0, 1]),
    ],
)
def test_hand_computed(rewards, n, rule, chosen):
    assert subsample(rewards, n, rule).tolist() == chosen


def test_positive_is_above_the_threshold_whatever_the_rewards():
    rewards = [0.7, 0.71, -3.0, 5.0, 0.69]
    assert subsample(rewards, 2, "balance").tolist() == [0, 1]
    assert subsample(rewards, 2, "balance", threshold=1.0).tolist() == [0, 3]


@settings(max_examples=200, deadline=None)
@given(rewards=pools, n=st.integers(1, 9), rule=st.sampled_from(["balance", "pos", "any"]), seed=st.integers(0, 99))
def test_invariants(rewards, n, rule, seed):
    for chosen in (subsample(rewards, n, rule), subsample(rewards, n, rule, seed=seed)):
        assert len(chosen) == min(n, len(rewards))
        assert chosen.tolist() == sorted(set(chosen.tolist()))
        assert all(0 <= i < len(rewards) for i in chosen)
        if rule != "any":
            # as the released code counts: first the targets, then filling up from the class that has more
            pos = sum(r > 0.7 for r in rewards)
            neg, take = len(rewards) - pos, min(n, len(rewards))
            share = max(min(math.ceil(n * pos / max(len(rewards), 1)), take - 1), 1)
            good = min(n // 2 if rule == "balance" else share, pos)
            bad = min((n if rule == "balance" else take) - good, neg)
            good += min(pos - good, take - good - bad)
            assert sum(rewards[i] > 0.7 for i in chosen) == good
    np.testing.assert_array_equal(subsample(rewards, n, rule, seed=seed), subsample(rewards, n, rule, seed=seed))


def test_a_seed_gives_every_sample_of_a_class_the_same_chance():
    rewards = [1.0] * 4 + [0.0] * 6
    counts = np.bincount(np.concatenate([subsample(rewards, 4, "balance", seed=s) for s in range(3000)]), minlength=10)
    # Binomial(3000, 1/2) and (3000, 1/3), five standard deviations
    assert abs(counts[:4] - 1500).max() < 5 * 27.4
    assert abs(counts[4:] - 1000).max() < 5 * 25.9


def test_refusals():
    with pytest.raises(NumericsError, match="reward 1 is NaN"):
        subsample([0.0, math.nan], 2, "balance")
    with pytest.raises(ValueError, match="n of at least 1"):
        subsample([0.0], 0, "balance")
    with pytest.raises(ConfigError, match="'best'"):
        subsample([0.0], 1, "best")
