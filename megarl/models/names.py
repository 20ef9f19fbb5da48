"""From Hugging Face tensors to Megatron parameters, with the cut for tensor parallelism.

A family is a tuple of rules, from parameters.toml. A rule's ``layout`` names a pair of pure functions: ``cut`` makes a
rank's shard from the Hugging Face tensors, ``join`` makes the Hugging Face tensors from the shards of all ranks. The
functions are exact to the bit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, islice, product
from typing import Literal

import torch

from megarl.files import hf_config
from megarl.files.hf_config import family_entry, hf_name
from megarl.files.texts import read_table
from megarl.models.shapes import ModelShape

Scope = Literal["model", "layer", "full", "linear", "moe", "dense", "expert", "experts", "indexer"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A parameter name and the Hugging Face tensors in the parameter."""

    megatron: tuple[str, ...]
    """Name patterns, ``{layer}`` and ``{expert}`` local to the rank. Two patterns: local layers, Transformer Engine."""
    hf: tuple[str, ...]
    """Name patterns, ``{layer}`` and ``{expert}`` global."""
    dims: tuple[str, ...]
    """Shape of each Hugging Face tensor, as names of ``dimensions``."""
    layout: str
    """Key of LAYOUTS."""
    scope: Scope
    """Once; in every layer, in layers with softmax or with linear attention only, with an indexer only, in MoE or dense
    layers only; once per expert. experts: a parameter per expert, whose Hugging Face tensors hold all experts of a
    layer, [E, ...]."""
    when: str = ""
    """Applies only if this field of the shape is set; with "no " in front, only if the field is not set."""

    @property
    def is_of_experts(self) -> bool:
        """Whether the parameter belongs to an expert, in a Hugging Face tensor of its own or of all experts."""
        return self.scope in ("expert", "experts")

    def applies(self, shape: ModelShape) -> bool:
        is_set = bool(shape.fields.get(self.when.removeprefix("no ")))
        return not self.when or is_set != self.when.startswith("no ")

    def places(self, shape: ModelShape) -> Iterator[tuple[int, int]]:
        """Yield the global (layer, expert) of every parameter of this rule; 0 without a layer or an expert.

        The experts that share Hugging Face tensors are one parameter [E, ...].
        """
        layers = set(range(1 if self.scope == "model" else shape.num_layers))
        moe, linear = layers & {*shape.moe_layers}, layers & {*shape.linear_layers}
        of_scope = {"dense": layers - moe, "full": layers - linear, "linear": linear, "indexer": shape.indexer_layers}
        of_scope |= dict.fromkeys(("moe", "expert", "experts"), moe)
        experts = range(shape.num_experts if self.scope == "expert" else 1)
        yield from product(sorted(of_scope.get(self.scope, layers)), experts)

    def hf_names(self, layer: int, expert: int) -> list[str]:
        return [name.format(layer=layer, expert=expert) for name in self.hf]


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


def dimensions(shape: ModelShape) -> dict[str, int]:
    """Return the sizes for ``Rule.dims``, without sizes that the model lacks."""
    fields, heads = shape.fields, shape.fields["num_attention_heads"]
    sizes: dict[str, int] = {name: fields.get(key) or 0 for name, key in _TABLES["dimensions"].items()}
    sizes |= {"vocab": shape.vocab_size, "experts": shape.num_experts, "one": 1}
    sizes["expert_gate_up"] = 2 * sizes["expert_ffn"]
    if fields.get("multi_latent_attention"):
        plain, rotated, value = (fields[name] for name in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"))
        sizes |= {"q": heads * (plain + rotated), "kv_up": heads * (plain + value), "attention": heads * value}
        sizes["kv_latent_and_rope"] = sizes["kv_latent"] + rotated
        sizes["index_q"] = sizes["index_heads"] * sizes["index_head"]
    else:
        width = fields["kv_channels"]
        sizes |= {"q": heads * width, "q_and_gate": 2 * heads * width, "kv": fields["num_query_groups"] * width}
    if fields.get("linear_attention_freq"):
        qk = fields["linear_num_key_heads"] * fields["linear_key_head_dim"]
        v = sizes["linear_heads"] * sizes["linear_head"]
        sizes |= {"linear_qk": qk, "linear_v": v, "linear_qkv": 2 * qk + v, "linear_qkvz": 2 * (qk + v)}
        sizes["linear_ba"] = 2 * sizes["linear_heads"]
    return {name: size for name, size in sizes.items() if size}


_TABLES = read_table(__file__, "parameters.toml")


def _read_families() -> dict[str, tuple[Rule, ...]]:
    """Return model type -> rules, from parameters.toml, whose names of layers begin behind the layer's number."""

    def rule(
        kind: str, scope: Scope, layout: str, megatron: list[str], hf: list[str], dims: list[str], when: str = ""
    ) -> Rule:
        prefix, hf_prefix = ("", "") if scope == "model" else ("decoder.layers.{layer}.", "model.layers.{layer}.")
        hf_names = tuple(hf_name(kind, hf_prefix + name) for name in hf)
        return Rule(tuple(prefix + name for name in megatron), hf_names, tuple(dims), layout, scope, when)

    parts = _TABLES["parts"]
    names = {kind: family_entry(kind, "parameters") for kind in hf_config.FAMILIES}
    return {kind: tuple(rule(kind, *row) for name in names[kind] for row in parts[name]) for kind in names}


FAMILIES: Mapping[str, tuple[Rule, ...]] = _read_families()
FP32: Mapping[str, Sequence[str]] = _TABLES["fp32"]
"""Last name components of the fp32 ``tensors`` of Hugging Face and ``buffers`` of Megatron."""


@cache  # every update asks for the same names
def is_fp32(name: str) -> bool:
    """Whether the tensor or buffer of this name is fp32 in runs of every dtype."""
    return name.rpartition(".")[2] in (*FP32["tensors"], *FP32["buffers"])


def rules_of(shape: ModelShape) -> tuple[Rule, ...]:
    """Return the rules of a model. No checkpoint holds the output layer of a model with tied embeddings."""
    rules = (rule for rule in FAMILIES[shape.family] if rule.applies(shape))
    return tuple(rule for rule in rules if not (shape.tied_embeddings and rule.hf == ("lm_head.weight",)))


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor of a Hugging Face checkpoint of this model."""
    sizes = dimensions(shape)
    shapes = {}
    for rule in rules_of(shape):
        of_rule = [tuple(sizes[name] for name in dims.split()) for dims in rule.dims]
        for layer, expert in rule.places(shape):
            shapes.update(zip(rule.hf_names(layer, expert), of_rule, strict=True))
    return shapes
