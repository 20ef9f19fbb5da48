"""Log-ratios between policies, and sums over sequences that are packed back to back.

Packed layout: ``T`` tokens of ``N`` sequences, sequence ``n`` is ``[cu_seqlens[n], cu_seqlens[n+1])``.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Per-token log-ratios are clamped to plus/minus this, so that exp() stays finite in fp32 (verl's SAFETY_BOUND)."""


def widen(values: Tensor) -> Tensor:
    """Return the values in fp32, or unchanged if they are fp64: log-probabilities are never reduced in less."""
    return values if values.dtype == torch.float64 else values.float()


def usable_mask(loss_mask: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Return bool [T]: the loss tokens that the rollout engine can have sampled, i.e. without those at -inf.

    A sampler cannot draw a token of probability zero, so a -inf there is a defect of the recorded log-probability.
    Such a token leaves the loss and every denominator; ``coefficients`` counts it as ``invalid_logprob``.
    """
    return loss_mask & ~torch.isneginf(rollout_logprobs)


def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor, bound: float = LOG_RATIO_BOUND) -> Tensor:
    """Return ``clamp(numerator - denominator, -bound, bound)`` where mask, else 0.

    numerator, denominator: log-probabilities [T]; mask: bool [T]; result: [T] in fp32 (fp64 if an input is).
    Masked entries are replaced before the subtraction: -inf minus -inf on a padding token would be NaN.
    """
    zero = torch.zeros((), device=numerator.device)
    difference = torch.where(mask, widen(numerator), zero) - torch.where(mask, widen(denominator), zero)
    return difference.clamp(-bound, bound)


def check_cu_seqlens(cu_seqlens: Tensor, num_tokens: int) -> None:
    """Raise ValueError unless cu_seqlens is an integer [N+1] that rises from 0 to num_tokens."""
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point():
        raise ValueError(f"cu_seqlens must be an integer tensor [N+1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}")
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != num_tokens:
        raise ValueError(
            f"cu_seqlens runs from {offsets[0]} to {offsets[-1]}, but the batch holds {num_tokens} tokens: "
            f"it must start at 0 and end at the number of tokens"
        )
    for sequence, (start, end) in enumerate(pairwise(offsets)):
        if end < start:
            raise ValueError(f"cu_seqlens falls from {start} to {end} at sequence {sequence}; it must not decrease")


def segment_lengths(cu_seqlens: Tensor) -> Tensor:
    """Return int64 [N], the number of tokens of each sequence."""
    return cu_seqlens.long().diff()


def segment_ids(cu_seqlens: Tensor) -> Tensor:
    """Return int64 [T], the index of the sequence that each token belongs to."""
    lengths = segment_lengths(cu_seqlens)
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=cu_seqlens.device), lengths)


def segment_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return [N], the sum of values [T] over each sequence; 0 for an empty one. Bool and integer sums are int64."""
    values = values if values.is_floating_point() else values.long()
    total = torch.zeros(cu_seqlens.numel() - 1, dtype=values.dtype, device=values.device)
    return total.index_add(0, segment_ids(cu_seqlens), values)


def segment_expand(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return [T], the per-sequence values [N] repeated for every token of their sequence."""
    return torch.repeat_interleave(values, segment_lengths(cu_seqlens))
