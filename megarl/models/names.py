"""Names and shapes: the Hugging Face tensors of each Megatron parameter. Imports no torch, so that plans can count.

A family is a tuple of rules, from parameters.toml. ``layouts`` divides the parameters among ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Literal

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
    """Key of ``megarl.models.layouts.LAYOUTS``."""
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
