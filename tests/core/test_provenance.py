"""Every row of routes knows which weights chose it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megarl.core.metrics import finalize
from megarl.core.types import Rollout
from megarl.routes.turns import provenance_metrics, row_versions


def rollout(versions: list[int], present: list[bool] | None = None) -> Rollout:
    length = len(versions)
    return Rollout(
        group=2,
        sample=1,
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=np.arange(length) >= 1,
        rollout_logprobs=np.zeros(length, np.float32),
        routed_experts=np.zeros((length, 1, 1), np.uint8),
        routed_mask=None if present is None else np.array(present),
        weight_versions=np.array(versions, np.int32),
        finish_reason="stop",
    )


def test_rows_have_the_versions_of_their_tokens_unless_the_engine_says_otherwise() -> None:
    assert row_versions(rollout([3, 4])).tolist() == [3, 4]


def test_metrics_count_sources_mixtures_and_rows_of_other_weights() -> None:
    plain = rollout([1, 1, 1, 1], [True, True, True, False])
    mixed = rollout([1, 1, 2, 2], [True] * 4)
    again = replace(rollout([2, 2], [True, True]), route_versions=np.array([3, 2], np.int32))
    found = finalize(provenance_metrics([plain, mixed, again], trainer_version=4))
    assert found["rollout/missing_rows_fraction"] == pytest.approx(0.1)
    assert found["routes/stale_rows_fraction"] == pytest.approx(0.1)
    assert found["rollout/mixed_versions_fraction"] == pytest.approx(1 / 3)
    tokens = [version for one in (plain, mixed, again) for version in one.weight_versions[one.loss_mask]]
    assert found["rollout/staleness_mean"] == pytest.approx(4 - np.mean(tokens))
    assert found["rollout/staleness_max"] == 3


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_masks_may_be_numbers(dtype: type[np.integer]) -> None:
    """As an engine of one's own may return them; ``pack`` takes them too."""
    bools = rollout([1, 2, 2, 3], [True, True, False, True])
    assert bools.routed_mask is not None
    numbers = replace(bools, loss_mask=bools.loss_mask.astype(dtype), routed_mask=bools.routed_mask.astype(dtype))
    found, expected = (finalize(provenance_metrics([one, one], trainer_version=4)) for one in (numbers, bools))
    assert found == expected


def test_a_missing_row_has_no_version_to_differ() -> None:
    gone = replace(rollout([2, 2], [True, False]), route_versions=np.array([2, 9], np.int32))
    assert finalize(provenance_metrics([gone], trainer_version=2))["routes/stale_rows_fraction"] == 0
