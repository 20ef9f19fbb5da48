from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.sampling.gvm import gvm_allocate, gvm_estimates

G, P = [1, 2, 1, 3, 5], [0.125, 0.5, 1, 0, 0.25]


def test_hand_computed():
    assert gvm_allocate(P, G, 40).tolist() == [7, 7, 2, 0, 24]
    scaled = gvm_allocate(P, G, 40 * 10**8) / 1e8
    np.testing.assert_allclose(
        scaled, [6.653312323268308, 6.849231863080561, 2.425195158390473, 0, 24.072260655260656], atol=2e-8
    )


def test_the_weight_peaks_and_falls_to_nothing():
    p = np.sort(np.append(np.geomspace(1e-3, 1, 400), (1e-3) ** 0.5))
    counts = gvm_allocate(p, np.ones_like(p), 10**9)
    assert abs(p[counts.argmax()] - 0.0316227766) < 1e-9
    assert (np.diff(counts[: counts.argmax()]) > 0).all()
    assert (np.diff(counts[counts.argmax() :]) < 0).all()
    # another exponent: (alpha (beta - 1)) ^ (1 / beta)
    q = np.sort(np.append(np.geomspace(1e-3, 1, 400), (0.01 * 2) ** (1 / 3)))
    assert abs(q[gvm_allocate(q, np.ones_like(q), 10**9, alpha=0.01, beta=3).argmax()] - 0.02 ** (1 / 3)) < 1e-9


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 8), st.floats(0.01, 1e3)), min_size=1, max_size=4),
    total=st.integers(0, 14),
    high=st.integers(1, 14),
)
def test_bounded_counts_are_the_best_of_all_that_keep_the_bound(rows, total, high):
    """Of all counts with this sum and bound (brute force), none is better than by what rounding costs."""
    p, g = np.array([k / 8 for k, _ in rows]), np.array([x for _, x in rows])
    if total > high * len(rows):
        with pytest.raises(ValueError, match="in all, not"):
            gvm_allocate(p, g, total, high=high)
        return
    counts = gvm_allocate(p, g, total, high=high)
    assert counts.sum() == total
    assert counts.min() >= 0
    assert counts.max() <= high
    good = p > 0
    if not good.any():
        return
    assert counts[~good].sum() == max(0, total - high * good.sum())
    # Lagrange: n = min(high, s w) with one s; bisection for it.
    weights, to_share = g[good] / np.sqrt(p[good] + 1e-3 / p[good]), min(total, high * int(good.sum()))
    low_s, high_s = 0.0, 1e9
    for _ in range(200):
        middle = (low_s + high_s) / 2
        low_s, high_s = (middle, high_s) if np.minimum(high, middle * weights).sum() < to_share else (low_s, middle)
    shares = np.minimum(high, high_s * weights)
    assert (np.abs(counts[good] - shares) <= 1 + 1e-6).all()
    cost = g[good] ** 2 / p[good] / (1 + 1e-3 / p[good] ** 2)
    every = [n for n in itertools.product(range(1, high + 1), repeat=int(good.sum())) if sum(n) == to_share]
    if every:  # each prompt gets at least one: no integer counts are better than the shares
        assert (cost / shares).sum() <= min((cost / np.array(n)).sum() for n in every) * (1 + 1e-9)


def test_one_prompt_does_not_take_all():
    rates, norms = [0.125] * 15 + [0.25], [1.0] * 15 + [33.3]
    assert gvm_allocate(rates, norms, 128).max() == 79
    counts = gvm_allocate(rates, norms, 128, high=32)
    assert counts.tolist() == [7] * 6 + [6] * 9 + [32]


def test_equal_counts_where_nothing_was_accepted():
    assert gvm_allocate([0, 0, 0], [0, 0, 0], 7).tolist() == [3, 2, 2]


def test_rounding_is_half_even_and_mended_at_the_residuals():
    # 0.5, 0.5, 0.5, 0.5 of 2 round to 0, and the first two get one
    assert gvm_allocate([1] * 4, [1] * 4, 2).tolist() == [1, 1, 0, 0]
    # 1.5 each of 6 rounds to 2 each, and two give one back
    assert gvm_allocate([1] * 4, [1] * 4, 6).tolist() == [1, 1, 2, 2]


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 8), st.floats(0, 1e3)), min_size=1, max_size=12), total=st.integers(0, 200)
)
def test_invariants(rows, total):
    p, g = [k / 8 for k, _ in rows], [x for _, x in rows]
    counts = gvm_allocate(p, g, total)
    assert counts.sum() == total
    assert (counts >= 0).all()
    weights = np.array([x / np.sqrt(y + 1e-3 / y) if y else 0.0 for y, x in zip(p, g, strict=True)])
    if weights.any():
        assert (counts[weights == 0] == 0).all()
        assert (np.abs(counts - total * weights / weights.sum()) <= 1 + 1e-6).all()
    shares = total * weights / (weights.sum() or 1.0)
    if len(set(np.round(shares - np.round(shares), 6).tolist())) == len(rows):  # no ties, which go to the first
        np.testing.assert_array_equal(gvm_allocate(p[::-1], g[::-1], total)[::-1], counts)


def test_estimates():
    prompts, accepted = np.array([0, 1, 0, 1, 1, 2]), np.array([True, False, True, True, False, False])
    rates, mean = gvm_estimates(prompts, accepted, np.array([3.0, np.nan, 5, 2, 9, 1]), 3)
    np.testing.assert_allclose(rates, [1, 1 / 3, 0])
    np.testing.assert_allclose(mean, [4, 2, 0])
