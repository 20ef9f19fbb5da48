"""What transformers makes of a config.json and Megatron of a ModelShape: parameters, rotary embeddings, routers."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megarl.files.hf_config import FAMILIES
from megarl.models.names import hf_shapes
from megarl.models.shapes import ModelShape

Facts = dict[str, Any]
_BUILT: dict[str, Facts] = {}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers says a line about most of the changed configs."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def class_of(kind: str) -> Any:
    """The config class of a model type; Kimi-K2 has that of DeepSeek-V3."""
    return CONFIG_MAPPING[FAMILIES[kind].get("like", kind)]


def facts_of_transformers(hf: Mapping[str, Any]) -> Facts:
    """Raises what transformers raises for a config that it cannot read, or build a model of."""
    config = class_of(hf["model_type"]).from_dict(copy.deepcopy(dict(hf)))
    key = json.dumps(config.to_dict(), sort_keys=True, default=str)
    if key not in _BUILT:
        _BUILT[key] = _build(config)
    return _BUILT[key]


def _build(config: Any) -> Facts:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    inner = model.model
    rotary, layer = type(inner.rotary_emb)(config), inner.layers[-1]
    moe = [index for index, one in enumerate(inner.layers) if hasattr(one.mlp, "experts")]
    facts: Facts = {
        "parameters": _unfused(model, config),
        "frequencies": rotary.inv_freq.double(),
        "rotary_scale": float(rotary.attention_scaling),
        "attention_scale": float(layer.self_attn.scaling),
        "norm_epsilon": layer.input_layernorm.variance_epsilon,
        "moe_layers": tuple(moe),
        "tied": config.tie_word_embeddings,
        "positions": config.max_position_embeddings,
        "activation": config.hidden_act,
        "window": getattr(layer.self_attn, "sliding_window", None) or getattr(config, "sliding_window", None) or None,
        "clip": getattr(config, "clip_qkv", None),
        "interleaved": getattr(config, "rope_interleave", None),
    }
    for name in ("q_norm", "q_a_layernorm", "kv_a_layernorm"):
        if module := getattr(layer.self_attn, name, None):
            facts[f"epsilon of {name}"] = module.variance_epsilon
    if moe:
        block = inner.layers[moe[-1]].mlp
        names = ("top_k", "norm_topk_prob", "topk_group", "routed_scaling_factor")
        # Releases of transformers have them in the block or in its router.
        facts["router"] = {name: getattr(block, name, getattr(block.gate, name, None)) for name in names}
        facts["router"]["n_group"] = getattr(config, "n_group", None)
    return facts


def _unfused(model: Any, config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes as published checkpoints have them: each expert by itself, the tied output layer left out."""
    is_mixtral = config.model_type == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    found = {}
    for name, tensor in model.state_dict().items():
        name = name.replace(".mlp.", ".block_sparse_moe.") if is_mixtral else name
        parent, _, last = name.rpartition(".")
        for expert in range(len(tensor) if parent.endswith(".experts") else 0):
            rows, columns = tensor.shape[1:]
            if last == "down_proj":
                found[f"{parent}.{expert}.{down}.weight"] = (rows, columns)
            else:
                found |= {f"{parent}.{expert}.{half}.weight": (rows // 2, columns) for half in (gate, up)}
        if not parent.endswith(".experts") and not (name == "lm_head.weight" and config.tie_word_embeddings):
            found[name] = tuple(tensor.shape)
    return found


def facts_of_megatron(shape: ModelShape) -> Facts:
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    fields, is_latent = shape.fields, "multi_latent_attention" in shape.fields
    width = fields["qk_pos_emb_head_dim"] if is_latent else fields["kv_channels"]
    scaling = (shape.rope_factor is not None, shape.rope_factor or 1.0)
    plain = RotaryEmbedding(width, shape.rotary_percent, False, None, shape.rotary_base, *scaling, True)  # type: ignore[arg-type]
    frequencies, rotary_scale = plain.inv_freq.double(), 1.0
    depth = fields["qk_head_dim"] + width if is_latent else width
    attention_scale = depth**-0.5
    if fields.get("rope_type") == "yarn":
        factor, all_dim = fields["rotary_scaling_factor"], fields["mscale_all_dim"]
        bounds = yarn._yarn_find_correction_range(
            fields["beta_fast"], fields["beta_slow"], width, fields["rotary_base"],
            fields["original_max_position_embeddings"],
        )  # fmt: skip
        ramp = yarn._yarn_linear_ramp_mask(*bounds, width // 2, torch.device("cpu"))
        frequencies = frequencies / factor * ramp + frequencies * (1 - ramp)
        rotary_scale = yarn._yarn_get_concentration_factor(factor, fields["mscale"], all_dim)
        attention_scale *= yarn._yarn_get_mscale(factor, all_dim) ** 2
    facts: Facts = {
        "parameters": hf_shapes(shape),
        "frequencies": frequencies,
        "rotary_scale": rotary_scale,
        "attention_scale": attention_scale,
        "norm_epsilon": fields["layernorm_epsilon"],
        "moe_layers": shape.moe_layers,
        "tied": shape.tied_embeddings,
        "positions": shape.max_sequence_length,
        "activation": "silu",
        "window": None,
        "clip": None,
        "interleaved": True if is_latent else None,
    }
    if is_latent:
        names = ("q_a_layernorm", "kv_a_layernorm") if fields["q_lora_rank"] else ("kv_a_layernorm",)
        facts |= {f"epsilon of {name}": shape.latent_norm_epsilon for name in names}
    elif fields["qk_layernorm"]:
        facts["epsilon of q_norm"] = fields["layernorm_epsilon"]
    if shape.moe_layers:
        is_sigmoid, is_mixtral = "moe_router_score_function" in fields, shape.family == "mixtral"
        facts["router"] = {
            "top_k": shape.topk,
            "norm_topk_prob": None if is_mixtral else is_sigmoid or not fields["moe_router_pre_softmax"],
            "n_group": (fields["moe_router_num_groups"] or 1) if is_sigmoid else None,
            "topk_group": (fields["moe_router_group_topk"] or 1) if is_sigmoid else None,
            "routed_scaling_factor": fields["moe_router_topk_scaling_factor"] if is_sigmoid else None,
        }
    return facts


def differences(left: Facts, right: Facts) -> list[str]:
    """What differs, in words."""
    found = []
    for name in left.keys() | right.keys():
        one, other = left.get(name), right.get(name)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            is_same = one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=0)
        elif isinstance(one, float) and isinstance(other, float):
            is_same = math.isclose(one, other, rel_tol=1e-6)
        else:
            is_same = one == other
        if not is_same:
            found.append(f"{name}: {_short(one)} and {_short(other)}")
    return sorted(found)


def _short(value: Any) -> str:
    return repr(value)[:160]
