"""Rollouts as one array of bytes, so that ranks exchange them as tensors and not as pickled objects.

The header is int64 [N + 1, 6]: the number of sequences, then (group, sample, tokens, finish reason, flags, kept ids) of
each. The columns follow, each of all sequences back to back: tokens int32, rollout_logprobs float32, weight_versions
int32, loss_mask uint8; then of the sequences that have them: routed_mask uint8, route_versions int32, kept_counts
int32, kept_ids int32.
Routes are left out, because every rank needs other rows of them.
"""

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from megarl.core.types import FinishReason, Rollout
from megarl.errors import RolloutError

_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
_HEADER = 6
_ALWAYS = (("tokens", "i4"), ("rollout_logprobs", "f4"), ("weight_versions", "i4"), ("loss_mask", "?"))
_SOME = (("routed_mask", "?"), ("route_versions", "i4"), ("kept_counts", "i4"), ("kept_ids", "i4"))


def encode_rollouts(rollouts: Sequence[Rollout]) -> np.ndarray:
    """uint8 [bytes]; ``decode_rollouts`` gives the rollouts back, without routed_experts."""
    header = np.zeros((len(rollouts) + 1, _HEADER), np.int64)
    header[0, 0] = len(rollouts)
    for row, rollout in zip(header[1:], rollouts, strict=True):
        flags = sum(1 << bit for bit, (name, _) in enumerate(_SOME) if getattr(rollout, name) is not None)
        num_kept = 0 if rollout.kept_ids is None else len(rollout.kept_ids)
        row[:] = (
            rollout.group,
            rollout.sample,
            rollout.num_tokens,
            _REASONS.index(rollout.finish_reason),
            flags,
            num_kept,
        )
    arrays = [header.reshape(-1).view(np.uint8)]
    for name, dtype in (*_ALWAYS, *_SOME):
        for rollout in rollouts:
            values = getattr(rollout, name)
            if values is None:
                continue
            if name != "kept_ids" and len(values) != rollout.num_tokens:
                raise RolloutError(
                    f"{rollout.label}: {name} has {len(values)} entries, expected {rollout.num_tokens}, one per token"
                )
            arrays.append(np.ascontiguousarray(values, dtype).view(np.uint8))
    return np.concatenate(arrays)


def num_encoded_bytes(rollouts: int, tokens: int, *, routed: bool) -> int:
    """Length of ``encode_rollouts`` for that many rollouts and tokens; routed: they have a routed_mask."""
    per_token = sum(np.dtype(dtype).itemsize for _, dtype in (*_ALWAYS, *_SOME[:routed]))
    return 8 * _HEADER * (rollouts + 1) + per_token * tokens


def decode_rollouts(data: np.ndarray) -> list[Rollout]:
    """Inverse of ``encode_rollouts``. RolloutError for bytes that are no whole encoding."""
    try:
        number = int(data[: 8 * _HEADER].view(np.int64)[0])
        if not 0 <= number < len(data) // (8 * _HEADER):
            raise ValueError(f"their header says {number} sequences")
        header = data[: 8 * _HEADER * (number + 1)].view(np.int64).reshape(number + 1, _HEADER)[1:]
        columns_of, position = _columns(data, header, 8 * _HEADER * (number + 1))
    except (ValueError, IndexError) as error:
        raise RolloutError(f"{len(data)} bytes are no rollouts: {error}") from error
    if position != len(data):
        raise RolloutError(f"{len(data)} bytes are no rollouts: expected {position}")
    return [
        Rollout(group=int(group), sample=int(sample), finish_reason=_REASONS[int(end)], routed_experts=None, **columns)
        for (group, sample, _, end, _, _), columns in zip(header.tolist(), columns_of, strict=True)
    ]


def _columns(data: np.ndarray, header: np.ndarray, position: int) -> tuple[list[dict[str, Any]], int]:
    """The columns of each sequence by name, None where it has none; and where they end."""
    wrong = (header[:, [2, 5]] < 0).any(axis=1) | (header[:, 3] < 0) | (header[:, 3] >= len(_REASONS))
    if wrong.any():
        index = int(wrong.argmax())
        raise ValueError(f"sequence {index} has {header[index, 2]} tokens and finish reason {header[index, 3]}")
    columns: list[dict[str, Any]] = [{} for _ in header]
    for bit, (name, dtype) in enumerate((*_ALWAYS, *_SOME), start=-len(_ALWAYS)):
        for index, (_, _, length, _, flags, num_kept) in enumerate(header.tolist()):
            if bit >= 0 and not flags >> bit & 1:
                columns[index][name] = None
                continue
            end = position + (num_kept if name == "kept_ids" else length) * np.dtype(dtype).itemsize
            if end > len(data):
                raise ValueError(f"{name} of sequence {index} ends at {end}")
            columns[index][name] = data[position:end].copy().view(dtype)
            position = end
    return columns, position
