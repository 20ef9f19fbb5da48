"""The weight versions behind the tokens and routes of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megarl.core.types import Rollout
from megarl.errors import RolloutError

if TYPE_CHECKING:
    from megarl.core.metrics import Stat


def _row_mask(rollout: Rollout) -> np.ndarray:
    """bool [T], True where the engine recorded the token's routes."""
    return np.zeros(rollout.num_tokens, bool) if rollout.routed_mask is None else rollout.routed_mask.astype(bool)


def row_versions(rollout: Rollout) -> np.ndarray:
    """Return int32 [T], the weight version behind the experts of each row."""
    return rollout.weight_versions if rollout.route_versions is None else rollout.route_versions


def provenance_metrics(rollouts: Sequence[Rollout], trainer_version: int) -> dict[str, Stat]:
    """Return metrics of missing rows, mixed weight versions and staleness.

    - ``rollout/missing_rows_fraction``: tokens without a row; only if rollouts have routes.
    - ``routes/stale_rows_fraction``: rows recorded under another weight version than the token, as after a pause in
      which the engine takes new weights and prefills again; only if rollouts have routes.
    - ``rollout/mixed_versions_fraction``: responses with tokens of several versions.
    - ``rollout/staleness_mean``, ``_max``: updates between the version of a response token and ``trainer_version``, the
      weights at the start of the step.
    """
    from megarl.core.metrics import Stat  # it imports torch, and files of traces are written where that is missing

    versions = np.concatenate([rollout.weight_versions for rollout in rollouts])
    starts = np.cumsum([0, *(rollout.num_tokens for rollout in rollouts[:-1])])
    mixed = np.minimum.reduceat(versions, starts) != np.maximum.reduceat(versions, starts)
    ages = trainer_version - versions[np.concatenate([rollout.loss_mask for rollout in rollouts]) != 0]
    columns = {"rollout/mixed_versions_fraction": mixed, "rollout/staleness_mean": ages}
    if any(rollout.routed_mask is not None for rollout in rollouts):
        columns |= {
            "rollout/missing_rows_fraction": ~np.concatenate([*map(_row_mask, rollouts)]),
            "routes/stale_rows_fraction": np.concatenate([*map(_stale, rollouts)]),
        }
    means = Stat.means_of({name: (int(column.sum()), len(column)) for name, column in columns.items()})
    return means | {"rollout/staleness_max": Stat.max(ages)}


def refuse_mixed_versions(rollouts: Sequence[Rollout]) -> None:
    """RolloutError naming the first response whose tokens or routes come from more than one version of the weights."""
    for rollout in rollouts:
        versions = rollout.weight_versions
        if np.count_nonzero(versions != versions[:1]):
            raise RolloutError(
                f"{rollout.label}: its tokens come from weight versions {np.unique(versions).tolist()}, expected one: "
                'let the engine abort what runs when weights change, or allow it with train.mixed_versions = "allow"'
            )
        stale = _stale(rollout)
        if num_stale := np.count_nonzero(stale):
            token = int(stale.argmax())
            raise RolloutError(
                f"{rollout.label}: the experts of token {token} were chosen by weight version "
                f"{row_versions(rollout)[token]}, the token by version {versions[token]} ({num_stale} such rows): "
                'flush the engine\'s cache when weights change, or allow it with train.mixed_versions = "allow"'
            )


def _stale(rollout: Rollout) -> np.ndarray:
    """Return bool [T], True for a row recorded under another weight version than the token."""
    if rollout.route_versions is None:
        return np.zeros(rollout.num_tokens, bool)
    return _row_mask(rollout) & (row_versions(rollout) != rollout.weight_versions)
