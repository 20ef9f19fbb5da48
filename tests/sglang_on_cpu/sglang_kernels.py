"""Kernels that SGLang has for GPUs and in its compiled package for CPUs alone, by plain torch in float32.

A server that imports this module first serves models with gated delta nets, and MiniMax-M2, on a CPU. The loops are
slow; tools/families.py compares what they compute with transformers.
"""

from __future__ import annotations

import itertools
import sys
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import pad, silu, softplus

Tensor = torch.Tensor


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, conv_states: Tensor, has_initial_state: Tensor,
    cache_indices: Tensor, query_start_loc: Tensor, **_: Any,
) -> Tensor:  # fmt: skip
    """Causal convolution and SiLU of packed sequences [D, T]; the last inputs of a sequence are kept in its state."""
    out, width = torch.empty_like(x), weight.shape[1]
    for row, (start, end) in enumerate(itertools.pairwise(query_start_loc.tolist())):
        slot = int(cache_indices[row])
        before = conv_states[slot].float() if has_initial_state[row] else x.new_zeros(len(x), width - 1)
        inputs = torch.cat([before, x[:, start:end].float()], 1)
        sums = (inputs.unfold(1, width, 1) * weight[:, None]).sum(-1)
        out[:, start:end] = silu(sums if bias is None else sums + bias[:, None])
        conv_states[slot] = inputs[:, -(width - 1) :].to(conv_states.dtype)
    return out


def convolve_token(
    x: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None, _: str, *, conv_state_indices: Tensor
) -> Tensor:
    """The next token [B, D] of each sequence."""
    slots = conv_state_indices.long()
    inputs = torch.cat([states[slots].float(), x[:, :, None].float()], -1)
    sums = (inputs * weight).sum(-1)
    states[slots] = inputs[..., 1:].to(states.dtype)
    return silu(sums if bias is None else sums + bias)


def gates(a_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(log decay, beta) [1, T, H]."""
    return (-a_log.exp() * softplus(a.float() + dt_bias))[None], b.float().sigmoid()[None]


def unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, cu_seqlens: Tensor,
    initial_state_indices: Tensor, **_: Any,
) -> tuple[Tensor, None, None]:  # fmt: skip
    """The gated delta rule, token by token; states [slots, H, V, K] are changed in place."""
    groups = v.shape[2] // q.shape[2]
    q, k = (unit(x[0].float()).repeat_interleave(groups, 1) for x in (q, k))
    q, out = q * q.shape[-1] ** -0.5, torch.empty_like(v)
    for row, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        state = initial_state[int(initial_state_indices[row])]
        for token in range(start, end):
            state *= g[0, token].exp()[:, None, None]
            error = v[0, token].float() - (state * k[token, :, None]).sum(-1)
            state += (beta[0, token, :, None] * error)[..., None] * k[token, :, None]
            out[0, token] = (state * q[token, :, None]).sum(-1)
    return out, None, None


def delta_rule_of_tokens(
    *, dt_bias: Tensor, a: Tensor, b: Tensor, initial_state_source: Tensor, **named: Any
) -> Tensor:
    g, beta = gates(named["A_log"], a, b, dt_bias)
    named = {name: named[name] for name in ("q", "k", "v", "cu_seqlens", "initial_state_indices")}
    return delta_rule(g=g, beta=beta, initial_state=initial_state_source, **named)[0]


def split_projections(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    width = value_heads * value_dim
    mixed, z = qkvz.split([2 * key_heads * key_dim + width, width], -1)
    b, a = ba.chunk(2, -1)
    return mixed.contiguous(), z.reshape(-1, value_heads, value_dim), b.contiguous(), a.contiguous()


def centred_norm(x: Tensor, weight: Tensor, eps: float, width: int) -> Tensor:
    heads = x.reshape(-1, width).float()
    return heads * (heads.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 + weight.float())


def norm_heads(q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor, eps: float, width: int) -> tuple[Tensor, Tensor]:
    return centred_norm(q, of_q, eps, width), centred_norm(k, of_k, eps, width)


def norm_heads_beside_gates(
    q_gate: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor, eps: float, width: int, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    q, gate = q_gate.view(-1, heads, 2 * width).chunk(2, -1)
    return *norm_heads(q, k, of_q, of_k, eps, width), gate.contiguous()


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight * silu(gate)


def multiply_by_sigmoid(x: Tensor, gate: Tensor) -> None:
    x.mul_(gate.sigmoid())


def sum_squares(q: Tensor, k: Tensor) -> Tensor:
    """[2 B, padded to a multiple of 4]: those of the queries, then those of the keys."""
    sums = torch.cat([x.float().square().sum(-1) for x in (q, k)])
    return pad(sums, (0, -len(sums) % 4))


def scale_by_norms(
    q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor, sums: Tensor, world_size: int, eps: float
) -> tuple[Tensor, Tensor]:
    return tuple(
        x * (squares[:, None] / (world_size * x.shape[-1]) + eps).rsqrt() * weight
        for x, weight, squares in ((q, of_q, sums[: len(q)]), (k, of_k, sums[len(q) : 2 * len(q)]))
    )


OPERATORS = {
    "fused_gdn_gating_cpu": gates,
    "fused_sigmoid_gating_delta_rule_update_cpu": delta_rule_of_tokens,
    "fused_rmsnorm_gated_cpu": gated_norm,
    "fused_sigmoid_mul_cpu": multiply_by_sigmoid,
    "fused_qk_gemma_rmsnorm_cpu": norm_heads,
    "fused_qk_gemma_rmsnorm_with_gate_cpu": norm_heads_beside_gates,
    "fused_qkvzba_split_reshape_cat_contiguous_cpu": split_projections,
}
for name, function in OPERATORS.items():
    setattr(torch.ops.sgl_kernel, name, function)
mamba: Any = ModuleType("sgl_kernel.mamba")
mamba.causal_conv1d_fn_cpu, mamba.causal_conv1d_update_cpu = convolve, convolve_token
mamba.chunk_gated_delta_rule_cpu = delta_rule
sys.modules[mamba.__name__] = mamba
