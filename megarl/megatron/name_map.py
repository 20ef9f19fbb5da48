"""Which Hugging Face tensors a Megatron parameter is made of, and how tensor parallelism cuts it: data, not code.

A family is a tuple of rules. A rule's ``layout`` names a pair of pure functions: ``cut`` makes the shard of one rank
from the Hugging Face tensors, ``join`` makes the Hugging Face tensors from the shards of all ranks, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from megarl.megatron.model import ModelShape

Scope = Literal["model", "layer", "moe", "dense", "expert"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One parameter name and the Hugging Face tensors that it holds."""

    megatron: tuple[str, ...]
    """Name patterns, ``{layer}`` and ``{expert}`` local to the rank. Several: local spec, Transformer Engine spec."""
    hf: tuple[str, ...]
    """Name patterns, ``{layer}`` and ``{expert}`` global."""
    layout: str
    """Key of LAYOUTS."""
    scope: Scope
    """Where the rule applies: once, in every layer, in MoE or dense layers only, or once per expert."""
    optional: bool = False
    """The tensor exists only in some models of the family."""


@dataclass(frozen=True, slots=True)
class Layout:
    cut: Callable[[Sequence[torch.Tensor], int, int, ModelShape], torch.Tensor]
    """(Hugging Face tensors, rank, size, shape) -> this rank's shard."""
    join: Callable[[Sequence[torch.Tensor], ModelShape], list[torch.Tensor]]
    """(shards of all ranks in order, shape) -> Hugging Face tensors."""


def _chunk(tensor: torch.Tensor, rank: int, size: int, dim: int) -> torch.Tensor:
    if tensor.size(dim) % size:
        raise ValueError(f"dimension {dim} of size {tensor.size(dim)} cannot be cut into {size} equal parts")
    return tensor.chunk(size, dim)[rank]


def _cut_vocab(tensors: Sequence[torch.Tensor], rank: int, size: int, shape: ModelShape) -> torch.Tensor:
    if tensors[0].size(0) != shape.vocab_size:  # padding would cut or fill it silently
        raise ValueError(f"{tensors[0].size(0)} rows for a vocabulary of {shape.vocab_size}")
    rows = -(-shape.vocab_size // size) * size
    padded = torch.nn.functional.pad(tensors[0], (0, 0, 0, rows - tensors[0].size(0)))
    return padded.chunk(size)[rank]


def _cut_qkv(tensors: Sequence[torch.Tensor], rank: int, size: int, shape: ModelShape) -> torch.Tensor:
    groups = shape.fields["num_query_groups"]
    parts = [tensor.reshape(groups, -1, *tensor.shape[1:]) for tensor in tensors]
    return _chunk(torch.cat(parts, 1), rank, size, 0).flatten(0, 1)


def _join_qkv(shards: Sequence[torch.Tensor], shape: ModelShape) -> list[torch.Tensor]:
    fields = shape.fields
    heads = fields["num_attention_heads"] // fields["num_query_groups"]
    width = fields["kv_channels"]
    full = torch.cat(list(shards))
    grouped = full.view(fields["num_query_groups"], (heads + 2) * width, *full.shape[1:])
    return [part.flatten(0, 1) for part in grouped.split([heads * width, width, width], 1)]


def _cut_gate_up(tensors: Sequence[torch.Tensor], rank: int, size: int, _: ModelShape) -> torch.Tensor:
    return torch.cat([_chunk(tensor, rank, size, 0) for tensor in tensors])


def _join_gate_up(shards: Sequence[torch.Tensor], _: ModelShape) -> list[torch.Tensor]:
    halves = [shard.chunk(2) for shard in shards]
    return [torch.cat([pair[0] for pair in halves]), torch.cat([pair[1] for pair in halves])]


LAYOUTS: Mapping[str, Layout] = {
    "replicated": Layout(lambda t, *_: t[0], lambda s, _: [s[0]]),
    "row": Layout(lambda t, rank, size, _: _chunk(t[0], rank, size, 1), lambda s, _: [torch.cat(list(s), 1)]),
    "vocab": Layout(_cut_vocab, lambda s, shape: [torch.cat(list(s))[: shape.vocab_size]]),
    "qkv": Layout(_cut_qkv, _join_qkv),
    "gate_up": Layout(_cut_gate_up, _join_gate_up),
}

_ATTENTION = "decoder.layers.{layer}.self_attention."
_HF = "model.layers.{layer}."

_QWEN3_MOE = (
    Rule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), "vocab", "model"),
    Rule(
        ("decoder.layers.{layer}.input_layernorm.weight", _ATTENTION + "linear_qkv.layer_norm_weight"),
        (_HF + "input_layernorm.weight",),
        "replicated",
        "layer",
    ),
    Rule(
        (_ATTENTION + "linear_qkv.weight",),
        tuple(f"{_HF}self_attn.{part}_proj.weight" for part in "qkv"),
        "qkv",
        "layer",
    ),
    Rule(
        (_ATTENTION + "linear_qkv.bias",),
        tuple(f"{_HF}self_attn.{part}_proj.bias" for part in "qkv"),
        "qkv",
        "layer",
        optional=True,
    ),
    Rule((_ATTENTION + "q_layernorm.weight",), (_HF + "self_attn.q_norm.weight",), "replicated", "layer"),
    Rule((_ATTENTION + "k_layernorm.weight",), (_HF + "self_attn.k_norm.weight",), "replicated", "layer"),
    Rule((_ATTENTION + "linear_proj.weight",), (_HF + "self_attn.o_proj.weight",), "row", "layer"),
    Rule(
        ("decoder.layers.{layer}.pre_mlp_layernorm.weight", "decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight"),
        (_HF + "post_attention_layernorm.weight",),
        "replicated",
        "layer",
    ),
    Rule(("decoder.layers.{layer}.mlp.router.weight",), (_HF + "mlp.gate.weight",), "replicated", "moe"),
    Rule(
        (
            "decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight",
            "decoder.layers.{layer}.mlp.experts.linear_fc1.weight{expert}",
        ),
        (_HF + "mlp.experts.{expert}.gate_proj.weight", _HF + "mlp.experts.{expert}.up_proj.weight"),
        "gate_up",
        "expert",
    ),
    Rule(
        (
            "decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight",
            "decoder.layers.{layer}.mlp.experts.linear_fc2.weight{expert}",
        ),
        (_HF + "mlp.experts.{expert}.down_proj.weight",),
        "row",
        "expert",
    ),
    Rule(
        ("decoder.layers.{layer}.mlp.linear_fc1.weight",),
        (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"),
        "gate_up",
        "dense",
    ),
    Rule(("decoder.layers.{layer}.mlp.linear_fc2.weight",), (_HF + "mlp.down_proj.weight",), "row", "dense"),
    Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",), "replicated", "model"),
    Rule(("output_layer.weight",), ("lm_head.weight",), "vocab", "model"),
)

FAMILIES: Mapping[str, tuple[Rule, ...]] = {"qwen3_moe": _QWEN3_MOE}
"""``model_type`` -> rules, in the order in which weights are exported."""


def rules_of(shape: ModelShape) -> tuple[Rule, ...]:
    """The rules of a family; with tied embeddings the output layer is a copy that no checkpoint holds."""
    rules = FAMILIES[shape.family]
    return tuple(rule for rule in rules if not (shape.tied_embeddings and rule.hf == ("lm_head.weight",)))


def hf_names(shape: ModelShape) -> Iterator[tuple[str, bool]]:
    """All tensor names that a Hugging Face checkpoint of this model holds, each with whether it is optional."""
    moe = set(shape.moe_layers)
    for rule in rules_of(shape):
        layers: Sequence[int] = range(shape.num_layers)
        if rule.scope == "model":
            layers = [0]
        elif rule.scope in ("moe", "expert"):
            layers = shape.moe_layers
        elif rule.scope == "dense":
            layers = [layer for layer in layers if layer not in moe]
        for layer in layers:
            for expert in range(shape.num_experts) if rule.scope == "expert" else [0]:
                for name in rule.hf:
                    yield name.format(layer=layer, expert=expert), rule.optional
