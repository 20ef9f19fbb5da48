"""Sparse latent attention (DeepSeek-V3.2's DSA) for packed sequences, without Transformer Engine or fused kernels.

An indexer selects, for each query, the top-k keys of its sequence up to itself; latent attention is then masked.
Parameters have the names of Megatron's ``DSAIndexer``. Megatron also turns the indexer's queries and keys by a Hadamard
matrix, which leaves their products unchanged.
"""

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from megarl.models.shapes import ModelShape
from megarl.stand_ins.attention import PackedAttention, PackedSequences, visible_keys

_SCORES = 1 << 26
"""Most fp32 scores of heads at a time."""


class Indexer(torch.nn.Module):
    """Scores of keys: ``score(q, k) = sum_h w_h(q) relu(q_h . k)``, in fp32.

    The parameters are frozen: a choice of keys has no gradient, and the loss of a language model does not train it.
    Positive factors are left out, since only the order of scores counts. config: with the fields ``dsa_indexer_*``.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_heads, width = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        options: dict[str, Any] = {"bias": False, "dtype": config.params_dtype}
        self.linear_wq_b = torch.nn.Linear(config.q_lora_rank, self.num_heads * width, **options)
        self.linear_wk = torch.nn.Linear(config.hidden_size, width, **options)
        self.k_norm = torch.nn.LayerNorm(width, eps=1e-6, dtype=config.params_dtype)
        self.linear_weights_proj = torch.nn.Linear(config.hidden_size, self.num_heads, **options)
        self.requires_grad_(False)


def rotate(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first ``2 d`` of the last dimension of ``x`` by ``angles`` [..., d], in fp32.

    interleaved: neighbours are a pair; the result has their first halves in front of the second halves. Otherwise
    value i and value i + d are a pair.
    """
    turned, rest = x.float().tensor_split([2 * angles.size(-1)], -1)
    first, second = turned.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turned.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


class SparseAttention(PackedAttention):
    """``PackedAttention`` to the keys that an indexer selects: the layer's, or that of the last layer with an indexer.

    shape: tells the layers with an indexer, and how the indexer rotates queries and keys.
    """

    def __init__(self, config: Any, layer_number: int, *arguments: Any, shape: ModelShape, **options: Any) -> None:
        super().__init__(config, layer_number, *arguments, **options)
        self.topk, self._interleaved = config.dsa_indexer_topk, shape.indexer_interleaved
        self.source = max(layer for layer in shape.indexer_layers if layer < layer_number)
        self.indexer = Indexer(config) if self.source == layer_number - 1 else None
        is_recomputed = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        self._keeps = is_recomputed or len(shape.indexer_layers) < config.num_layers
        self._gathers = config.sequence_parallel and config.tensor_model_parallel_size > 1

    @torch.no_grad()
    def select(self, hidden: Tensor, latents: Tensor, rotary: Any, packing: PackedSequences) -> None:
        """Store the selected keys of every query in ``packing.selected``; nothing for a layer without an indexer.

        hidden: [T, 1, hidden] in front of the projections, latents: normed latent queries [T, ...], of this rank under
        sequence parallelism. rotary: Megatron's rotary embedding. Sequences of at most top-k tokens need no selection.
        """
        if (indexer := self.indexer) is None or packing.max_seqlen_q <= self.topk:
            return
        hidden, latents = hidden.flatten(0, -2), latents.flatten(0, -2)
        weights = torch.nn.functional.linear(hidden.float(), indexer.linear_weights_proj.weight.float())
        columns = [indexer.k_norm(indexer.linear_wk(hidden)), weights, latents]
        if self._gathers:
            group = parallel_state.get_tensor_model_parallel_group()
            columns = [gather_from_sequence_parallel_region(column, group=group) for column in columns]
        keys, weights, latents = columns
        keys = self._of_all_ranks(keys, packing)
        table = rotary(packing.max_seqlen_q, packed_seq=True)
        # YaRN's table comes with a factor, which is 1 with equal mscales.
        angles = (table[0] if isinstance(table, tuple) else table).flatten(0, -2).chunk(2, -1)[0]
        selected = torch.zeros(latents.size(0), self.topk, dtype=torch.int32, device=latents.device)
        for rows, key_rows, positions in self._sequences(packing):
            if (length := key_rows.size(1)) <= self.topk:
                continue
            turned_keys = rotate(keys[key_rows], angles[:length], self._interleaved)
            step = max(1, _SCORES // (key_rows.numel() * indexer.num_heads))
            for part, at in zip(rows.split(step, 1), positions.split(step), strict=True):
                queries = indexer.linear_wq_b(latents[part]).unflatten(-1, (indexer.num_heads, -1))
                queries = rotate(queries, angles[at, None], self._interleaved)
                scores = torch.einsum("nqhd,nkd->nqhk", queries, turned_keys).relu_()
                scores = torch.einsum("nqhk,nqh->nqk", scores, weights[part])
                scores.masked_fill_(~visible_keys(at, length), -torch.inf)
                selected[part] = scores.topk(self.topk).indices.int()
        if (replayed := packing.replayed.get(self.source)) is not None:
            # A row with less than k keys has all of them, the first too.
            selected = torch.where((replayed >= 0).any(1, keepdim=True), replayed.clamp(min=0), selected)
        packing.selected[self.source] = selected

    def forward(self, *arguments: Any, packed_seq_params: Any = None, **options: Any) -> Tensor:
        """Return [T, heads * d], see ``PackedAttention``."""
        output = super().forward(*arguments, packed_seq_params=packed_seq_params, **options)
        if not self._keeps:
            packed_seq_params.selected.pop(self.source, None)
        return output

    def _visible(self, rows: Any, positions: Tensor, length: int, packing: Any) -> Tensor | None:
        if length <= self.topk:
            return super()._visible(rows, positions, length, packing)
        chosen = torch.zeros(*rows.shape, length, dtype=torch.bool, device=rows.device)
        chosen.scatter_(-1, packing.selected[self.source][rows].long(), True)
        return (chosen & visible_keys(positions, length))[:, None]


def find_indexers(chunks: Iterable[torch.nn.Module]) -> tuple[int, ...]:
    """Return the 0-based global layers of the chunks that have an indexer."""
    modules = (module for chunk in chunks for module in chunk.modules())
    return tuple(m.source for m in modules if isinstance(m, SparseAttention) and m.indexer is not None)


class SparseLatentAttention(MLASelfAttention):
    """Megatron's latent attention with a ``SparseAttention`` as core attention.

    Keys are selected outside of the core attention, which is recomputed from queries, keys and values alone.
    """

    def get_query_key_value_tensors(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Any:
        """Return what Megatron's method returns, and select keys; hidden_states: [T, 1, hidden]."""
        tensors = super().get_query_key_value_tensors(hidden_states, *arguments, **options)
        self.core_attention.select(hidden_states, tensors[3], self.rotary_pos_emb, arguments[2])  # type: ignore
        return tensors
