"""Rotary embeddings of packed sequences, all at once, where Megatron has no fused kernel."""

import types
from typing import Any

import torch
from torch import Tensor


def rotate_packed(rope: types.ModuleType) -> Any:
    """The rotation of packed sequences for Megatron's ``rope_utils``: as its own, but of all sequences at once.

    The result takes tokens [T, heads, d], their bounds [N + 1], and frequencies [longest, 1, 1, d] by position.
    """
    one_by_one = rope._apply_rotary_pos_emb_thd

    def rotate(tokens: Tensor, bounds: Tensor, frequencies: Tensor, *arguments: Any, **options: Any) -> Tensor:
        # Left to Megatron: the share of a context-parallel rank; frequencies by place in the packed batch.
        if len(tokens) != int(bounds[-1]) or len(frequencies) == len(tokens):
            return one_by_one(tokens, bounds, frequencies, *arguments, **options)
        options.pop("cp_group", None)  # not in 0.12
        position = torch.arange(len(tokens)) - bounds[:-1].repeat_interleave(bounds.diff())
        if (
            arguments
            or any(options[name] for name in options.keys() - {"mscale"})
            or frequencies.size(-1) < tokens.size(-1)
        ):
            return rope._apply_rotary_pos_emb_bshd(tokens[:, None], frequencies[position], *arguments, **options)[:, 0]
        table = frequencies[:, 0]
        waves = (
            (wave(table) * options.get("mscale", 1.0)).to(tokens.dtype)[position] for wave in (torch.cos, torch.sin)
        )
        return _Rotation.apply(tokens, *waves)

    return rotate


class _Rotation(torch.autograd.Function):
    """``x cos + h(x) sin``, where h takes the halves (a, b) of the last dimension to (-b, a)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-high, low), dim=-1) * sin

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        low, high = (gradients[0] * sin).chunk(2, dim=-1)
        return gradients[0] * cos + torch.cat((high, -low), dim=-1), None, None
