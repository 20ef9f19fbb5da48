"""Puts kernels of sglang_kernels.py where SGLang has none for CPUs; a server imports this module last."""

import sglang_kernels
from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated  # type: ignore[import-not-found]
from sglang.srt.models import minimax_m2  # type: ignore[import-not-found]

fused_norm_gate._use_cpu = layernorm_gated._use_cpu = True
minimax_m2.rms_sumsq_serial = sglang_kernels.sum_squares
minimax_m2.rms_apply_serial = sglang_kernels.scale_by_norms
