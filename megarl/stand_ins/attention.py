"""Core attention and norms of the local layer spec: packed sequences, sequence parallelism, no Transformer Engine.

Megatron's own ``DotProductAttention`` refuses packed sequences, and its torch norm sequence parallelism, which MoE with
tensor parallelism needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from megarl.core.devices import to_device
from megarl.core.parallel import zigzag_indices, zigzag_inverse
from megarl.errors import ConfigError


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packed-sequence parameters. Sequences of one length are one batched attention call without padding.

    A sequence's result does not depend on the other sequences of the pack.
    """

    length_buckets: tuple[Tensor, ...] = ()
    from_ranks: Tensor | None = None
    """int64 [S]: index that puts the tokens of all context-parallel ranks, in rank order, into packed order."""

    @staticmethod
    def of(cu_seqlens: Tensor, cp_size: int = 1, device: torch.device | int | str = "cpu") -> PackedSequences:
        """For whole sequences at ``cu_seqlens`` [N+1]; with ``cp_size`` > 1, of multiples of ``2 cp_size`` tokens.

        ``cu_seqlens`` is on the host, so that nothing is read from ``device``, where the model takes the results.
        """
        bounds = to_device(cu_seqlens.to(torch.int32), device)
        buckets = length_buckets(cu_seqlens)
        longest = max((bucket.size(1) for bucket in buckets), default=0)
        padded: dict[str, Any] = {"cu_seqlens_q_padded": bounds, "cu_seqlens_kv_padded": bounds} if cp_size > 1 else {}
        return PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            **padded,
            length_buckets=tuple(to_device(bucket, device) for bucket in buckets),
            from_ranks=to_device(zigzag_inverse(cu_seqlens, cp_size), device) if cp_size > 1 else None,
        )


def length_buckets(cu_seqlens: Tensor) -> tuple[Tensor, ...]:
    """Token positions of all sequences of one length, int64 [n, length], for each distinct length."""
    bounds = cu_seqlens.cpu().numpy()
    starts, lengths = bounds[:-1, None], np.diff(bounds)
    buckets = (starts[lengths == length] + np.arange(length) for length in sorted(set(lengths.tolist())) if length)
    return tuple(to_device(torch.from_numpy(bucket), cu_seqlens.device) for bucket in buckets)


class PackedAttention(torch.nn.Module):
    """Causal grouped-query attention inside each packed sequence: softmax(q k^T * scale) v, by torch's SDPA.

    Takes query ``[T, heads, d]`` and key, value ``[T, kv_heads, d]`` of this tensor-parallel rank, returns
    ``[T, heads * d]``. Unpacked ``[s, b, heads, d]`` inputs work too. With context parallelism, keys and values are
    gathered, so memory grows with the whole sequence; Transformer Engine's ring attention avoids that.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,  # process groups; latent attention also passes widths, which the tensors have
    ) -> None:
        super().__init__()
        del layer_number
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        unsupported = {
            "attention_type": attention_type != "self",
            "attn_mask_type": attn_mask_type != AttnMaskType.causal,
            "attention_dropout": bool(dropout),
            "window_size": config.window_size is not None,
            "softmax_type": config.softmax_type != "vanilla",
            "apply_query_key_layer_scaling": config.apply_query_key_layer_scaling,
        }
        refused = [name for name, hit in unsupported.items() if hit]
        if refused:
            raise ConfigError(f"attention without Transformer Engine supports no {', '.join(refused)}")
        self.cp_group = parallel_state.get_context_parallel_group() if config.context_parallel_size > 1 else None
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels or 1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Return [T, heads * d], see the class."""
        if attention_mask is not None or attention_bias is not None:
            raise NotImplementedError("attention without Transformer Engine is causal and takes no mask or bias")
        if self.cp_group is not None:
            return self._across_ranks(query, key, value, packed_seq_params)
        if packed_seq_params is None:  # [s, b, h, d] -> [b, s, h, d]
            out = self._attend(*(x.transpose(0, 1) for x in (query, key, value)))
            return out.transpose(0, 1).reshape(query.size(0), query.size(1), -1)
        buckets = getattr(packed_seq_params, "length_buckets", ()) or length_buckets(packed_seq_params.cu_seqlens_q)
        outputs = [self._attend(query[rows], key[rows], value[rows]).flatten(0, 1) for rows in buckets]
        order = torch.cat([rows.flatten() for rows in buckets])
        return torch.cat(outputs)[torch.argsort(order)].flatten(1)

    def _across_ranks(self, query: Tensor, key: Tensor, value: Tensor, packing: PackedSeqParams | None) -> Tensor:
        """Local queries [T / cp, heads, d] against the keys and values of all context-parallel ranks."""
        if not isinstance(packing, PackedSequences) or packing.from_ranks is None:
            raise NotImplementedError("context parallelism without Transformer Engine needs megarl's PackedSequences")
        size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        key, value = (
            gather_from_sequence_parallel_region(column, group=self.cp_group)[packing.from_ranks]
            for column in (key, value)
        )
        outputs, order = [], []
        for rows in packing.length_buckets:
            length = rows.size(1)
            # Positions of this rank's queries in the sequence; computed on the host, where the length is known.
            position = to_device(zigzag_indices(torch.tensor([0, length]), size, rank), rows.device)
            local_rows = rows[:, :1] // size + torch.arange(position.numel(), device=rows.device)
            visible = torch.arange(length, device=rows.device) <= position[:, None]
            outputs.append(self._attend(query[local_rows], key[rows], value[rows], visible).flatten(0, 1))
            order.append(local_rows.flatten())
        return torch.cat(outputs)[torch.argsort(torch.cat(order))].flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None = None) -> Tensor:
        """[n, length, heads, d] -> [n, length, heads, d]; causal, unless ``visible`` bool [q, k] says otherwise."""
        out = scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=visible,
            is_causal=visible is None,
            scale=self.softmax_scale,
            enable_gqa=query.size(2) != key.size(2),
        )
        return out.transpose(1, 2)


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, whose gradient Megatron sums over a sequence-parallel group; ``own_eps`` is of latent norms.

    Zero-centred if the config says so: ``x / rms(x) * (1 + weight)``, in fp32.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, own_eps: float | None = None, **_: Any
    ) -> None:
        if config.normalization != "RMSNorm":
            raise ConfigError(f"norm {config.normalization!r} needs Transformer Engine, expected 'RMSNorm'")
        super().__init__(hidden_size, eps=eps if own_eps is None else own_eps, dtype=config.params_dtype)
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel
        self.is_centred = config.layernorm_zero_centered_gamma
        torch.nn.init.constant_(self.weight, 0.0 if self.is_centred else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> the same shape."""
        if not self.is_centred:
            return super().forward(x)
        return rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class NormOverHeads(RMSNorm):
    """``x / rms(x) * weight`` with the mean over all heads of a token, on all tensor-parallel ranks.

    Takes ``[..., heads, d]`` of this rank. The weight [all heads * d] is whole on every rank, with gradients for its
    own heads only, because Megatron sums gradients of query and key norms over tensor-parallel ranks.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, *, num_heads: int, **_: Any
    ) -> None:
        super().__init__(config, num_heads * hidden_size, eps=eps)
        self._head_width = hidden_size

    def forward(self, x: Tensor) -> Tensor:
        """[..., heads, d] -> the same shape."""
        group = parallel_state.get_tensor_model_parallel_group()
        squares = x.float().square().sum((-2, -1), keepdim=True)
        squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares, group), group)
        shares = self.weight.view(-1, self._head_width).chunk(parallel_state.get_tensor_model_parallel_world_size())
        scale = torch.rsqrt(squares / self.weight.numel() + (self.eps or 0.0))
        return (x.float() * scale).to(x.dtype) * shares[parallel_state.get_tensor_model_parallel_rank()]
