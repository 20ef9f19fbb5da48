"""Attention of packed sequences by torch's SDPA in fp32, which asserts what TE's kernels demand of their inputs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def install() -> None:
    from transformer_engine.pytorch import DotProductAttention  # pyright: ignore[reportMissingImports]

    DotProductAttention.forward = forward


def forward(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    qkv_format: str | None = None,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    attn_mask_type: str | None = None,
    **others: Any,
) -> Tensor:
    """Causal inside each sequence: [T, heads, d] and [T, kv heads, d] -> [T, heads * d']."""
    assert (qkv_format, attn_mask_type, attention_mask) == ("thd", "padding_causal", None)
    assert [(x.dtype, x.is_cuda) for x in (cu_seqlens_q, cu_seqlens_kv)] == [(torch.int32, True)] * 2
    assert [(x.dtype, x.is_cuda) for x in (query, key, value)] == [(query.dtype, True)] * 3
    assert [type(x) for x in (max_seqlen_q, max_seqlen_kv)] == [int, int]
    ignored = ("fast_zero_fill", "num_splits", "window_size")
    assert not {name: given for name, given in others.items() if name not in ignored and given not in (None, False)}
    bounds = cu_seqlens_q.tolist()
    assert (bounds, bounds[-1]) == (cu_seqlens_kv.tolist(), len(query))
    assert max_seqlen_q == max_seqlen_kv >= max(last - first for first, last in pairwise(bounds))
    scale = self.unfused_attention.softmax_scale
    parts = [_attend(query[i:j], key[i:j], value[i:j], scale) for i, j in pairwise(bounds)]
    return torch.cat(parts).to(query.dtype).flatten(1)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    q, k, v = (x.float().transpose(0, 1)[None] for x in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.size(1) != k.size(1))
    return out[0].transpose(0, 1)
