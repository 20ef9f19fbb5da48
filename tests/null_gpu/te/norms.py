"""RMSNorm: ``y = x̂ w``, ``x̂ = x / sqrt(mean(x²) + eps)``; with ``zero_centered`` the factor is ``1 + w``."""

from __future__ import annotations

from typing import Any

from null_gpu.te.gemm import torch_dtype
from torch import Tensor


def _factor(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + (1.0 if zero_centered else 0.0)


def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    sm_margin: int,
    zero_centered: bool,
) -> list[Tensor | None]:
    """[y, None, 1 / rms fp32 [rows]]."""
    del sm_margin
    if quantizer is not None:
        raise NotImplementedError("rmsnorm_fwd: quantised results have no reference")
    scale = (x.float().square().mean(-1) + eps).rsqrt()
    y = (x.float() * scale[..., None] * _factor(weight, zero_centered)).to(torch_dtype(out_dtype) or x.dtype)
    return [y if out is None else out.copy_(y), None, scale]


def rmsnorm_bwd(
    grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool
) -> list[Tensor]:
    """[dx, dw]: ``dx = (g - x̂ mean(g x̂)) / rms`` with ``g = dy w``, ``dw = sum(dy x̂)``."""
    del sm_margin
    columns = scale.reshape(*x.shape[:-1], 1)
    normed, dy = x.float() * columns, grad.float().reshape(x.shape)
    g = dy * _factor(weight, zero_centered)
    dx = columns * (g - normed * (g * normed).mean(-1, keepdim=True))
    return [dx.to(x.dtype), (dy * normed).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)]


REFERENCES = {"rmsnorm_fwd": rmsnorm_fwd, "rmsnorm_bwd": rmsnorm_bwd}
