"""Rotary embedding of packed sequences: ``y = x cos(f) + rotate(x) sin(f)`` in the first dimensions of a head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _positions(cu_seqlens: Tensor, num_tokens: int, cp_size: int, cp_rank: int) -> Tensor:
    """int64 [T]: position of each token in its sequence.

    With context parallelism, ``cu_seqlens`` counts all ranks' tokens, and this rank has two of a sequence's
    ``2 cp_size`` pieces, number ``cp_rank`` from the front and from the back.
    """
    bounds = cu_seqlens.long() // cp_size
    token = torch.arange(num_tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(bounds, token, right=True) - 1
    place, length = token - bounds[sequence], bounds.diff()[sequence]
    half = length // 2
    back = cp_size * length - (cp_rank + 1) * half + place - half
    return place if cp_size == 1 else torch.where(place < half, place + cp_rank * half, back)


def _rotate(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _cos_sin(
    x: Tensor, freqs: Tensor, layout: Any, starts: Any, packing: tuple[Any, int, int]
) -> tuple[Tensor, Tensor]:
    cu_seqlens, cp_size, cp_rank = packing
    if layout.name != "NVTE_THD" or starts is not None or cu_seqlens is None:
        raise NotImplementedError(f"rope: found {layout.name}, only packed sequences have a reference")
    if freqs.dtype != torch.float32 or cu_seqlens.dtype != torch.int32 or not cu_seqlens.is_cuda:
        raise TypeError(f"rope: found {freqs.dtype} and {cu_seqlens.dtype} on {cu_seqlens.device}")
    angles = freqs.view(len(freqs), 1, -1)[_positions(cu_seqlens, len(x), cp_size, cp_rank)]
    return angles.cos(), angles.sin()


def fused_rope_forward(
    x: Tensor, freqs: Tensor, starts: Any, layout: Any, interleaved: bool, cu_seqlens: Any, cp_size: int, cp_rank: int
) -> Tensor:
    """[T, heads, d'] rotated; ``freqs`` fp32 [positions, 1, 1, d]."""
    cos, sin = _cos_sin(x, freqs, layout, starts, (cu_seqlens, cp_size, cp_rank))
    rotated, rest = x[..., : freqs.size(-1)].float(), x[..., freqs.size(-1) :]
    return torch.cat([(rotated * cos + _rotate(rotated, interleaved) * sin).to(x.dtype), rest], -1)


def fused_rope_backward(
    grad: Tensor,
    freqs: Tensor,
    starts: Any,
    layout: Any,
    interleaved: bool,
    cu_seqlens: Any,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """The transpose: ``dx = dy cos - rotate(dy sin)``."""
    cos, sin = _cos_sin(grad, freqs, layout, starts, (cu_seqlens, cp_size, cp_rank))
    rotated, rest = grad[..., : freqs.size(-1)].float(), grad[..., freqs.size(-1) :]
    return torch.cat([(rotated * cos - _rotate(rotated * sin, interleaved)).to(grad.dtype), rest], -1)


REFERENCES = {"fused_rope_forward": fused_rope_forward, "fused_rope_backward": fused_rope_backward}
