"""Partition sequences into micro-batches, and pack rollouts into the columns that train.

No random numbers: the same lengths give the same micro-batches on every rank and in every resumed run.
"""

import heapq
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

from megarl.core.advantages import Values
from megarl.core.kept import check_kept, pack_kept
from megarl.core.ratios import LOGPROB_TOLERANCE, segment_expand, segment_lengths
from megarl.core.types import Rollout, TrainBatch
from megarl.errors import NumericsError, RolloutError, TraceError

TOKEN_COLUMNS = tuple(
    field.name for field in fields(TrainBatch) if field.name not in ("cu_seqlens", "kept_ids", "kept_offsets")
)
"""The fields of TrainBatch with one entry per token."""


def partition(lengths: Sequence[int], max_tokens: int, min_bins: int = 1) -> list[list[int]]:
    """Split sequences into balanced micro-batches of at most max_tokens each.

    Takes the smallest number of bins for which longest-first placement into the emptiest bin fits, at most as many as
    first-fit-decreasing needs, and at least min_bins: ranks that partition again with the largest count as min_bins end
    with the same number. Returns sequence indices, ascending within a bin, bins ordered by their first index. Raises
    ValueError if one sequence alone exceeds max_tokens, or there are fewer sequences than min_bins.
    """
    _check_lengths(lengths, min_bins)
    for sequence, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(
                f"sequence {sequence} has {length} tokens, more than the {max_tokens} of a micro-batch: "
                f"raise the tokens per micro-batch, or limit prompt and response length"
            )
    bins = _fewest_bins(lengths, max_tokens)
    if len(bins) >= min_bins or not lengths:
        return bins
    even = partition_into(lengths, min_bins)
    return even if _fit(even, lengths, max_tokens) else _divide(bins, lengths, min_bins)


def partition_into(lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Split sequences into exactly num_bins non-empty bins of nearly equal tokens, longest first into the emptiest.

    Returns sequence indices, ascending within a bin, bins ordered by their first index. The fullest bin holds at most
    4/3 of the best possible (Graham 1969). Raises ValueError if there are fewer sequences than bins.
    """
    _check_lengths(lengths, num_bins)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0, index) for index in range(num_bins)]
    for sequence in _longest_first(lengths):
        load, index = heapq.heappop(loads)
        bins[index].append(sequence)
        heapq.heappush(loads, (load + lengths[sequence], index))
    return _sort_bins(bins)


def pack(rollouts: Sequence[Rollout], advantages: Values | Sequence[np.ndarray]) -> TrainBatch:
    """Put rollouts back to back, in the given order, with their advantages.

    advantages: [N], one per sequence; or a list of N arrays, [T_n], one per token. Routes of 16 bits become int16,
    which torch can index on every device. Raises RolloutError or TraceError, naming group and sample, if a column does
    not fit its tokens or only some rollouts carry routes or kept sets; NumericsError if the log-probability of a loss
    token is NaN or above 0, or an advantage is not finite.
    """
    if not rollouts:
        raise ValueError("there are no rollouts to pack, expected at least one")
    for rollout in rollouts:
        _check_rollout(rollout)
    routed_experts, routed_mask = _pack_routes(rollouts)
    kept_ids, kept_offsets = pack_kept(rollouts)
    return TrainBatch(
        tokens=_concatenate([r.tokens for r in rollouts], np.int64),
        cu_seqlens=torch.tensor([0, *(rollout.num_tokens for rollout in rollouts)]).cumsum(0),
        loss_mask=_concatenate([r.loss_mask for r in rollouts], np.bool_),
        rollout_logprobs=_concatenate([r.rollout_logprobs for r in rollouts], np.float32),
        advantages=_per_token(advantages, rollouts),
        routed_experts=routed_experts,
        routed_mask=routed_mask,
        weight_versions=_concatenate([r.weight_versions for r in rollouts], np.int32),
        kept_ids=kept_ids,
        kept_offsets=kept_offsets,
    )


def _per_token(advantages: Values | Sequence[np.ndarray], rollouts: Sequence[Rollout]) -> Tensor:
    """float32 [T]."""
    if len(advantages) != len(rollouts):
        raise ValueError(f"advantages are [{len(advantages)}], expected [{len(rollouts)}], one per rollout")
    if isinstance(advantages[0], np.ndarray):
        columns = [np.asarray(column) for column in advantages]
    else:
        values = torch.as_tensor(advantages, dtype=torch.float32, device="cpu").numpy()
        if values.ndim != 1:
            raise ValueError(f"advantages are {list(values.shape)}, expected [{len(rollouts)}], one per rollout")
        columns = [np.full(rollout.num_tokens, value) for rollout, value in zip(rollouts, values, strict=True)]
    for rollout, column in zip(rollouts, columns, strict=True):
        if column.shape != (rollout.num_tokens,):
            raise ValueError(f"{_name(rollout)}: advantages are {list(column.shape)}, expected one per token")
        if (bad := column[~np.isfinite(column)]).size:
            raise NumericsError(f"{_name(rollout)}: the advantage is {bad[0]}, expected a finite number")
    return _concatenate(columns, np.float32)


def drop_routes(rollout: Rollout) -> Rollout:
    """Return the rollout without routes, as other ranks hold it; its mask still says which rows exist."""
    mask = rollout.routed_mask
    if mask is None and rollout.routed_experts is not None:
        mask = np.ones(rollout.num_tokens, bool)
    return replace(rollout, routed_experts=None, routed_mask=mask)


def select(batch: TrainBatch, sequences: Sequence[int] | Tensor) -> TrainBatch:
    """Return the batch of the given sequences, in the given order; IndexError if one does not exist."""
    chosen = torch.as_tensor(sequences, dtype=torch.int64, device=batch.cu_seqlens.device).reshape(-1)
    if bool(((chosen < 0) | (chosen >= batch.num_sequences)).any()):
        raise IndexError(f"sequences {chosen.tolist()} of a batch of {batch.num_sequences}: expected 0..N-1")
    cu_seqlens, index = take_segments(batch.cu_seqlens, chosen)
    columns = {name: getattr(batch, name) for name in TOKEN_COLUMNS}
    taken = {name: column[index] for name, column in columns.items() if column is not None}
    if batch.kept_ids is not None and batch.kept_offsets is not None:
        taken["kept_offsets"], kept = take_segments(batch.kept_offsets, index)
        taken["kept_ids"] = batch.kept_ids[kept]
    return replace(batch, cu_seqlens=cu_seqlens, **taken)


def take_segments(bounds: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bounds int64 [R+1] of the chosen segments back to back, and the index int64 of each of their entries.

    bounds: integer [N+1], segment n is ``[bounds[n], bounds[n+1])``; chosen: int64 [R], in any order.
    """
    lengths = segment_lengths(bounds)[chosen]
    taken = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    shift = segment_expand(bounds[chosen] - taken[:-1], taken)
    return taken, torch.arange(shift.numel(), device=shift.device) + shift


def _check_lengths(lengths: Sequence[int], num_bins: int) -> None:
    for sequence, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"sequence {sequence} has {length} tokens, expected at least 1")
    if num_bins < 1 or (num_bins > len(lengths) and lengths):
        raise ValueError(
            f"{len(lengths)} sequences do not fill {num_bins} micro-batches: use fewer data-parallel ranks or "
            f"mini-batches, or sample more responses"
        )


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def _fit(bins: list[list[int]], lengths: Sequence[int], max_tokens: int) -> bool:
    return all(sum(lengths[i] for i in part) <= max_tokens for part in bins)


def _fewest_bins(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    first_fit = _first_fit_decreasing(lengths, max_tokens)
    # Longest-first placement balances better than first-fit, but can miss a split that first-fit finds.
    for num_bins in range(max(-(-sum(lengths) // max_tokens), 1), len(first_fit) + 1):
        bins = partition_into(lengths, num_bins)
        if _fit(bins, lengths, max_tokens):
            return bins
    return _sort_bins(first_fit)


def _divide(bins: list[list[int]], lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Halve the fullest bin until there are num_bins; this only shortens bins, so they still fit."""
    bins = list(bins)
    while len(bins) < num_bins:
        fullest = max((part for part in bins if len(part) > 1), key=lambda part: sum(lengths[i] for i in part))
        bins.remove(fullest)
        halves = partition_into([lengths[i] for i in fullest], 2)
        bins += [[fullest[i] for i in half] for half in halves]
    return _sort_bins(bins)


def _first_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for sequence in _longest_first(lengths):
        index = next((i for i, free in enumerate(room) if free >= lengths[sequence]), len(bins))
        if index == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[index].append(sequence)
        room[index] -= lengths[sequence]
    return bins


def _sort_bins(bins: list[list[int]]) -> list[list[int]]:
    return sorted(sorted(part) for part in bins if part)


def _concatenate(columns: Sequence[np.ndarray], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.concatenate(columns).astype(dtype, copy=False))


def _pack_routes(rollouts: Sequence[Rollout]) -> tuple[Tensor | None, Tensor | None]:
    with_routes = [r for r in rollouts if r.routed_experts is not None]
    if not with_routes:
        masks = [r.routed_mask for r in rollouts if r.routed_mask is not None]
        return None, _concatenate(masks, np.bool_) if len(masks) == len(rollouts) else None
    for rollout in rollouts:
        if rollout.routed_experts is None:
            raise TraceError(
                f"{_name(rollout)} has no routes, but others of the batch do: give it zero rows "
                f"with routed_mask False if the engine lost its trace"
            )
    shapes = {r.routed_experts.shape[1:] for r in with_routes if r.routed_experts is not None}
    if len(shapes) > 1:
        raise TraceError(f"routes of different [L, K] in one batch: {sorted(shapes)}; they are of different models")
    experts = np.concatenate([r.routed_experts for r in with_routes if r.routed_experts is not None])
    if experts.dtype != np.uint8:
        if experts.size and experts.max() > np.iinfo(np.int16).max:
            raise TraceError(f"expert {experts.max()} does not fit 16 signed bits: more than 32768 experts")
        experts = experts.astype(np.int16)
    masks = [np.ones(r.num_tokens, bool) if r.routed_mask is None else r.routed_mask for r in rollouts]
    return torch.from_numpy(experts), _concatenate(masks, np.bool_)


def _check_rollout(rollout: Rollout) -> None:
    if not rollout.num_tokens:
        raise RolloutError(f"{_name(rollout)} has no tokens, not even a prompt")
    for column in ("loss_mask", "rollout_logprobs", "weight_versions"):
        shape = getattr(rollout, column).shape
        if shape != (rollout.num_tokens,):
            raise RolloutError(f"{_name(rollout)}: {column} is {list(shape)}, expected [{rollout.num_tokens}]")
    if rollout.loss_mask[0]:
        raise RolloutError(
            f"{_name(rollout)}: its first token is marked as generated, but nothing before it predicts it; "
            f"prompts must not be empty"
        )
    wrong = rollout.loss_mask & ~(rollout.rollout_logprobs <= LOGPROB_TOLERANCE)  # NaN too
    if wrong.any():
        token = int(wrong.argmax())
        raise NumericsError(
            f"{_name(rollout)}: rollout_logprobs is {rollout.rollout_logprobs[token]:g} at token {token}, expected a "
            "log-probability, which is at most 0: these may be raw logits, or probabilities"
        )
    check_kept(rollout)
    experts, mask = rollout.routed_experts, rollout.routed_mask
    if experts is not None and (experts.ndim != 3 or len(experts) != rollout.num_tokens):
        raise TraceError(f"{_name(rollout)}: routes are {list(experts.shape)}, expected [{rollout.num_tokens}, L, K]")
    if mask is not None and mask.shape != (rollout.num_tokens,):
        raise TraceError(f"{_name(rollout)}: routed_mask is {list(mask.shape)}, expected [{rollout.num_tokens}]")


def _name(rollout: Rollout) -> str:
    return f"group {rollout.group} sample {rollout.sample}"
