"""An SGLang plugin for tests: FP8 layers that compute on a CPU, with weights that are dequantised at every use.

Everything else is the server's own: parameters, the loader that cuts and fuses weights and scales, update sessions.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F


def _whole(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 of [..., out, in] and its scales [..., out / 128, in / 128]."""
    wide = scale.float().repeat_interleave(128, -2).repeat_interleave(128, -1)
    return weight.float() * wide[..., : weight.shape[-2], : weight.shape[-1]]


def _linear(_self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, _whole(layer.weight, layer.weight_scale_inv).to(x.dtype), bias)


def _experts(self: Any, layer: Any, dispatch_output: Any) -> Any:
    from sglang.srt.layers.moe.fused_moe_native import fused_moe_forward_native  # pyright: ignore[reportMissingImports]

    dtype = dispatch_output.hidden_states.dtype
    held = SimpleNamespace(
        moe_runner_config=self.moe_runner_config,
        w13_weight=_whole(layer.w13_weight, layer.w13_weight_scale_inv).to(dtype),
        w2_weight=_whole(layer.w2_weight, layer.w2_weight_scale_inv).to(dtype),
    )
    return fused_moe_forward_native(held, dispatch_output)


def _as_loaded(_self: Any, _layer: Any) -> None:
    """In place of what packs weights for kernels."""


def register() -> None:
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod, Fp8MoEMethod  # pyright: ignore[reportMissingImports]

    Fp8LinearMethod.process_weights_after_loading = Fp8MoEMethod.process_weights_after_loading = _as_loaded
    Fp8LinearMethod.apply = _linear
    Fp8MoEMethod.apply = _experts
    # The kernels know no float32; without it a comparison could not be exact.
    Fp8Config.get_supported_act_dtypes = classmethod(lambda _cls: [torch.bfloat16, torch.float32])
