"""The figures of a response, the limits, and what a verdict says; numbers by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.core.metrics import finalize
from megarl.core.types import TrainBatch
from megarl.watch.limits import TRIPWIRES
from megarl.watch.tripwires import (
    Drops,
    count_flips,
    count_k3,
    drop_evidence,
    learnt_limits,
    usual_means,
)

LIMITS = np.array([0.05, 0.25, TRIPWIRES.evidence])
NO_RUN = [0.0] * 4


def gap(
    sample: int, k3: float, flip: float, tokens: float = 996, largest: float = 0.0, generated: float | None = None
) -> list[float]:
    """A response with these means over its tokens and four more; ``generated`` is the flip of generated tokens."""
    flips = [(tokens + 4) * rate for rate in (flip, flip if generated is None else generated)]
    return [0, sample, largest, (tokens + 4) * k3 + largest, tokens, flips[0], tokens, flips[1], tokens, *NO_RUN]


def verdict(*rows: list[float], limits: np.ndarray = LIMITS) -> Drops:
    return Drops(np.array(rows), limits)


def test_k3_of_a_response_by_hand() -> None:
    old = torch.log(torch.tensor([0.9, 0.5, 0.2, 0.0, 0.5, 0.5, 1e-9, 0.5], dtype=torch.float64))
    rollout = torch.log(torch.tensor([0.1, 0.5, 0.4, 0.3, 0.5, 0.0, 0.9, 0.25], dtype=torch.float64))
    mask = torch.tensor([False, True, True, True, False, True, True, True])
    found = count_k3(old, rollout, mask, torch.tensor([0, 4, 4, 8]))
    halved, doubled = 0.5 - 1 + math.log(2), 2 - 1 - math.log(2)
    # A token that training gives probability 0 counts 1, one that the rollout gives 0 does not count.
    expected = [[1.0, 0 + halved + 1, 3], [0, 0, 0], [1.0, 1 + doubled, 2]]
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_flips_are_counted_over_all_and_over_generated_tokens_that_have_a_row() -> None:
    lengths, mask = [3, 2], [False, True, True, False, True]
    nothing = torch.zeros(5)
    batch = TrainBatch(nothing, torch.tensor([0, 3, 5]), torch.tensor(mask), nothing, nothing)
    batch = replace(batch, routed_mask=torch.tensor([True, True, False, True, True]))
    shared = np.array([[2, 1], [0, 1], [2, 2], [2, 0]])
    assert sum(lengths) == 5
    assert count_flips(shared, 2, batch)[:, :4].tolist() == [[1.5, 2, 1, 1], [0.5, 2, 0.5, 1]]


def test_limits_are_exclusive_and_each_figure_is_held_to_its_own() -> None:
    found = verdict(gap(0, 0.05, 0.25), gap(1, 0.0501, 0.0), gap(2, 0.0, 0.2501), gap(3, 0.0, 0.0, generated=0.26))
    assert found.over[:, :2].tolist() == [[False, False], [True, False], [False, True], [False, True]]
    assert not found.over[:, 2].any()
    assert found.reasons()[0, 1] == "k3 0.0501, native flip 0%"
    assert set(found.reasons()) == {(0, 1), (0, 2), (0, 3)}
    off = verdict(gap(0, 0.9, 0.9), limits=np.full(3, np.inf))
    assert not off.dropped.any()


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 100])
def test_one_odd_token_drops_no_response_however_short(tokens: int) -> None:
    rows = [[0, 0, 1.0, 1.0, tokens, 0, 0, 0, 0, *NO_RUN], *(gap(s, 0.0, 0.0) for s in range(1, 9))]
    assert not verdict(*rows).dropped.any()


@pytest.mark.parametrize(("k3", "dropped"), [(0.6, 64), (0.04, 0)])
def test_many_short_responses_prove_together_what_each_one_does_not(k3: float, dropped: int) -> None:
    short = [[0, sample, k3, k3, 1, 0, 0, 0, 0, *NO_RUN] for sample in range(64)]
    assert verdict(*short).dropped.sum() == dropped


def test_a_response_without_generated_tokens_is_not_judged() -> None:
    found = verdict([0, 0, 0, 0, 0, 9, 9, 0, 0, *NO_RUN], gap(1, 0.0, 0.0))
    assert found.judged.tolist() == [False, True]
    assert not found.dropped.any()
    assert verdict([0, 0, 0, 0, 0, 9, 9, 0, 0, *NO_RUN]).share == 0.0


def test_what_is_usual_is_the_median_and_its_deviations_by_hand() -> None:
    rows = [gap(0, 0.01, 0.05), gap(1, 0.02, 0.07), gap(2, 0.03, 0.06), gap(3, 0.05, 0.1), gap(4, 0.9, 0.99)]
    nothing_generated = [0, 5, 0, 0, 0, 9, 9, 0, 0, *NO_RUN]
    # Medians 0.03 and 0.07; deviations 0.02, 0.01, 0, 0.02, 0.87 and 0.02, 0, 0.01, 0.03, 0.92.
    expected = [0.03 + 3.5 * 0.02, 0.07 + 3.5 * 0.02]
    assert usual_means(np.array([*rows, nothing_generated])) == pytest.approx(expected)
    assert usual_means(np.array([nothing_generated])) == [0.0, 0.0]


@pytest.mark.parametrize("wrong", [4, 63])
def test_wrong_responses_cannot_loosen_the_limits(wrong: int) -> None:
    rng = np.random.default_rng(0)
    honest = [gap(s, *(rng.exponential(2e-3), 0.06 + 0.01 * rng.normal()), tokens=12) for s in range(128 - wrong)]
    foreign = [gap(s, 0.25, 0.45, tokens=12) for s in range(128 - wrong, 128)]
    limits = learnt_limits([usual_means(np.array([*honest, *foreign]))])
    assert limits[0] < 0.2
    found = Drops(np.array([*honest, *foreign]), np.array([*limits, TRIPWIRES.evidence]))
    assert found.dropped[-wrong:].all()
    if wrong == 4:
        assert limits == [0.05, 0.25]
        assert not found.dropped[:-wrong].any()


@pytest.mark.parametrize(
    ("usual", "limits"),
    [
        ([[0.0, 0.0]], [0.05, 0.25]),
        ([[0.02, 0.12]], [0.1, 0.3]),
        ([[0.5, 0.9]], [0.3, 0.5]),
        ([[0.02, 0.12], [0.5, 0.9], [0.5, 0.9]], [0.1, 0.3]),  # later steps do not loosen what the self-test has set
        ([[0.5, 0.9], [0.02, 0.12], [0.02, 0.12]], [0.1, 0.3]),
    ],
)
def test_learnt_limits_have_bounds_and_only_tighten(usual: Any, limits: list[float]) -> None:
    assert learnt_limits(usual) == pytest.approx(limits)


def test_drops_persist_by_a_likelihood_ratio_by_hand() -> None:
    assert drop_evidence(4, 128) == pytest.approx(4 * math.log(6) + 124 * math.log(0.97 / 0.995))
    assert drop_evidence(0, 128) < 0 < drop_evidence(1, 32)
    # At the honest rate of 0.5 % drops, the evidence falls from step to step.
    assert 0.995 * drop_evidence(0, 1) + 0.005 * drop_evidence(1, 1) < 0


def test_a_run_of_foreign_rows_drops_the_response_and_is_named() -> None:
    limit = TRIPWIRES.evidence
    rows = [gap(s, 0.001, 0.05) for s in range(8)]
    rows[3][9:], rows[5][9:] = [limit + 0.1, 120, 127, 8], [limit, 1, 2, 2]
    found = verdict(*rows)
    assert found.dropped.nonzero()[0].tolist() == [3]
    where = "rows 120 to 127 are of other tokens (8 of 996 rows are foreign)"
    assert found.reasons()[0, 3] == f"k3 0.001, native flip 5%, {where}"
    assert "1 of 8 responses dropped; rows 120 to 127" in found.describe()
    assert finalize(found.metrics())["tripwires/foreign_runs"] == 1
    assert not verdict(*rows, limits=np.array([0.05, np.inf, np.inf])).dropped.any()


def test_without_routes_only_k3_speaks() -> None:
    rows = [[0, sample, 0.0, 600.0 if sample < 3 else 1.0, 996, 0, 0, 0, 0, *NO_RUN] for sample in range(10)]
    told = verdict(*rows).describe()
    assert "no routes, 3 of 10 responses dropped" in told
    assert "dropped" in verdict(gap(0, 0.001, 0.05)).describe()
