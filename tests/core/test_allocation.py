"""How many samples each prompt gets: by its pass rate, by weights, and by GVM."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.sampling.allocation import (
    allocate,
    allocate_by_weights,
    budget_weights,
    clamp_rates,
    objective_slope,
)
from megarl.core.sampling.gvm import gvm_allocate, gvm_estimates
from megarl.errors import ConfigError

P = [0.1, 0.3, 0.5, 0.9]
OBJECTIVES = ["linear", "log", "raft", "power:0.5", "power:0.3", "power:2", "arcsin"]


@pytest.mark.parametrize(
    ("objective", "counts"),
    [
        ("log", [16, 8, 6, 2]),
        ("raft", [14, 8, 6, 4]),
        ("linear", [6, 10, 10, 6]),
        ("power:0.5", [11, 9, 8, 4]),
        ("arcsin", [8, 8, 8, 8]),
    ],
)
def test_hand_computed(objective, counts):
    assert allocate(P, 32, objective).tolist() == counts
    # the counts are a proportion: with a large total the rounding disappears
    many = allocate(P, 3_200_000, objective) / 1e5
    weights = objective_slope(P, objective) * np.sqrt([p * (1 if objective == "raft" else 1 - p) for p in P])
    np.testing.assert_allclose(many, 32 * weights / weights.sum(), atol=1e-4)
    if objective == "log":
        np.testing.assert_allclose(many, [16.3798527, 8.3402128, 5.4599509, 1.8199836], atol=1e-4)


def test_weights_and_boxes():
    assert allocate_by_weights([1 / p for p in P], 32).tolist() == [19, 7, 4, 2]
    assert allocate_by_weights(budget_weights(P, "inverse:1", 1e-9), 32).tolist() == [19, 7, 4, 2]
    np.testing.assert_allclose(budget_weights(P, "inverse:0.5", 0.1), budget_weights(P, "ada_est", 0.1))
    assert allocate(P, 32, "log", 4, 12).tolist() == [12, 10, 6, 4]
    boxed = allocate(P, 32 * 10**6, "log", 4 * 10**6, 12 * 10**6) / 1e6
    np.testing.assert_allclose(boxed, [12, 9.6696972, 6.3303028, 4], atol=1e-6)


def test_weights_of_zero():
    assert allocate_by_weights([0, 0, 0], 7).tolist() == [3, 2, 2]
    assert allocate_by_weights([0, 1, 3], 14, low=2).tolist() == [2, 3, 9]
    # what the others may not have goes to them all the same: the total is exact
    assert allocate_by_weights([0, 1, 3, 0], 14, low=1, high=4).tolist() == [3, 4, 4, 3]
    assert allocate_by_weights([], 0).tolist() == []


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=1, max_size=12),
    low=st.integers(0, 3),
    room=st.integers(0, 9),
    fill=st.floats(0, 1),
    data=st.data(),
)
def test_invariants(weights, low, room, fill, data):
    size, high = len(weights), low + room
    total = round(size * (low + fill * room))
    counts = allocate_by_weights(weights, total, low, high)
    assert counts.sum() == total
    assert counts.dtype == np.int64
    assert (counts >= low).all()
    assert (counts <= high).all()
    # within one of a common scale: what is below the cap beyond rounding has its share, and so a larger weight has no
    # fewer samples
    for i, j in itertools.permutations(range(size), 2):
        assert weights[i] <= weights[j] or counts[i] >= counts[j] - (weights[j] >= weights[i] * (1 - 1e-6))
    order = data.draw(st.permutations(range(size)))
    moved = allocate_by_weights([weights[i] for i in order], total, low, high)
    if len(set(weights)) == size:
        again = allocate_by_weights([weights[i] * 4 for i in order], total, low, high)
        np.testing.assert_array_equal(moved, again)
    assert sorted(moved.tolist()) == sorted(counts.tolist())


def gradient_variance(rates, counts, objective):
    """``sum f'(p)^2 noise / n``; noise is p (1 - p), or p for "raft"."""
    noise = np.array([p if objective == "raft" else p * (1 - p) for p in rates])
    return float(np.sum(objective_slope(rates, objective) ** 2 * noise / np.array(counts)))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_other_counts_have_less_variance(objective):
    p, total = [0.07, 0.4, 0.8], 24
    variances = {
        (a, b, total - a - b): gradient_variance(p, [a, b, total - a - b], objective)
        for a in range(1, total - 1)
        for b in range(1, total - a)
    }
    found = tuple(allocate(p, total, objective).tolist())
    best = min(variances, key=lambda counts: variances[counts])
    # the continuous optimum is rounded, so it may miss the best whole numbers by one
    assert max(abs(a - b) for a, b in zip(found, best, strict=True)) <= 1
    assert variances[found] <= 1.01 * variances[best]
    assert variances[found] <= gradient_variance(p, [8, 8, 8], objective) + 1e-12


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_slopes_are_derivatives(objective):
    power = float(objective.split(":")[1]) if ":" in objective else 1.0
    f = {"log": math.log, "raft": math.log, "linear": float, "arcsin": lambda p: 2 * math.asin(math.sqrt(p))}.get(
        objective, lambda p: p**power
    )
    for p in P:
        slope = float(objective_slope([p], objective)[0])
        assert abs(slope - (f(p + 1e-6) - f(p - 1e-6)) / 2e-6) < 1e-6 * max(1, slope)


@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name != "raft"])
def test_allotted_counts_times_standardised_advantages_are_the_slope(objective):
    """So a sum over samples needs no weight f' besides."""
    pushes = allocate(P, 10**8, objective) / np.sqrt([p * (1 - p) for p in P])
    slopes = objective_slope(P, objective)
    np.testing.assert_allclose(pushes / pushes[0], slopes / slopes[0], rtol=1e-6)


def test_estimates_of_zero_and_one():
    assert clamp_rates([0, 0.01, 0.5, 1], 8).tolist() == [1 / 16, 1 / 16, 0.5, 15 / 16]
    # without the number of samples only 0 and 1 move, and stay outermost
    assert clamp_rates([0, 0.25, 1], None, default=8).tolist() == [1 / 16, 0.25, 15 / 16]
    assert clamp_rates([0, 0.01, 1], None, default=8).tolist() == [0.01, 0.01, 0.99]
    assert clamp_rates([0, 1], None).tolist() == [0.5, 0.5]
    for objective in OBJECTIVES:
        counts = allocate([0, 0.2, 1], 24, objective)
        assert counts.sum() == 24
        if objective in ("log", "raft", "power:0.3"):
            assert counts[0] == counts.max()
    assert allocate([0.0, 0.0], 8, "log").tolist() == [4, 4]


def test_ada_est():
    rates = np.array([0.0, 0.25, 1.0])
    np.testing.assert_allclose(budget_weights(rates, "ada_est"), 1 / np.sqrt(rates + 1e-3))
    assert allocate_by_weights(budget_weights(rates, "ada_est"), 24, 1, 32).tolist() == [22, 1, 1]
    with pytest.raises(ValueError, match="eps"):
        budget_weights([0.1], "ada_est", eps=0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: allocate([0.1], 4, "power:-1"), ConfigError, "A > 0"),
        (lambda: allocate([1.1], 4, "log"), ValueError, "pass rate 0 is 1.1"),
        (lambda: allocate([0.1, 0.2], 1, "log"), ValueError, "take 2 to 2 in all, not 1"),
        (lambda: allocate([0.1, 0.2], 9, "log", 1, 4), ValueError, "take 2 to 8 in all, not 9"),
        (lambda: allocate([0.1], 4, "log", 3, 2), ValueError, "low <= high"),
        (lambda: allocate_by_weights([math.nan], 4), ValueError, "weight 0 is nan"),
        (lambda: allocate_by_weights([1.0, -1.0], 4), ValueError, "weight 1 is -1"),
        (lambda: allocate_by_weights([[1.0]], 4), ValueError, r"\[B\]"),
        (lambda: clamp_rates([0.1], 0), ValueError, "0 samples"),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()


G, RATES = [1, 2, 1, 3, 5], [0.125, 0.5, 1, 0, 0.25]


def test_gvm_by_hand():
    assert gvm_allocate(RATES, G, 40).tolist() == [7, 7, 2, 0, 24]
    scaled = gvm_allocate(RATES, G, 40 * 10**8) / 1e8
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


def test_nothing_accepted_gives_equal_counts():
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
def test_invariants_of_gvm(rows, total):
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


def test_estimates_of_gvm():
    prompts, accepted, norms = [0, 1, 0, 1, 1, 2], [True, False, True, True, False, False], [3.0, np.nan, 5, 2, 9, 1]
    rates, mean = gvm_estimates(*map(np.array, (prompts, accepted, norms)), 3)
    np.testing.assert_allclose(rates, [1, 1 / 3, 0])
    np.testing.assert_allclose(mean, [4, 2, 0])
