"""The only reader of config.json: the shape of a model in Megatron's terms, and the shape of routes.

Without torch or pydantic: SGLang's processes and ``megarl plan`` read shapes too.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError, DataError, refusal, refuse_if, reworded
from megarl.files import hf_config
from megarl.files.foreign_json import read_object
from megarl.files.hf_config import FAMILIES, LACKING, ROPE, HFConfig, family_entry


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a model in Megatron's terms."""

    family: str
    """Model type, a key of families.toml."""
    fields: Mapping[str, Any]
    """Values for ``TransformerConfig``, or ``MLATransformerConfig`` with ``multi_latent_attention``."""
    vocab_size: int
    max_sequence_length: int
    rotary_base: float
    tied_embeddings: bool
    rotary_percent: float = 1.0
    """Rotated share of a head's dimensions."""
    latent_norm_epsilon: float | None = None
    """Of latent queries, keys and values, if different from the other norms."""
    norm_over_heads: bool = False
    """Query and key norms run over all heads together."""
    indexer_layers: tuple[int, ...] = ()
    """0-based, layers of sparse attention that select keys; the other layers attend to the keys of the last one."""
    indexer_interleaved: bool = False
    """The indexer rotates neighbouring values, not halves."""
    rope_factor: float | None = None
    """Of Llama 3.1's scaling of rotary frequencies; None without scaling."""

    @property
    def num_layers(self) -> int:
        return self.fields["num_layers"]

    @property
    def num_experts(self) -> int:
        """E; 0 for a dense model."""
        return self.fields.get("num_moe_experts") or 0

    @property
    def topk(self) -> int:
        """K; 0 for a dense model."""
        return self.fields.get("moe_router_topk", 0)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """0-based global indices of the MoE layers: column ``l`` of a routing trace belongs to layer moe_layers[l]."""
        return tuple(index for index, is_moe in enumerate(self.fields.get("moe_layer_freq", ())) if is_moe)

    @property
    def needs_local_layers(self) -> bool:
        """Whether Transformer Engine lacks a layer of the model: norms over all heads, or an indexer."""
        return self.norm_over_heads or bool(self.indexer_layers)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """0-based global indices of the layers with linear attention."""
        return tuple(index for index, linear in enumerate(self.fields.get("linear_attention_freq", ())) if linear)

    def describe(self) -> dict[str, Any]:
        """Return plain data for a checkpoint, to recognise a checkpoint of another model."""
        return {**self.fields, "vocab_size": self.vocab_size, "tied_embeddings": self.tied_embeddings}


def read_rope(hf: HFConfig, default: Mapping[str, Any]) -> HFConfig:
    """Return the rotary settings under the names of transformers 5, also from older configs.

    default: the table of a class for a config.json without one. ConfigError for two contradicting settings: releases of
    transformers and engines differ in the precedence.
    """
    place = "rope_scaling" if hf["rope_scaling"] else "rope_parameters"
    values = dict(default if hf[place] is None else hf[place])
    if place == "rope_scaling" and hf["rope_parameters"] not in (None, {}, values):
        raise ConfigError(refusal("two_ropes", scaling=values, parameters=hf["rope_parameters"]))
    stated = {key: hf[key] for key in _BESIDE if key in hf.values}
    if "type" in values:
        stated["rope_type"] = values.pop("type")
    beside = [*stated.items()]
    if (width := hf.get("rotary_dim")) is not None:
        beside.append(("partial_rotary_factor", width / hf["head_dim"]))
    for key, value in beside:
        if values.setdefault(key, value) != value:
            raise ConfigError(f"{key} is {value!r} and, in {place}, {values[key]!r}; expected one value")
    left_out = {key: hf[key] for key in _BESIDE}
    left_out["original_max_position_embeddings"] = hf["max_position_embeddings"]
    return HFConfig({**left_out, **values}, ROPE, prefix=f"{place}.")


_BESIDE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
"""Keys in the rotary table or at the top level."""


def llama3_factor(rope: HFConfig) -> float | None:
    """Return the factor of Llama 3.1's scaling; None without scaling. ConfigError for bounds that Megatron lacks."""
    if rope["rope_type"] == "default":
        return None
    refuse_if(rope["rope_type"] != "llama3", ConfigError, "rope_type", rope=rope)
    bounds = {name: rope[name] for name in _LLAMA3}
    refuse_if(bounds != _LLAMA3, ConfigError, "llama3_bounds", bounds=bounds, expected=_LLAMA3)
    return float(rope["factor"])


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def latent_rope(rope: HFConfig) -> dict[str, Any]:
    """Return Megatron's fields for the rotary embeddings of latent attention. ConfigError for unsupported settings."""
    base = {"rotary_base": float(rope["rope_theta"])}
    if rope["rope_type"] == "default":
        return base | {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    mscale, all_dim = rope["mscale"], rope["mscale_all_dim"]
    if rope["rope_type"] != "yarn" or mscale != all_dim or not mscale:
        raise ConfigError(refusal("latent_rope", kind=rope["rope_type"], mscale=mscale, all_dim=all_dim))
    return base | {"rope_type": "yarn", **_yarn(rope), "mscale": float(all_dim), "mscale_all_dim": float(all_dim)}


def grouped_yarn(rope: HFConfig) -> dict[str, Any]:
    """Return what Megatron's models with grouped attention read of YaRN; nothing for another type."""
    if rope["rope_type"] != "yarn":
        return {}
    mscale, all_dim = rope["mscale"], rope["mscale_all_dim"]
    has_both = mscale is not None and all_dim is not None
    scales = {"mscale": mscale if has_both else None, "mscale_all_dim": all_dim if has_both else None}
    values = {**_yarn(rope), **scales, "correction_range_round_to_int": rope["truncate"]}
    return {f"yarn_{name}": value for name, value in values.items()}


def _yarn(rope: HFConfig) -> dict[str, Any]:
    return {
        "rotary_scaling_factor": float(rope["factor"]),
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": float(rope["beta_fast"] or 32),
        "beta_slow": float(rope["beta_slow"] or 1),
    }


Traits = Mapping[str, Any]
"""``shape`` of a family in families.toml: its readers, and what they need to know of the family."""
Reader = Callable[[HFConfig, Traits], dict[str, Any]]
"""Reads a part of the fields from a config."""


def _flag(hf: HFConfig, trait: str | bool) -> bool:
    """Return a trait that is true or false for the whole family, or the value of the key that the trait names."""
    return hf[trait] if isinstance(trait, str) else trait


def _renamed(hf: HFConfig, reader: str) -> dict[str, Any]:
    return {field: hf[key] for field, key in hf_config.RENAMED.get(reader, {}).items()}


def _windows(hf: HFConfig, traits: Traits) -> dict[str, Any]:
    """Return which layers have a window, as Megatron counts keys: ``sliding_window`` less the query's.

    ``layer_types`` of the family, a trait, repeat in configs without the key.
    """
    period, num_layers = traits.get("layer_types", ["full_attention"]), hf["num_hidden_layers"]
    kinds = (period * num_layers)[:num_layers] if hf["layer_types"] is None else hf["layer_types"]
    if len(kinds) != num_layers or not {*kinds} <= {*period}:
        raise ConfigError(f"layer_types is {kinds}, expected {' or '.join(period)} for each of num_hidden_layers")
    if "sliding_attention" not in period:
        first = hf.get("max_window_layers")  # without layer_types, layers from this one on have windows
        if first is not None and hf["sliding_window"] and first < num_layers:
            raise ConfigError(f"max_window_layers is {first}, expected at least num_hidden_layers, {num_layers}")
        return {}
    skipped = [int(kind == "sliding_attention") for kind in kinds]
    return {"window_size": (hf["sliding_window"] - 1, 0), "window_attn_skip_freq": skipped}


def _grouped_attention(hf: HFConfig, traits: Traits) -> dict[str, Any]:
    heads = hf["num_attention_heads"]
    groups, width = hf["num_key_value_heads"] or heads, hf.get("head_dim") or hf["hidden_size"] // heads
    refuse_if(heads % groups, ConfigError, "query_groups", groups=groups, heads=heads)
    return {
        "num_query_groups": groups,
        "kv_channels": width,
        "qk_layernorm": _flag(hf, traits.get("head_norms", False)),
        "add_qkv_bias": _flag(hf, traits.get("qkv_bias", False)),
    }


def _softmax_experts(hf: HFConfig, traits: Traits) -> dict[str, Any]:
    # A softmax over the chosen logits equals a softmax over all logits, normalised again over the chosen logits.
    return {**_experts(hf, traits), "moe_router_pre_softmax": not (traits.get("normalised") or hf["norm_topk_prob"])}


def _experts(hf: HFConfig, traits: Traits) -> dict[str, Any]:
    moe = hf_config.read_moe(hf)
    refuse_if(not moe.moe_layers, ConfigError, "no_experts", layers=moe.num_layers)
    return {
        "moe_ffn_hidden_size": hf[traits.get("expert_width", "moe_intermediate_size")],
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.topk,
        "moe_layer_freq": [int(layer in moe.moe_layers) for layer in range(moe.num_layers)],
    }


def _sigmoid_experts(hf: HFConfig, traits: Traits) -> dict[str, Any]:
    """DeepSeek-V3's router: sigmoid scores, a bias for the choice alone, expert groups, shared experts."""
    topk, groups, topk_groups = hf["num_experts_per_tok"], hf.get("n_group") or 1, hf.get("topk_group") or 1
    is_normalised = traits.get("normalised") or hf["norm_topk_prob"]
    refuse_if(not is_normalised or topk < 2, ConfigError, "sigmoid_topk", normalised=is_normalised, topk=topk)
    # The model ranks groups by 2 experts, Megatron by topk // topk_group.
    if topk_groups > groups or (groups > 1 and topk // topk_groups != 2):
        raise ConfigError(refusal("topk_of_groups", topk=topk, chosen=topk_groups, groups=groups))
    experts = _experts(hf, traits)
    shared = hf.get("n_shared_experts") or hf.get("num_shared_experts") or 0
    per_group, odd = divmod(experts["num_moe_experts"], groups)
    facts = {"groups": groups, "chosen": topk_groups, "experts": experts["num_moe_experts"], "topk": topk}
    is_uneven = groups > 1 and (odd or per_group < 2 or topk_groups * per_group < topk)
    refuse_if(is_uneven, ConfigError, "expert_groups", **facts)
    return {
        **experts,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": topk_groups if groups > 1 else None,
        "moe_router_topk_scaling_factor": hf.get("routed_scaling_factor") or hf.get("router_scaling_factor") or 1.0,
        "moe_shared_expert_intermediate_size": experts["moe_ffn_hidden_size"] * shared or None,
    }


def _latent_attention(hf: HFConfig, _: Traits) -> dict[str, Any]:
    heads, plain, rotated = (hf[key] for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    for key, size in {"num_key_value_heads": heads, "head_dim": rotated, "qk_head_dim": plain + rotated}.items():
        facts = {"key": key, "value": (value := hf.get(key)), "size": size, "heads": heads, "plain": plain}
        refuse_if(value not in (None, size), ConfigError, "latent_width", rotated=rotated, **facts)
    return {"multi_latent_attention": True, "qk_layernorm": True}


def find_indexers(hf: HFConfig | Mapping[str, Any]) -> tuple[int, ...]:
    """Return the 0-based layers that select keys: all, unless the class has layers that share a selection. ConfigError
    for a config that contradicts itself.
    """
    kinds, pattern, layers = hf.get("indexer_types"), hf.get("index_topk_pattern"), range(hf["num_hidden_layers"])
    step, offset = hf.get("index_topk_freq") or 1, hf.get("index_skip_topk_offset") or 0
    pattern = pattern or ["S" if max(layer - offset + 1, 0) % step else "F" for layer in layers]
    kinds = [{"F": "full", "S": "shared"}.get(kind) for kind in pattern] if kinds is None else kinds
    if len(kinds) != len(layers) or {*kinds} - {"full", "shared"} or kinds[0] != "full":
        raise ConfigError(refusal("indexer_kinds", kinds=kinds, layers=len(layers)))
    return tuple(layer for layer in layers if kinds[layer] == "full")


def _delta_net(hf: HFConfig, _: Traits) -> dict[str, Any]:
    """Qwen3-Next's attention: gated delta nets, and in some layers gated softmax attention; zero-centred norms."""
    kinds, types = ("full_attention", "linear_attention"), hf["layer_types"]
    num_layers, interval = hf["num_hidden_layers"], hf["full_attention_interval"] or 4
    if types is None:
        types = [kinds[(layer + 1) % interval > 0] for layer in range(num_layers)]
    fields = {name: hf[name] for name in hf.defaults if name.startswith("linear_")}
    keys, values = fields["linear_num_key_heads"], fields["linear_num_value_heads"]
    refuse_if(values % keys, ConfigError, "value_heads", values=values, keys=keys)
    gates = {"attention_output_gate": True, "layernorm_zero_centered_gamma": True}
    return {**fields, **gates, "linear_attention_freq": [kinds.index(kind) for kind in types]}


_READERS = (_grouped_attention, _latent_attention, _delta_net, _softmax_experts, _sigmoid_experts)
READERS: Mapping[str, Reader] = {reader.__name__.removeprefix("_"): reader for reader in _READERS}
"""Names in families.toml -> readers of what a config adds to the common and the renamed fields."""


def read_shape(model_path: str | Path) -> ModelShape:
    """Return the shape of the checkpoint in a folder, from config.json. ConfigError for an unsupported model."""
    path = Path(model_path) / "config.json"
    refuse_if(not os.path.lexists(path), ConfigError, "no_model_folder", path=path)
    with reworded(DataError, ConfigError, suffix=", expected the config of a Hugging Face model"):
        hf = read_object(path)
    kind = str(hf.get("model_type", ""))
    if kind not in FAMILIES:
        reason = f" ({LACKING[kind]})" if kind in LACKING else ""
        supported = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"model type {kind!r} in {path} is not supported{reason}; supported are {supported}")
    with reworded(ConfigError, ConfigError, f"{path}: "):
        config = HFConfig.of(hf)
        for check in (hf_config.read_dtype, hf_config.read_weight_block, hf_config.count_prediction_layers):
            check(config.values)
        return _read(config, kind)


def _read(hf: HFConfig, kind: str) -> ModelShape:
    architecture, traits = family_entry(kind, "class"), family_entry(kind, "shape")
    if architecture not in (names := hf["architectures"] or [architecture]):
        raise ConfigError(f"architectures is {names}, expected [{architecture!r}] of model type {kind}")
    rope = read_rope(hf, family_entry(kind, "rope") or {})
    fields = {**_renamed(hf, "layers"), **_windows(hf, traits), "normalization": "RMSNorm"}
    fields["ffn_hidden_size"] = hf["intermediate_size"] or hf["moe_intermediate_size"]
    for name in traits["readers"]:
        fields |= _renamed(hf, name) | (READERS[name](hf, traits) if name in READERS else {})
    is_latent = "multi_latent_attention" in fields
    fields |= {**(latent_rope if is_latent else grouped_yarn)(rope), **traits.get("fields", {})}
    is_yarn = "yarn_rotary_scaling_factor" in fields  # of whole heads in Megatron
    if (rotated := rope["partial_rotary_factor"]) != 1 and (is_yarn or not traits.get("partly_rotated")):
        raise ConfigError(f"partial_rotary_factor is {rotated}, expected 1.0: {kind} turns whole heads")
    width = fields["qk_pos_emb_head_dim"] if is_latent else int(fields["kv_channels"] * rotated)
    refuse_if(width < 2 or width % 2, ConfigError, "odd_rotation", width=width)
    if traits.get("whole_heads") and hf["hidden_size"] % hf["num_attention_heads"]:
        raise ConfigError(refusal("hidden_of_heads", hidden=hf["hidden_size"], heads=hf["num_attention_heads"]))
    shape = ModelShape(
        kind,
        fields,
        vocab_size=hf["vocab_size"],
        max_sequence_length=hf["max_position_embeddings"],
        rotary_base=float(rope["rope_theta"]),
        tied_embeddings=hf["tie_word_embeddings"],
        rotary_percent=rotated,
        latent_norm_epsilon=traits.get("latent_norm_epsilon"),
        norm_over_heads=traits.get("norm_over_heads", False),
        indexer_layers=find_indexers(hf) if "dsa_indexer_topk" in fields else (),
        indexer_interleaved=bool(hf.get("indexer_rope_interleave")),
        rope_factor=None if is_latent or is_yarn else llama3_factor(rope),
    )
    for config in (hf, rope):
        config.check_unread()
    return shape
