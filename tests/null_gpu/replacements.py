"""What the CPU's kernels lack, or compute with other types than CUDA's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

aten = torch.ops.aten


def _mm_dtype(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, **out: torch.Tensor) -> torch.Tensor:
    return torch.mm(a.to(dtype), b.to(dtype), **out)


def _addmm_dtype(
    total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, **out: torch.Tensor
) -> torch.Tensor:
    return torch.addmm(total, a.to(dtype), b.to(dtype), **out)


def _rms_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    shape: list[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    mask: list[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of y = w x̂, x̂ = x / rms(x): dx = (g w - x̂ mean(g w x̂)) / rms(x), dw = Σ g x̂, in fp32."""
    grad32, normed = grad.float(), x.float() * rstd.float()
    scaled = grad32 * weight.float() if weight is not None else grad32
    dims = tuple(range(-len(shape), 0))
    grad_x = rstd.float() * (scaled - normed * (scaled * normed).mean(dims, keepdim=True))
    grad_weight = (
        (grad32 * normed).reshape(-1, *shape).sum(0).to(weight.dtype) if weight is not None and mask[1] else None
    )
    return grad_x.to(x.dtype) if mask[0] else None, grad_weight


def _in_fp32(func: Any) -> Callable[..., Any]:
    """``func`` as CUDA computes it: everything in fp32; the results are rounded where they are written."""

    def call(*args: Any, **kwargs: Any) -> Any:
        wide = tree_map(
            lambda x: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, (args, kwargs)
        )
        return func(*wide[0], **wide[1])

    return call


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    aten.histc.default: lambda x, *rest, **named: aten.histc.default(x.double(), *rest, **named).to(x.dtype),
    aten.mm.dtype: _mm_dtype,
    aten.mm.dtype_out: _mm_dtype,
    aten.addmm.dtype_out: _addmm_dtype,
    aten._fused_rms_norm_backward.default: _rms_norm_backward,
    aten.native_layer_norm.default: _in_fp32(aten.native_layer_norm.default),
    aten.native_layer_norm_backward.default: _in_fp32(aten.native_layer_norm_backward.default),
}
"""By CUDA's operation."""
