"""Several turns of one conversation as one sequence: the columns of the earlier turns, and what the last one adds.

A later turn begins with all tokens of the earlier turn, as a prompt. Log-probabilities and routes of sampled tokens are
taken from the turn that sampled the token. The earlier turn has no route for its last token, because the engine had not
processed that token; the row comes from the later turn. Tokens and rows have the version of the
weights behind them.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.core.types import REPLAYED, Rollout
from megarl.errors import RolloutError, TraceError, refusal

if TYPE_CHECKING:
    from megarl.core.metrics import Stat


def known_rows(rollout: Rollout) -> int:
    """Return the number of leading tokens with a row: ``known_rows`` of a request that continues the rollout."""
    if rollout.routed_experts is None or rollout.routed_mask is None:
        return 0
    return rollout.num_tokens if rollout.routed_mask.all() else int(rollout.routed_mask.argmin())


def join(earlier: Rollout, later: Rollout) -> Rollout:
    """``later`` with the columns of ``earlier`` for the tokens that both have.

    Generated tokens of both are trained on; rows come from ``earlier`` where it has them, from ``later`` elsewhere.
    Both have routes, or neither has; so with kept sets, or RolloutError. Raises TraceError if ``later`` does not begin
    with the tokens of ``earlier``, or if their routes are of different models.
    """
    label = later.label
    size = earlier.num_tokens
    if later.prompt_length < size or not np.array_equal(later.tokens[:size], earlier.tokens):
        raise TraceError(refusal("tokens_of_turns", label=label, found=later.prompt_length, size=size))
    names = ("loss_mask", "rollout_logprobs", "weight_versions")
    pairs = {name: (getattr(earlier, name), getattr(later, name)) for name in names}
    if earlier.reread_mask is not None or later.reread_mask is not None:
        pairs["reread_mask"] = _mask_of(earlier, "reread_mask"), _mask_of(later, "reread_mask")
    columns: Any = {name: np.concatenate([old, new[size:]]) for name, (old, new) in pairs.items()}
    return replace(later, **columns, **_join_kept(earlier, later, label), **_join_routes(earlier, later, label))


def cut(rollout: Rollout, size: int) -> Rollout:
    """Return the first ``size`` tokens with their columns, as of a response that stopped there."""
    num_kept = 0 if rollout.kept_counts is None else int(rollout.kept_counts[:size].sum())
    columns = ((field.name, getattr(rollout, field.name)) for field in fields(rollout))
    arrays = ((name, column) for name, column in columns if isinstance(column, np.ndarray))
    ends = {name: column[: num_kept if name == "kept_ids" else size] for name, column in arrays}
    return replace(rollout, **ends, finish_reason="stop")


def _join_kept(earlier: Rollout, later: Rollout, label: str) -> dict[str, Any]:
    if earlier.kept_counts is None and later.kept_counts is None:
        return {}
    if earlier.kept_counts is None or earlier.kept_ids is None or later.kept_counts is None or later.kept_ids is None:
        raise RolloutError(f"{label}: one turn has kept sets and the other has none: sample both with the same top_p")
    old, new = earlier.kept_counts, later.kept_counts
    num_known = int(new[: len(old)].sum())  # the later turn's prompt has no sets
    ids = np.concatenate([earlier.kept_ids, later.kept_ids[num_known:]])
    return {"kept_counts": np.concatenate([old, new[len(old) :]]), "kept_ids": ids}


def _join_routes(earlier: Rollout, later: Rollout, label: str) -> dict[str, Any]:
    pairs = {name: (getattr(earlier, name), getattr(later, name)) for name in (*REPLAYED, "routed_mask")}
    pairs = {name: pair for name, pair in pairs.items() if any(column is not None for column in pair)}
    if not pairs:
        return {}
    for name in ("routed_experts", "routed_mask", *pairs):
        old, new = pairs.get(name, (None, None))
        if old is None or new is None:
            raise TraceError(f"{label}: one turn has {name} here and the other has none: join them where both have")
        if old.shape[1:] != new.shape[1:]:
            raise TraceError(refusal("models_of_turns", label=label, name=name, a=[*old.shape[1:]], b=[*new.shape[1:]]))
    # Rows that were dropped after a retraction stay missing: the later turn's are of yet another pass.
    kept_rows = np.flatnonzero(pairs["routed_mask"][0] | _mask_of(earlier, "reread_mask"))

    def rows(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        merged = second.copy()
        merged[kept_rows] = first[kept_rows]
        return merged

    pairs["route_versions"] = row_versions(earlier), row_versions(later)
    return {name: rows(*pair) for name, pair in pairs.items()}


def _mask_of(rollout: Rollout, name: str) -> np.ndarray:
    """bool [T], a mask of the rollout; absent: False."""
    mask = getattr(rollout, name)
    return np.zeros(rollout.num_tokens, bool) if mask is None else mask.astype(bool)


def row_versions(rollout: Rollout) -> np.ndarray:
    """Return int32 [T], the weight version behind the experts of each row."""
    return rollout.weight_versions if rollout.route_versions is None else rollout.route_versions


def provenance_metrics(rollouts: Sequence[Rollout], trainer_version: int) -> "dict[str, Stat]":
    """Return metrics of missing rows, mixed weight versions and staleness.

    - ``rollout/missing_rows_fraction``: tokens without a row; only if rollouts have routes.
    - ``routes/stale_rows_fraction``: rows recorded under another weight version than the token, as after a pause in
      which the engine takes new weights and prefills again; only if rollouts have routes.
    - ``routes/reread_rows_fraction``: tokens that the engine may have read again after a retraction, their rows with
      them; only if rollouts have routes.
    - ``rollout/mixed_versions_fraction``: responses with tokens of several versions.
    - ``rollout/staleness_mean``, ``_max``: updates between the version of a response token and ``trainer_version``, the
      weights at the start of the step; ``rollout/stale_tokens_fraction``: response tokens of an older version.
    """
    from megarl.core.metrics import Stat  # it imports torch, and files of traces are written where that is missing

    versions = np.concatenate([rollout.weight_versions for rollout in rollouts])
    starts = np.cumsum([0, *(rollout.num_tokens for rollout in rollouts[:-1])])
    mixed = np.minimum.reduceat(versions, starts) != np.maximum.reduceat(versions, starts)
    ages = trainer_version - versions[np.concatenate([rollout.loss_mask for rollout in rollouts]) != 0]
    columns = {
        "rollout/mixed_versions_fraction": mixed,
        "rollout/staleness_mean": ages,
        "rollout/stale_tokens_fraction": ages > 0,
    }
    if any(rollout.routed_mask is not None for rollout in rollouts):
        columns |= {
            "rollout/missing_rows_fraction": ~np.concatenate([_mask_of(r, "routed_mask") for r in rollouts]),
            "routes/stale_rows_fraction": np.concatenate([*map(_stale, rollouts)]),
            "routes/reread_rows_fraction": np.concatenate([_mask_of(r, "reread_mask") for r in rollouts]),
        }
    means = Stat.means_of({name: (int(column.sum()), len(column)) for name, column in columns.items()})
    return means | {"rollout/staleness_max": Stat.max(ages)}


def _stale(rollout: Rollout) -> np.ndarray:
    """Return bool [T], True for a row recorded under another weight version than the token."""
    return _mask_of(rollout, "routed_mask") & (row_versions(rollout) != rollout.weight_versions)
