"""The sequential test over rows: numbers by hand, a brute-force oracle, its false alarms, and what it finds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.types import TrainBatch
from megarl.watch import foreign_rows
from megarl.watch.foreign_rows import SHARES, find_foreign, row_scores
from megarl.watch.limits import TRIPWIRES

LIMIT = TRIPWIRES.evidence

FLIPS = (0.01, 0.06, 0.15)


def batch_of(lengths: Sequence[int], present: np.ndarray | None = None) -> TrainBatch:
    total = sum(lengths)
    column, mask = torch.zeros(total), torch.ones(total, dtype=torch.bool)
    routed = mask if present is None else torch.from_numpy(present)
    return TrainBatch(column, torch.tensor([0, *np.cumsum(lengths)]), mask, column, column, routed_mask=routed)


def honest_rows(rng: np.random.Generator, total: int, num_layers: int, topk: int, flip: float) -> np.ndarray:
    """[T, L] experts shared: each pair loses one with a probability of its token, which varies."""
    rate = rng.beta(flip * 30, (1 - flip) * 30, total)
    return (topk - (rng.random((total, num_layers)) < rate[:, None])).astype(np.uint8)


def foreign_of(rng: np.random.Generator, total: int, num_layers: int, topk: int, num_experts: int) -> np.ndarray:
    """[T, L] experts that independent rows of K of E experts share."""
    return rng.hypergeometric(topk, num_experts - topk, topk, (total, num_layers)).astype(np.uint8)


def log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def beta_binomial(count: int, flip: float) -> list[float]:
    a, b = flip * 30, (1 - flip) * 30
    return [math.comb(count, k) * math.exp(log_beta(a + k, b + count - k) - log_beta(a, b)) for k in range(count + 1)]


def test_scores_of_two_layers_with_one_expert_each_by_hand() -> None:
    a, b = 4.5, 25.5
    honest = [b * (b + 1) / (30 * 31), 2 * a * b / (30 * 31), a * (a + 1) / (30 * 31)]
    ratio = [1 / 3 / (0.995 * p + 0.005 / 3) for p in honest]
    expected = [[math.log(1 - share + share * one) for one in ratio] for share in (1 / 2, 1 / 16, 1 / 128)]
    np.testing.assert_allclose(row_scores(2, 1), expected, atol=1e-3)


@pytest.mark.parametrize("num_layers", [1, 3, 4, 48, 61])
@pytest.mark.parametrize("topk", [1, 2, 4, 8])
def test_no_honest_row_is_evidence_on_average(num_layers: int, topk: int) -> None:
    """E exp(score) <= 1: the exponential of a CUSUM is then a supermartingale, and the union over T rows its bound."""
    scores = row_scores(num_layers, topk)
    assert (np.diff(scores, axis=1) >= 0).all()
    assert scores.max() <= math.log(1 / foreign_rows.ODD)
    for flip in FLIPS:
        mean = np.exp(scores) @ beta_binomial(num_layers * topk, flip / topk)
        assert (mean <= 1.0).all(), flip


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_run_is_the_one_that_trying_all_of_them_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 25, 4)
    num_layers, topk = int(rng.integers(1, 6)), int(rng.integers(1, 4))
    present = rng.random(lengths.sum()) < 0.8
    rows = np.where(rng.random((lengths.sum(), 1)) < 0.6, topk, rng.integers(0, topk + 1, (lengths.sum(), num_layers)))
    found = find_foreign(rows[present].astype(np.uint8), topk, batch_of(lengths, present))
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    for of_one, first, end in zip(found, bounds, bounds[1:], strict=False):
        places = np.flatnonzero(present[first:end])
        differing = num_layers * topk - rows[first:end].sum(1)[places].astype(int)
        if not len(places):
            assert not of_one.any()
            continue
        flip = 0.15
        runs = _all_runs(row_scores(num_layers, topk, flip)[:, differing])
        if max(runs)[0] - math.log(3 * len(places)) > LIMIT:
            flip = max(flip, min(0.5, math.ceil(20 * (np.median(differing) + 0.5) / num_layers) / 20))
            runs = _all_runs(row_scores(num_layers, topk, flip)[:, differing])
        largest = max(runs)[0]
        assert of_one[0] == pytest.approx(max(0.0, largest - math.log(3 * len(places))))
        assert (*of_one[1:3],) in {(places[i], places[j]) for value, i, j in runs if value == largest}
        least = math.log(0.5 + 0.5 * 20)
        assert of_one[3] == (row_scores(num_layers, topk, flip)[0][differing] > least).sum()


def _all_runs(scores: np.ndarray) -> list[tuple[float, int, int]]:
    sums = np.concatenate([np.zeros((len(scores), 1)), scores.cumsum(1)], 1)
    pairs = ((i, j) for i in range(scores.shape[1]) for j in range(i, scores.shape[1]))
    return [(float((sums[:, j + 1] - sums[:, i]).max()), i, j) for i, j in pairs]


@pytest.mark.parametrize("total", [2_000, 8_000, 32_000, 128_000])
@pytest.mark.parametrize(
    ("num_layers", "topk", "num_experts", "size"), [(48, 8, 128, 8), (4, 8, 128, 32), (4, 2, 8, 32)]
)
def test_acceptance_a_short_foreign_run_is_found_in_a_response_of_any_length(
    total: int, num_layers: int, topk: int, num_experts: int, size: int
) -> None:
    rng = np.random.default_rng(total)
    for flip in FLIPS:
        rows = honest_rows(rng, total, num_layers, topk, flip)
        quiet = find_foreign(rows, topk, batch_of([total]))[0]
        assert quiet[0] <= LIMIT
        for first in (0, total // 3, total - size):
            changed = rows.copy()
            changed[first : first + size] = foreign_of(rng, size, num_layers, topk, num_experts)
            evidence, begin, end, foreign = find_foreign(changed, topk, batch_of([total]))[0]
            assert evidence > LIMIT, (flip, first)
            assert abs(begin - first) <= 5
            assert abs(end - (first + size - 1)) <= 5
            assert foreign >= size // 2


@pytest.mark.parametrize(("gap", "count"), [(2, 20), (4, 20), (20, 60), (60, 200)])
def test_foreign_rows_may_be_scattered(gap: int, count: int) -> None:
    rng = np.random.default_rng(gap)
    rows = honest_rows(rng, 16_000, 48, 8, 0.06)
    places = 1000 + gap * np.arange(count)
    rows[places] = foreign_of(rng, count, 48, 8, 128)
    evidence, first, last, foreign = find_foreign(rows, 8, batch_of([16_000]))[0]
    assert evidence > LIMIT
    assert (first, last, foreign) == (places[0], places[-1], count)


@pytest.mark.parametrize("flip", [0.3, 0.45])
def test_a_response_that_disagrees_evenly_is_left_to_its_mean(flip: float) -> None:
    rng = np.random.default_rng(1)
    rows = honest_rows(rng, 8000, 4, 1, flip)
    assert find_foreign(rows, 1, batch_of([8000]))[0, 0] <= LIMIT
    rows[2000:2060] = 0
    assert find_foreign(rows, 1, batch_of([8000]))[0, 0] > LIMIT


def test_nothing_compared_is_no_evidence() -> None:
    assert find_foreign(np.zeros((0, 3), np.uint8), 2, batch_of([4, 2], np.zeros(6, bool))).tolist() == [[0.0] * 4] * 2
    assert math.exp(-LIMIT) == pytest.approx(1e-5)
    assert len(SHARES) == 3
