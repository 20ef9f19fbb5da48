"""Bounds of sequences that are packed back to back: ``T`` tokens of ``N`` sequences, ``cu_seqlens`` int64 [N+1]."""

from itertools import pairwise

import torch
from torch import Tensor


def check_cu_seqlens(cu_seqlens: Tensor, num_tokens: int) -> None:
    """Raise ValueError unless cu_seqlens is an integer [N+1] that rises from 0 to num_tokens; reads a device once."""
    if bool(is_wrong_cu_seqlens(cu_seqlens, num_tokens)):
        raise cu_seqlens_error(cu_seqlens, num_tokens)


def is_wrong_cu_seqlens(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return bool [], False if cu_seqlens rises from 0 to num_tokens. ValueError if it is no integer [N+1]."""
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point():
        raise ValueError(f"cu_seqlens must be an integer tensor [N+1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}")
    return (cu_seqlens[0] != 0) | (cu_seqlens[-1] != num_tokens) | (segment_lengths(cu_seqlens) < 0).any()


def cu_seqlens_error(cu_seqlens: Tensor, num_tokens: int) -> ValueError:
    """Return the ValueError for cu_seqlens refused by ``is_wrong_cu_seqlens``. cu_seqlens: [N+1]."""
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != num_tokens:
        return ValueError(
            f"cu_seqlens runs from {bounds[0]} to {bounds[-1]}, but the batch holds {num_tokens} tokens: "
            f"it must start at 0 and end at the number of tokens"
        )
    sequence, (start, end) = next((n, pair) for n, pair in enumerate(pairwise(bounds)) if pair[1] < pair[0])
    return ValueError(f"cu_seqlens falls from {start} to {end} at sequence {sequence}; it must not decrease")


def segment_lengths(cu_seqlens: Tensor) -> Tensor:
    """Return int64 [N], the number of tokens of each sequence."""
    return cu_seqlens.long().diff()


def segment_expand(values: Tensor, cu_seqlens: Tensor, num_tokens: int | None = None) -> Tensor:
    """Return [T], the per-sequence values [N] repeated for every token of their sequence; T as in ``segment_ids``."""
    return torch.repeat_interleave(values, segment_lengths(cu_seqlens), output_size=num_tokens)
