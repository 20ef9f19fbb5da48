"""How ranks divide a parameter under tensor parallelism: a pair of pure functions for each ``Rule.layout``.

``cut`` makes a rank's shard from the Hugging Face tensors, ``join`` makes the Hugging Face tensors from the shards of
all ranks. The functions are exact to the bit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import torch

from megarl.models.names import dimensions
from megarl.models.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Layout:
    cut: Callable[[Sequence[torch.Tensor], int, int, ModelShape], torch.Tensor]
    """(Hugging Face tensors, rank, size, shape) -> this rank's shard."""
    join: Callable[[Sequence[torch.Tensor], ModelShape], Sequence[torch.Tensor]]
    """(shards of all ranks in order, shape) -> Hugging Face tensors."""
    blocks: Mapping[str, str] = field(default_factory=dict)
    """Of rows that a checkpoint stores apart: Megatron's name -> number of rows, of ``dimensions``."""


def _chunk(tensor: torch.Tensor, rank: int, size: int, dim: int) -> torch.Tensor:
    if tensor.size(dim) % size:
        raise ValueError(f"dimension {dim} of size {tensor.size(dim)} cannot be cut into {size} equal parts")
    return tensor.chunk(size, dim)[rank]


def _cut_vocab(tensors: Sequence[torch.Tensor], rank: int, size: int, shape: ModelShape) -> torch.Tensor:
    if tensors[0].size(0) != shape.vocab_size:  # padding would cut or fill the tensor silently
        raise ValueError(f"{tensors[0].size(0)} rows for a vocabulary of {shape.vocab_size}")
    return torch.nn.functional.pad(tensors[0], (0, 0, 0, -shape.vocab_size % size)).chunk(size)[rank]


def _cut_qkv(tensors: Sequence[torch.Tensor], rank: int, size: int, shape: ModelShape) -> torch.Tensor:
    groups = shape.fields["num_query_groups"]
    tensors = [_query_and_gate(tensors[0], shape, -1, 2), *tensors[1:]]
    grouped = [tensor.reshape(groups, -1, *tensor.shape[1:]) for tensor in tensors]
    return _chunk(torch.cat(grouped, 1), rank, size, 0).flatten(0, 1)


def _join_qkv(shards: Sequence[torch.Tensor], shape: ModelShape) -> list[torch.Tensor]:
    fields, width = shape.fields, shape.fields["kv_channels"]
    grouped = _joined(shards).unflatten(0, (fields["num_query_groups"], -1))
    tensors = [tensor.flatten(0, 1) for tensor in grouped.split([grouped.size(1) - 2 * width, width, width], 1)]
    return [_query_and_gate(tensors[0], shape, 2, -1), *tensors[1:]]


_DELTA_NET = {"query": "linear_qk", "key": "linear_qk", "value": "linear_v", "z": "linear_v"}
_DELTA_NET |= {"beta": "linear_heads", "alpha": "linear_heads"}


def _delta_net(*counts: int, by_head: bool = False) -> Layout:
    """Blocks of rows, each cut among the ranks; ``counts`` are the blocks in each Hugging Face tensor.

    by_head: the rows of Hugging Face tensors are ordered by key head first, and then by block, as in Qwen3-Next.
    """
    blocks = dict(islice(_DELTA_NET.items(), sum(counts)))

    def heads(shape: ModelShape) -> int:
        return shape.fields["linear_num_key_heads"] if by_head else 1

    def rows(shape: ModelShape, parts: int) -> list[int]:
        sizes = dimensions(shape)
        return [sizes[name] // parts for name in blocks.values()]

    def cut(tensors: Sequence[torch.Tensor], rank: int, size: int, shape: ModelShape) -> torch.Tensor:
        whole = torch.cat([tensor.unflatten(0, (heads(shape), -1)) for tensor in tensors], 1)
        of_blocks = whole.split(rows(shape, heads(shape)), 1)
        return torch.cat([_chunk(block.flatten(0, 1), rank, size, 0) for block in of_blocks])

    def join(shards: Sequence[torch.Tensor], shape: ModelShape) -> list[torch.Tensor]:
        by_rank = (shard.split(rows(shape, len(shards))) for shard in shards)
        of_blocks = iter([torch.cat(block).unflatten(0, (heads(shape), -1)) for block in zip(*by_rank, strict=True)])
        return [torch.cat([*islice(of_blocks, count)], 1).flatten(0, 1) for count in counts]

    return Layout(cut, join, blocks)


def _query_and_gate(tensor: torch.Tensor, shape: ModelShape, *order: int) -> torch.Tensor:
    """Reorder rows between [head, query and gate] (order -1, 2) and [group, query and gate, head] (order 2, -1)."""
    if not shape.fields.get("attention_output_gate"):
        return tensor
    sizes = (shape.fields["num_query_groups"], *order, shape.fields["kv_channels"])
    return tensor.unflatten(0, sizes).transpose(1, 2).flatten(0, 3)


def _joined(shards: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    return torch.cat(list(shards), dim) if len(shards) > 1 else shards[0]


def _cut_halves(tensors: Sequence[torch.Tensor], rank: int, size: int, _: ModelShape) -> torch.Tensor:
    return torch.cat([_chunk(half, rank, size, 1) for half in tensors[0].chunk(2, 1)], 1)


def _join_halves(shards: Sequence[torch.Tensor], _: ModelShape) -> list[torch.Tensor]:
    return [torch.cat(list(chain(*zip(*(shard.chunk(2, 1) for shard in shards), strict=True))), 1)]


def _transposed(layout: Layout) -> Layout:
    """Return the layout of Hugging Face tensors [E, columns, rows]."""
    return Layout(
        lambda tensors, *sizes: layout.cut([tensor.transpose(1, 2) for tensor in tensors], *sizes),
        lambda shards, shape: [tensor.transpose(1, 2) for tensor in layout.join(shards, shape)],
    )


def _interleaved(layout: Layout) -> Layout:
    """Return the layout of Hugging Face tensors whose gate and up take turns on axis 1."""

    def swap(tensor: torch.Tensor, sizes: tuple[int, int]) -> torch.Tensor:
        return tensor.unflatten(1, sizes).transpose(1, 2).flatten(1, 2)

    return Layout(
        lambda tensors, *sizes: layout.cut([swap(tensor, (-1, 2)) for tensor in tensors], *sizes),
        lambda shards, shape: [swap(tensor, (2, -1)) for tensor in layout.join(shards, shape)],
    )


_ALL_GATE_UP = Layout(_cut_halves, _join_halves)
_ALL_ROW = Layout(lambda t, rank, size, _: _chunk(t[0], rank, size, 2), lambda s, _: [_joined(s, 2)])
LAYOUTS: Mapping[str, Layout] = {
    "replicated": Layout(lambda t, *_: t[0], lambda s, _: [s[0]]),
    "column": Layout(lambda t, rank, size, _: _chunk(t[0], rank, size, 0), lambda s, _: [_joined(s)]),
    "row": Layout(lambda t, rank, size, _: _chunk(t[0], rank, size, 1), lambda s, _: [_joined(s, 1)]),
    "vocab": Layout(_cut_vocab, lambda s, shape: [_joined(s)[: shape.vocab_size]]),
    "qkv": Layout(_cut_qkv, _join_qkv),
    "delta_net": _delta_net(3, 1, 1, 1),
    "delta_net_by_head": _delta_net(4, 2, by_head=True),
    "delta_net_conv": _delta_net(3),
    "gate_up": Layout(
        lambda t, rank, size, _: torch.cat([_chunk(half, rank, size, 0) for half in t]),
        lambda s, _: s[0].chunk(2) if len(s) == 1 else [*map(torch.cat, zip(*(t.chunk(2) for t in s), strict=True))],
    ),
    # Of tensors of all experts: gate and up side by side, [E, 2 ffn, hidden]; down, [E, hidden, ffn].
    "all_gate_up": _ALL_GATE_UP,
    "all_row": _ALL_ROW,
    "all_gate_up_transposed": _transposed(_ALL_GATE_UP),
    "all_gate_up_interleaved": _interleaved(_ALL_GATE_UP),
    "all_gate_up_interleaved_transposed": _transposed(_interleaved(_ALL_GATE_UP)),
    "all_row_transposed": _transposed(_ALL_ROW),
}
