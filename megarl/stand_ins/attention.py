"""Core attention and norms of the local layer spec: packed sequences, sequence parallelism, no Transformer Engine.

Megatron's own ``DotProductAttention`` refuses packed sequences, and its torch norm sequence parallelism, which MoE with
tensor parallelism needs.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.functional import pad, rms_norm, scaled_dot_product_attention

from megarl.core.devices import to_device
from megarl.core.parallel import zigzag_indices, zigzag_inverse
from megarl.errors import ConfigError, refuse_if


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packed-sequence parameters. Sequences of one length are one batched attention call without padding.

    A sequence's result does not depend on the other sequences of the pack.
    """

    length_buckets: tuple[Tensor, ...] = ()
    from_ranks: Tensor | None = None
    """int64 [S]: index that puts the tokens of all context-parallel ranks, in rank order, into packed order."""
    selected: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> positions of the keys that the layer's indexer selected for each query, int32 [S / cp, top-k]."""
    replayed: dict[int, Tensor] = field(default_factory=dict)
    """As ``selected``, of a rollout, with -1 behind the keys of a row; the indexer selects for rows without keys."""

    @staticmethod
    def of(cu_seqlens: Tensor, cp_size: int = 1, device: torch.device | int | str = "cpu") -> "PackedSequences":
        """For whole sequences at ``cu_seqlens`` [N+1]; with ``cp_size`` > 1, of multiples of ``2 cp_size`` tokens.

        ``cu_seqlens`` is on the host, so that nothing is read from ``device``, where the model takes the results.
        """
        buckets = length_buckets(cu_seqlens)
        columns = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        columns = columns if cp_size > 1 else columns[:2]
        fields: dict[str, Any] = dict.fromkeys(columns, to_device(cu_seqlens.to(torch.int32), device))
        longest = max((bucket.size(1) for bucket in buckets), default=0)
        fields |= {"max_seqlen_q": longest, "max_seqlen_kv": longest, "qkv_format": "thd"}
        on_device = tuple(to_device(bucket, device) for bucket in buckets)
        from_ranks = to_device(zigzag_inverse(cu_seqlens, cp_size), device) if cp_size > 1 else None
        return PackedSequences(**fields, length_buckets=on_device, from_ranks=from_ranks)


def length_buckets(cu_seqlens: Tensor) -> tuple[Tensor, ...]:
    """Token positions of all sequences of one length, int64 [n, length], for each distinct length."""
    bounds = cu_seqlens.cpu().numpy()
    starts, lengths = bounds[:-1, None], np.diff(bounds)
    buckets = (starts[lengths == length] + np.arange(length) for length in sorted(set(lengths.tolist())) if length)
    return tuple(to_device(torch.from_numpy(bucket), cu_seqlens.device) for bucket in buckets)


def buckets_of(packing: Any) -> tuple[Tensor, ...]:
    """Return the token positions of all sequences of one length, int64 [n, length], for each length of a pack."""
    return getattr(packing, "length_buckets", ()) or length_buckets(packing.cu_seqlens_q)


def in_packed_order(outputs: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
    """Return results [n, length, ...] of tokens at ``rows`` [n, length] as [T, ...]."""
    order = torch.cat([positions.flatten() for positions in rows])
    return torch.cat([output.flatten(0, 1) for output in outputs])[torch.argsort(order)]


def visible_keys(positions: Tensor, length: int, window: int | None = None) -> Tensor:
    """Return the keys that queries at ``positions`` [q] see, up to their own, ``window`` earlier: bool [q, length]."""
    distance = positions[:, None] - torch.arange(length, device=positions.device)
    return (distance >= 0) & (distance <= (length if window is None else window))


class PackedAttention(torch.nn.Module):
    """Causal grouped-query attention inside each packed sequence: softmax(q k^T * scale) v, by torch's SDPA.

    A layer with a window sees ``window_size[0]`` keys before its own. With ``softmax_type`` "learnable", the softmax of
    a head has one more logit, a sink, which no value belongs to: the parameter ``softmax_offset`` [heads of this rank].

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
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        unsupported = {
            "attention_type": attention_type != "self",
            "attn_mask_type": attn_mask_type != AttnMaskType.causal,
            "attention_dropout": bool(dropout),
            "softmax_type": config.softmax_type == "off-by-one",
            "apply_query_key_layer_scaling": config.apply_query_key_layer_scaling,
        }
        if refused := [name for name, hit in unsupported.items() if hit]:
            raise ConfigError(f"attention without Transformer Engine supports no {', '.join(refused)}")
        self.cp_group = parallel_state.get_context_parallel_group() if config.context_parallel_size > 1 else None
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels or 1)
        window, skipped = config.window_size, config.window_attn_skip_freq
        has_window = is_layer_window_attention(window, skipped, layer_number)  # type: ignore[arg-type] # None is fine
        self.window = window[0] if window and has_window else None
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        sinks = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
        self.softmax_offset = sinks if config.softmax_type == "learnable" else None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None, attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:  # fmt: skip
        """Return [T, heads * d], see the class."""
        if attention_mask is not None or attention_bias is not None:
            raise NotImplementedError("attention without Transformer Engine is causal and takes no mask or bias")
        if packed_seq_params is None and self.cp_group is None:  # [s, b, h, d] -> [b, s, h, d]
            length = query.size(0)
            visible = self._visible(None, torch.arange(length, device=query.device), length, None)
            out = self._attend(*(x.transpose(0, 1) for x in (query, key, value)), visible=visible)
            return out.transpose(0, 1).reshape(query.size(0), query.size(1), -1)
        key, value = (self._of_all_ranks(column, packed_seq_params) for column in (key, value))
        outputs, places = [], []
        for rows, keys, positions in self._sequences(packed_seq_params):
            visible = self._visible(rows, positions, keys.size(1), packed_seq_params)
            outputs.append(self._attend(query[rows], key[keys], value[keys], visible))
            places.append(rows)
        return in_packed_order(outputs, places).flatten(1)

    def _of_all_ranks(self, column: Tensor, packing: PackedSeqParams | None) -> Tensor:
        """[T / cp, ...] -> [T, ...] in packed order, with the tokens of all context-parallel ranks."""
        if self.cp_group is None:
            return column
        if not isinstance(packing, PackedSequences) or packing.from_ranks is None:
            raise NotImplementedError("context parallelism without Transformer Engine needs megarl's PackedSequences")
        return mappings.gather_from_sequence_parallel_region(column, group=self.cp_group)[packing.from_ranks]

    def _sequences(self, packing: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield for the n sequences of each length: rows of this rank's queries [n, q], rows of the keys [n, length],
        and the positions of the queries in their sequence [q].
        """
        for keys in buckets_of(packing):
            rows, positions = keys, torch.arange(keys.size(1), device=keys.device)
            if self.cp_group is not None:  # computed on the host, where the length is known
                size, rank = self.cp_group.size(), self.cp_group.rank()
                rows = keys[:, :1] // size + positions[: keys.size(1) // size]
                positions = to_device(zigzag_indices(torch.tensor([0, keys.size(1)]), size, rank), keys.device)
            yield rows, keys, positions

    def _visible(self, rows: Any, positions: Tensor, length: int, packing: Any) -> Tensor | None:
        """Return which keys of its sequence a query attends to, bool [..., q, length]; None for all up to itself."""
        del rows, packing
        is_near = self.window is None or length <= self.window + 1
        if self.cp_group is None and self.softmax_offset is None and is_near:
            return None  # for torch's causal kernels
        return visible_keys(positions, length, self.window)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
        """[n, q, heads, d] -> [n, q, heads, d]; visible: bool [..., q, length], None for all keys up to the query."""
        width, sinks = value.size(-1), self.softmax_offset
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if visible is not None and sinks is not None:
            # The sink is one more key, 0 but for an added dimension, where a query has the logit of its head. Kernels
            # of GPUs take multiples of 8 dimensions only.
            logits = (sinks / self.softmax_scale).to(query.dtype).view(-1, 1, 1).expand(*query.shape[:-1], 1)
            query = pad(torch.cat([query, logits], -1), (0, 7))
            key, value = (pad(column, (0, 8, 0, 1)) for column in (key, value))
            key[..., -1, -8] = 1.0
            visible = pad(visible, (0, 1), value=True)
        is_grouped = query.size(1) != key.size(1)
        out = scaled_dot_product_attention(
            query, key, value, visible, is_causal=visible is None, scale=self.softmax_scale, enable_gqa=is_grouped
        )
        return out[..., :width].transpose(1, 2)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return Megatron's description of the sinks, which tensor-parallel ranks share out."""
        del metadata  # process groups: the ones in use
        state = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets)


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, whose gradient Megatron sums over a sequence-parallel group; ``own_eps`` is of latent norms.

    Zero-centred if the config says so: ``x / rms(x) * (1 + weight)``, in fp32.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, own_eps: float | None = None, **_: Any
    ) -> None:
        refuse_if(config.normalization != "RMSNorm", ConfigError, "norm_needs_te", config=config)
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
        squares = mappings.reduce_from_tensor_model_parallel_region(squares, group)
        squares = mappings.copy_to_tensor_model_parallel_region(squares, group)
        shares = self.weight.view(-1, self._head_width).chunk(parallel_state.get_tensor_model_parallel_world_size())
        scale = torch.rsqrt(squares / self.weight.numel() + (self.eps or 0.0))
        return (x.float() * scale).to(x.dtype) * shares[parallel_state.get_tensor_model_parallel_rank()]
