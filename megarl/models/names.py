"""Which Hugging Face tensors a Megatron parameter is made of, and how tensor parallelism cuts it: data, not code.

A family is a tuple of rules. A rule's ``layout`` names a pair of pure functions: ``cut`` makes the shard of one rank
from the Hugging Face tensors, ``join`` makes the Hugging Face tensors from the shards of all ranks, bit for bit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import torch

from megarl.models.shapes import DENSE, ModelShape

Scope = Literal["model", "layer", "moe", "dense", "expert"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One parameter name and the Hugging Face tensors that it holds."""

    megatron: tuple[str, ...]
    """Name patterns, ``{layer}`` and ``{expert}`` local to the rank. Several: local layers, Transformer Engine's."""
    hf: tuple[str, ...]  # name patterns, ``{layer}`` and ``{expert}`` global
    dims: tuple[str, ...]  # shape of each Hugging Face tensor, as names of ``dimensions``
    layout: str  # key of LAYOUTS
    scope: Scope  # once, in every layer, in MoE or dense layers only, or once per expert
    when: str = ""  # only if this field of the shape is set; with "no " in front, only if it is not

    def applies(self, shape: ModelShape) -> bool:
        is_set = bool(shape.fields.get(self.when.removeprefix("no ")))
        return not self.when or is_set != self.when.startswith("no ")

    def places(self, shape: ModelShape) -> Iterator[tuple[int, int]]:
        """(layer, expert) of every parameter of this rule, global; 0 where it has none."""
        moe, layers = set(shape.moe_layers), range(1 if self.scope == "model" else shape.num_layers)
        wanted = {"moe": True, "expert": True, "dense": False}.get(self.scope)
        chosen = [layer for layer in layers if wanted is None or (layer in moe) == wanted]
        yield from product(chosen, range(shape.num_experts if self.scope == "expert" else 1))

    def hf_names(self, layer: int, expert: int) -> list[str]:
        return [name.format(layer=layer, expert=expert) for name in self.hf]


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
    fields, width = shape.fields, shape.fields["kv_channels"]
    heads = fields["num_attention_heads"] // fields["num_query_groups"]
    grouped = _joined(shards).unflatten(0, (fields["num_query_groups"], (heads + 2) * width))
    return [part.flatten(0, 1) for part in grouped.split([heads * width, width, width], 1)]


def _joined(shards: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    return torch.cat(list(shards), dim) if len(shards) > 1 else shards[0]


LAYOUTS: Mapping[str, Layout] = {
    "replicated": Layout(lambda t, *_: t[0], lambda s, _: [s[0]]),
    "column": Layout(lambda t, rank, size, _: _chunk(t[0], rank, size, 0), lambda s, _: [_joined(s)]),
    "row": Layout(lambda t, rank, size, _: _chunk(t[0], rank, size, 1), lambda s, _: [_joined(s, 1)]),
    "vocab": Layout(_cut_vocab, lambda s, shape: [_joined(s)[: shape.vocab_size]]),
    "qkv": Layout(_cut_qkv, _join_qkv),
    "gate_up": Layout(
        lambda t, rank, size, _: torch.cat([_chunk(half, rank, size, 0) for half in t]),
        lambda s, _: [_joined(halves) for halves in zip(*(shard.chunk(2) for shard in s), strict=True)],
    ),
}


def dimensions(shape: ModelShape) -> dict[str, int]:
    """The sizes that ``Rule.dims`` names; those that the model does not have are absent."""
    fields, heads = shape.fields, shape.fields["num_attention_heads"]
    found = {
        "vocab": shape.vocab_size,
        "hidden": fields["hidden_size"],
        "ffn": fields["ffn_hidden_size"],
        "expert_ffn": fields.get("moe_ffn_hidden_size"),
        "shared_ffn": fields.get("moe_shared_expert_intermediate_size"),
        "experts": shape.num_experts,
        "one": 1,
    }
    if fields.get("multi_latent_attention"):
        plain, rotated, value = (fields[name] for name in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"))
        found |= {
            "q_latent": fields["q_lora_rank"],
            "kv_latent": fields["kv_lora_rank"],
            "kv_latent_and_rope": fields["kv_lora_rank"] + rotated,
            "q": heads * (plain + rotated),
            "kv_up": heads * (plain + value),
            "attention": heads * value,
        }
    else:
        width = fields["kv_channels"]
        found |= {"head": width, "q": heads * width, "kv": fields["num_query_groups"] * width}
    return {name: size for name, size in found.items() if size}


_LAYER = "decoder.layers.{layer}."
_ATTENTION = _LAYER + "self_attention."
_HF = "model.layers.{layer}."

_ENDS = (
    Rule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), ("vocab hidden",), "vocab", "model"),
    Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",), ("hidden",), "replicated", "model"),
    Rule(("output_layer.weight",), ("lm_head.weight",), ("vocab hidden",), "vocab", "model"),
)


def _whole(megatron: Sequence[str], hf: str, scope: Scope, dims: str = "hidden", when: str = "") -> Rule:
    return Rule(tuple(megatron), (_HF + hf + ".weight",), (dims,), "replicated", scope, when)


def _norms(attention_norm: str) -> tuple[Rule, ...]:
    """The two norms of a layer; Transformer Engine has those in front of a linear layer inside of it."""
    before_mlp, fused = _LAYER + "pre_mlp_layernorm.weight", _LAYER + "mlp.linear_fc1.layer_norm_weight"
    return (
        _whole((_LAYER + "input_layernorm.weight", attention_norm), "input_layernorm", "layer"),
        _whole((before_mlp,), "post_attention_layernorm", "moe"),
        _whole((before_mlp, fused), "post_attention_layernorm", "dense"),
    )


def _grouped_attention(q_norm: str = "head", k_norm: str = "head") -> tuple[Rule, ...]:
    weights, biases = (tuple(f"{_HF}self_attn.{part}_proj.{kind}" for part in "qkv") for kind in ("weight", "bias"))
    output = (_HF + "self_attn.o_proj.weight",)
    return (
        *_norms(_ATTENTION + "linear_qkv.layer_norm_weight"),
        Rule((_ATTENTION + "linear_qkv.weight",), weights, ("q hidden", "kv hidden", "kv hidden"), "qkv", "layer"),
        Rule((_ATTENTION + "linear_qkv.bias",), biases, ("q", "kv", "kv"), "qkv", "layer", when="add_qkv_bias"),
        _whole((_ATTENTION + "q_layernorm.weight",), "self_attn.q_norm", "layer", q_norm, "qk_layernorm"),
        _whole((_ATTENTION + "k_layernorm.weight",), "self_attn.k_norm", "layer", k_norm, "qk_layernorm"),
        Rule((_ATTENTION + "linear_proj.weight",), output, ("hidden q",), "row", "layer"),
    )


def _latent(megatron: str, hf: str, dims: str, layout: str = "column", when: str = "") -> Rule:
    name = (f"{_ATTENTION}{megatron}.weight",)
    return Rule(name, (f"{_HF}self_attn.{hf}.weight",), (dims,), layout, "layer", when)


def _latent_norm(part: str, dims: str, when: str = "") -> Rule:
    names = (f"{_ATTENTION}{part}_layernorm.weight", f"{_ATTENTION}linear_{part}_up_proj.layer_norm_weight")
    return _whole(names, f"self_attn.{part}_a_layernorm", "layer", dims, when)


_LATENT_ATTENTION = (
    *_norms(_LAYER + "input_layernorm.weight"),
    _latent("linear_q_proj", "q_proj", "q hidden", when="no q_lora_rank"),
    _latent("linear_q_down_proj", "q_a_proj", "q_latent hidden", when="q_lora_rank"),
    _latent_norm("q", "q_latent", when="q_lora_rank"),
    _latent("linear_q_up_proj", "q_b_proj", "q q_latent", when="q_lora_rank"),
    _latent("linear_kv_down_proj", "kv_a_proj_with_mqa", "kv_latent_and_rope hidden"),
    _latent_norm("kv", "kv_latent"),
    _latent("linear_kv_up_proj", "kv_b_proj", "kv_up kv_latent"),
    _latent("linear_proj", "o_proj", "hidden attention", "row"),
)

_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


def _gated_mlp(
    megatron: str, hf: str, width: str, scope: Scope, names: Sequence[str] = _GATE_UP_DOWN, when: str = ""
) -> tuple[Rule, Rule]:
    gate, up, down = (f"{_HF}{hf}.{name}.weight" for name in names)
    inwards, outwards = f"{width} hidden", f"hidden {width}"
    return (
        Rule((f"{_LAYER}{megatron}.linear_fc1.weight",), (gate, up), (inwards, inwards), "gate_up", scope, when),
        Rule((f"{_LAYER}{megatron}.linear_fc2.weight",), (down,), (outwards,), "row", scope, when),
    )


def _experts(block: str = "mlp", width: str = "expert_ffn", names: Sequence[str] = _GATE_UP_DOWN) -> tuple[Rule, ...]:
    """Router and experts of the module ``block``; Transformer Engine holds all experts of a rank in one module."""
    one_each = _gated_mlp("mlp.experts.local_experts.{expert}", block + ".experts.{expert}", width, "expert", names)
    return (
        _whole((_LAYER + "mlp.router.weight",), block + ".gate", "moe", "experts hidden"),
        *(
            replace(rule, megatron=(*rule.megatron, f"{_LAYER}mlp.experts.linear_fc{number}.weight{{expert}}"))
            for number, rule in enumerate(one_each, 1)
        ),
    )


def _shared_expert(hf: str) -> tuple[Rule, ...]:
    return _gated_mlp("mlp.shared_experts", hf, "shared_ffn", "moe", when="moe_shared_expert_intermediate_size")


_DENSE_MLP = _gated_mlp("mlp", "mlp", "ffn", "dense")
_BIAS_NAMES = (_LAYER + "mlp.router.expert_bias",), (_HF + "mlp.gate.e_score_correction_bias",)
_EXPERT_BIAS = Rule(*_BIAS_NAMES, ("experts",), "replicated", "moe")
_SHARED_GATE = _whole((_LAYER + "mlp.shared_experts.gate_weight",), "mlp.shared_expert_gate", "moe", "one hidden")
_GATED_SHARED_EXPERT = (*_shared_expert("mlp.shared_expert"), _SHARED_GATE)
_SIGMOID_EXPERTS = (*_experts(), _EXPERT_BIAS, *_shared_expert("mlp.shared_experts"), *_DENSE_MLP)

FAMILIES: Mapping[str, tuple[Rule, ...]] = {
    "qwen3_moe": (*_ENDS, *_grouped_attention(), *_experts(), *_DENSE_MLP),
    **dict.fromkeys(DENSE, (*_ENDS, *_grouped_attention(), *_DENSE_MLP)),
    "qwen2_moe": (*_ENDS, *_grouped_attention(), *_experts(), *_DENSE_MLP, *_GATED_SHARED_EXPERT),
    "mixtral": (*_ENDS, *_grouped_attention(), *_experts("block_sparse_moe", names=("w1", "w3", "w2"))),
    "olmoe": (*_ENDS, *_grouped_attention("q", "kv"), *_experts()),
    "glm4_moe": (*_ENDS, *_grouped_attention(), *_SIGMOID_EXPERTS),
    "deepseek_v3": (*_ENDS, *_LATENT_ATTENTION, *_SIGMOID_EXPERTS),
}
"""Family -> rules."""


def rules_of(shape: ModelShape) -> tuple[Rule, ...]:
    """The rules of a model; with tied embeddings the output layer is a copy that no checkpoint holds."""
    rules = (rule for rule in FAMILIES[shape.family] if rule.applies(shape))
    return tuple(rule for rule in rules if not (shape.tied_embeddings and rule.hf == ("lm_head.weight",)))


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a Hugging Face checkpoint of this model."""
    sizes = dimensions(shape)
    found = {}
    for rule in rules_of(shape):
        wanted = [tuple(sizes[name] for name in dims.split()) for dims in rule.dims]
        for layer, expert in rule.places(shape):
            found.update(zip(rule.hf_names(layer, expert), wanted, strict=True))
    return found
