"""Partition sequences into micro-batches, and pack rollouts into the columns that train.

Kept sets are the vocabulary ids that a token was drawn from, where sampling leaves out the others; training computes
log-probabilities over the same sets, as DeepSeek-V3.2 does (2512.02556, section 3.1, "Keep Sampling Mask"). A token
without a set was drawn from the whole vocabulary, or not drawn at all.

No random numbers: the same lengths give the same micro-batches on every rank and in every resumed run.
"""

import heapq
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

from megarl.core.advantages.groups import Values
from megarl.core.ratios import LOGPROB_TOLERANCE, segment_expand
from megarl.core.types import REPLAYED, Rollout, TrainBatch
from megarl.errors import NumericsError, RolloutError, TraceError, refusal

_BY_SEQUENCE_OR_ID = ("cu_seqlens", "kept_ids", "kept_offsets")
TOKEN_COLUMNS = tuple(field.name for field in fields(TrainBatch) if field.name not in _BY_SEQUENCE_OR_ID)
"""The fields of TrainBatch with one entry per token."""


def partition(lengths: Sequence[int], max_tokens: int, min_bins: int = 1) -> list[list[int]]:
    """Split sequences into balanced micro-batches of at most max_tokens each.

    Longest-first placement into the emptiest of as many bins as first-fit-decreasing needs, or min_bins if that is
    more; the bins of first-fit if they alone hold all. Returns sequence indices, ascending within a bin, bins ordered
    by their first index. Raises ValueError if one sequence alone exceeds max_tokens, or there are fewer sequences than
    min_bins.
    """
    _check_lengths(lengths, min_bins)
    for sequence, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(refusal("long_sequence", sequence=sequence, length=length, most=max_tokens))
    if not lengths:
        return []
    first_fit: list[list[int]] = []
    room: list[int] = []
    for sequence in _longest_first(lengths):
        index = next((i for i, left in enumerate(room) if lengths[sequence] <= left), len(room))
        if index == len(room):
            first_fit.append([])
            room.append(max_tokens)
        first_fit[index].append(sequence)
        room[index] -= lengths[sequence]
    bins = _place(lengths, len(first_fit), max_tokens) or sorted(map(sorted, first_fit))
    return spread(bins, lengths, max_tokens, min_bins)


def spread(bins: list[list[int]], lengths: Sequence[int], max_tokens: int, min_bins: int) -> list[list[int]]:
    """Return micro-batches of ``partition`` as at least min_bins ones, which are no longer than max_tokens either.

    Ranks agree on a number in this way: each partitions, then spreads to the largest count. There must be as many
    sequences.
    """
    return bins if len(bins) >= min_bins else _place(lengths, min_bins, max_tokens) or _divide(bins, lengths, min_bins)


def partition_into(lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Split sequences into exactly num_bins non-empty bins of nearly equal tokens, longest first into the emptiest.

    Returns sequence indices, ascending within a bin, bins ordered by their first index. The fullest bin holds at most
    4/3 of the best possible (Graham 1969). Raises ValueError if there are fewer sequences than bins.
    """
    _check_lengths(lengths, num_bins)
    return _place(lengths, num_bins) or []


def pack(rollouts: Sequence[Rollout], advantages: Values | Sequence[np.ndarray]) -> TrainBatch:
    """Put rollouts back to back, in the given order, with their advantages.

    advantages: [N], one per sequence; or a list of N arrays, [T_n], one per token. Of routes only the mask is packed.
    Raises RolloutError or TraceError, naming group and sample, if a column does not fit its tokens or only some
    rollouts carry kept sets; NumericsError if the log-probability of a loss token is NaN or above 0, or an advantage is
    not finite. ValueError without rollouts, or for another number of advantages.
    """
    if not rollouts:
        raise ValueError("there are no rollouts to pack, expected at least one")
    for rollout in rollouts:
        _check_shapes(rollout)
    loss_mask = np.concatenate([r.loss_mask for r in rollouts])
    logprobs = np.concatenate([r.rollout_logprobs for r in rollouts])
    bounds = np.cumsum([0, *(len(rollout.tokens) for rollout in rollouts)])
    _check_values(rollouts, loss_mask, logprobs, bounds)
    kept_ids, kept_offsets = pack_kept(rollouts)
    return TrainBatch(
        tokens=_tensor(np.concatenate([r.tokens for r in rollouts]), np.int64),
        cu_seqlens=torch.from_numpy(bounds),
        loss_mask=_tensor(loss_mask, np.bool_),
        rollout_logprobs=_tensor(logprobs, np.float32),
        advantages=_per_token(advantages, rollouts, bounds),
        routed_mask=_pack_masks(rollouts),
        weight_versions=_tensor(np.concatenate([r.weight_versions for r in rollouts]), np.int32),
        kept_ids=kept_ids,
        kept_offsets=kept_offsets,
    )


def _per_token(advantages: Values | Sequence[np.ndarray], rollouts: Sequence[Rollout], bounds: np.ndarray) -> Tensor:
    """float32 [T]."""
    if len(advantages) != len(rollouts):
        raise ValueError(f"advantages are [{len(advantages)}], expected [{len(rollouts)}], one per rollout")
    if isinstance(advantages[0], np.ndarray):
        columns = [np.asarray(column) for column in advantages]
        for rollout, column in zip(rollouts, columns, strict=True):
            if column.shape != (rollout.num_tokens,):
                raise ValueError(f"{rollout.label}: advantages are {list(column.shape)}, expected one per token")
        values = np.concatenate(columns)
    else:
        of_sequence = torch.as_tensor(advantages, dtype=torch.float32, device="cpu").numpy()
        if of_sequence.ndim != 1:
            raise ValueError(f"advantages are {list(of_sequence.shape)}, expected [{len(rollouts)}], one per rollout")
        values = np.repeat(of_sequence, np.diff(bounds))
    if (bad := np.flatnonzero(~np.isfinite(values))).size:
        owner = rollouts[np.searchsorted(bounds, bad[0], "right") - 1]
        raise NumericsError(f"{owner.label}: the advantage is {values[bad[0]]}, expected a finite number")
    return _tensor(values, np.float32)


def has_routes(rollout: Rollout) -> bool:
    """Return whether there are routes, here or on another rank."""
    return rollout.routed_experts is not None or rollout.routed_mask is not None


def drop_routes(rollout: Rollout) -> Rollout:
    """Return the rollout without routes, as other ranks hold it; its mask still says which rows exist."""
    mask = rollout.routed_mask
    if mask is None and rollout.routed_experts is not None:
        mask = np.ones(rollout.num_tokens, bool)
    return replace(rollout, **dict.fromkeys(REPLAYED), routed_mask=mask)


def select(batch: TrainBatch, sequences: Sequence[int] | Tensor) -> TrainBatch:
    """Return the batch of the given sequences, in the given order; IndexError if one does not exist. sequences: [R]."""
    indices = torch.as_tensor(sequences, dtype=torch.int64, device=batch.cu_seqlens.device).reshape(-1)
    if bool(((indices < 0) | (indices >= batch.num_sequences)).any()):
        raise IndexError(f"sequences {indices.tolist()} of a batch of {batch.num_sequences}: expected 0..N-1")
    cu_seqlens, index = take_segments(batch.cu_seqlens, indices)
    columns = {name: getattr(batch, name) for name in TOKEN_COLUMNS}
    selected = {name: column[index] for name, column in columns.items() if column is not None}
    if batch.kept_ids is not None and batch.kept_offsets is not None:
        selected["kept_offsets"], kept_index = take_segments(batch.kept_offsets, index)
        selected["kept_ids"] = batch.kept_ids[kept_index]
    return replace(batch, cu_seqlens=cu_seqlens, **selected)


def take_segments(bounds: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bounds int64 [R+1] of the chosen segments back to back, and the index int64 of each of their entries.

    bounds: integer [N+1], segment n is ``[bounds[n], bounds[n+1])``; chosen: int64 [R], in any order.
    """
    lengths = (bounds[segments + 1] - bounds[segments]).long()  # not of all segments: a batch is taken apart into many
    new_bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    shift = segment_expand(bounds[segments] - new_bounds[:-1], new_bounds)
    return new_bounds, torch.arange(shift.numel(), device=shift.device) + shift


def _check_lengths(lengths: Sequence[int], num_bins: int) -> None:
    for sequence, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"sequence {sequence} has {length} tokens, expected at least 1")
    if num_bins < 1 or (num_bins > len(lengths) and lengths):
        raise ValueError(refusal("few_sequences", num=len(lengths), bins=num_bins))


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist()


def _place(lengths: Sequence[int], num_bins: int, max_tokens: int | None = None) -> list[list[int]] | None:
    """Put sequences, longest first, into the emptiest of num_bins; None as soon as one would exceed max_tokens."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, index) for index in range(num_bins)]
    for sequence in _longest_first(lengths):
        load, index = heap[0]
        if max_tokens is not None and load + lengths[sequence] > max_tokens:
            return None
        bins[index].append(sequence)
        heapq.heapreplace(heap, (load + lengths[sequence], index))
    return sorted(sorted(members) for members in bins if members)


def _divide(bins: list[list[int]], lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Halve the fullest bin until there are num_bins; bins only become shorter, and fit."""
    bins = list(bins)
    while len(bins) < num_bins:
        fullest = max((members for members in bins if len(members) > 1), key=lambda m: sum(lengths[i] for i in m))
        bins.remove(fullest)
        bins += [[fullest[i] for i in half] for half in partition_into([lengths[i] for i in fullest], 2)]
    return sorted(bins)


def _tensor(column: np.ndarray, dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(column.astype(dtype, copy=False))


def _pack_masks(rollouts: Sequence[Rollout]) -> Tensor | None:
    """bool [T], where there are routes, here or on another rank; None if a rollout lacks them."""
    if not all(map(has_routes, rollouts)):
        return None
    masks = [np.ones(r.num_tokens, bool) if r.routed_mask is None else r.routed_mask for r in rollouts]
    return _tensor(np.concatenate(masks), np.bool_)


def _check_shapes(rollout: Rollout) -> None:
    num_tokens = rollout.num_tokens
    if not num_tokens:
        raise RolloutError(f"{rollout.label} has no tokens, not even a prompt")
    for column in ("loss_mask", "rollout_logprobs", "weight_versions"):
        shape = getattr(rollout, column).shape
        if shape != (num_tokens,):
            raise RolloutError(f"{rollout.label}: {column} is {list(shape)}, expected [{num_tokens}]")
    experts, mask = rollout.routed_experts, rollout.routed_mask
    if experts is not None and (experts.ndim != 3 or len(experts) != num_tokens):
        raise TraceError(f"{rollout.label}: routes are {list(experts.shape)}, expected [{num_tokens}, L, K]")
    if (gates := rollout.gate_weights) is not None and (experts is None or gates.shape != experts.shape):
        expected = "no routes" if experts is None else list(experts.shape)
        raise TraceError(f"{rollout.label}: gate_weights are {list(gates.shape)} with routes {expected}")
    if mask is not None and mask.shape != (num_tokens,):
        raise TraceError(f"{rollout.label}: routed_mask is {list(mask.shape)}, expected [{num_tokens}]")


def _check_values(rollouts: Sequence[Rollout], loss_mask: np.ndarray, logprobs: np.ndarray, bounds: np.ndarray) -> None:
    """Check the columns [T] of all rollouts at once, because a call for each costs more than its few tokens."""
    if (first := loss_mask[bounds[:-1]]).any():
        raise RolloutError(refusal("no_prompt", label=rollouts[int(first.argmax())].label))
    wrong = loss_mask & ~(logprobs <= LOGPROB_TOLERANCE)  # NaN too
    if wrong.any():
        token = int(wrong.argmax())
        sequence = int(np.searchsorted(bounds, token, "right")) - 1
        facts = {"label": rollouts[sequence].label, "value": logprobs[token], "token": token - bounds[sequence]}
        raise NumericsError(refusal("not_a_logprob", **facts))
    for rollout in rollouts:
        check_kept(rollout)


def check_kept(rollout: Rollout) -> None:
    """RolloutError unless the rollout has no sets, or one with the token itself for each token of the loss."""
    counts, ids = rollout.kept_counts, rollout.kept_ids
    if counts is None and ids is None:
        return
    label = rollout.label
    shapes = [None if values is None else list(values.shape) for values in (counts, ids)]
    if counts is None or ids is None or shapes != [[rollout.num_tokens], [int(counts.sum())]] or counts.min() < 0:
        raise RolloutError(refusal("kept_shapes", rollout=rollout, counts=shapes[0], ids=shapes[1]))
    owner = np.repeat(np.arange(rollout.num_tokens), counts)
    num_hits = np.bincount(owner[ids == rollout.tokens[owner]], minlength=rollout.num_tokens)
    wrong = num_hits != np.where(rollout.loss_mask, 1, counts > 0)
    if wrong.any():
        token = int(wrong.argmax())
        facts = {"num": counts[token], "hits": num_hits[token]}
        raise RolloutError(refusal("kept_of_other_tokens", label=label, token=token, **facts))
    rows = owner * (1 << 32) + ids
    if (np.diff(rows) <= 0).any() and len(np.unique(rows)) < len(rows):  # ascending ids are distinct without a search
        raise RolloutError(refusal("kept_twice", label=label))


def pack_kept(rollouts: Sequence[Rollout]) -> tuple[Tensor | None, Tensor | None]:
    """Return kept_ids int32 [M] and kept_offsets int64 [T+1] of rollouts back to back; (None, None) without sets.

    RolloutError if only some of the rollouts with loss have them.
    """
    if all(rollout.kept_counts is None for rollout in rollouts):
        return None, None
    counts, ids = [np.zeros(1, np.int64)], []
    for rollout in rollouts:
        if rollout.kept_counts is None or rollout.kept_ids is None:
            if rollout.loss_mask.any():
                raise RolloutError(f"{rollout.label} has no kept sets, but others of the batch do")
            counts.append(np.zeros(rollout.num_tokens, np.int64))
        else:
            counts.append(rollout.kept_counts.astype(np.int64))
            ids.append(rollout.kept_ids.astype(np.int32, copy=False))
    return torch.from_numpy(np.concatenate(ids)), torch.from_numpy(np.concatenate(counts).cumsum())
