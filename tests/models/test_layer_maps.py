"""Which layers of a model have experts, and which of these take them from a table: as in transformers' own modules."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from test_hf_config import PUBLIC
from transformers import AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megarl.errors import ConfigError
from megarl.files.hf_config import FAMILIES, LAYER_MAPS, MoeShape

E, K = 11, 3
COUNTS = {"num_hidden_layers": 6, "num_experts_per_tok": K}
WITHOUT_CLASS = {"bailing_hybrid", "bailing_moe", "bailing_moe_linear", "bailing_moe_v2"}
"""Types that transformers does not have."""

CHANGES: dict[str, list[dict[str, Any]]] = {
    "afmoe": [{"num_dense_layers": 0}, {"num_dense_layers": 4}],
    "cohere2_moe": [{"first_k_dense_replace": 2, "prefix_dense_intermediate_size": 64}],
    "deepseek_v2": [{"first_k_dense_replace": 2}],
    "deepseek_v32": [{"first_k_dense_replace": 1}, {"mlp_layer_types": ["sparse", "dense"] * 3}],
    "deepseek_v4": [{"num_hash_layers": 0}, {"num_hash_layers": 9}, {"mlp_layer_types": ["moe", "hash_moe"] * 3}],
    "dots1": [{"first_k_dense_replace": 2}],
    "ernie4_5_moe": [
        {"moe_layer_start_index": 2, "moe_layer_end_index": 4},
        {"moe_layer_interval": 2, "moe_layer_end_index": 9},
    ],
    "exaone_moe": [{"first_k_dense_replace": 3}, {"mlp_layer_types": ["sparse"] * 6}],
    "gemma4_text": [{"enable_moe_block": True}],
    "glm4_moe_lite": [{"mlp_layer_types": ["sparse", "dense"] * 3}],
    "glm4v_moe_text": [{"first_k_dense_replace": 2}],
    "glm_moe_dsa": [{"first_k_dense_replace": 1}, {"mlp_layer_types": ["dense"] * 5 + ["sparse"]}],
    "hunyuan_v1_moe": [{"moe_topk": [K] * 6}],
    "hy_v3": [{"mlp_layer_types": ["sparse", "dense"] * 3}],
    "laguna": [{"mlp_layer_types": ["sparse", "dense"] * 3}],
    "lfm2_moe": [{"num_dense_layers": 3}],
    "llama4_text": [{"interleave_moe_layer_step": 2}, {"moe_layers": [4, 1]}],
    "longcat_flash": [{"zero_expert_num": 4}],
    "minimax_m3_vl_text": [{"moe_layer_freq": [0, 0, 1, 1, 0, 1]}, {"mlp_layer_types": ["sparse", "dense"] * 3}],
    "nemotron_h": [{"layers_block_type": ["moe", "mamba", "mlp", "moe"]}, {"layer_types": ["moe"] * 2}],
    "qwen3_next": [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 3]}],
}
"""Beside the defaults of each class."""


MORE: dict[str, dict[str, Any]] = {
    "dots1": {"n_shared_experts": 1},
    "gemma4_text": {"moe_intermediate_size": 64},
    "hunyuan_v1_moe": {"head_dim": 64},
    "lfm2_moe": {"layer_types": ["full_attention"] * 6},
    "longcat_flash": {"num_layers": 4, "zero_expert_num": 0},
}
"""Without these, a class cannot be built."""


def config_of(kind: str, changes: dict[str, Any]) -> dict[str, Any]:
    """A config.json that states the sizes, under the names of the class."""
    entry = LAYER_MAPS[kind]
    experts = next(key for key in [*entry.get("sizes", ()), *entry.get("optional", ())] if "experts" in key)
    names = {key: alias for alias, key in entry.get("aliases", {}).items()}
    stated = {**COUNTS, experts: E}
    config: dict[str, Any] = {"model_type": kind, **{names.get(key, key): value for key, value in stated.items()}}
    config |= MORE.get(kind, {})
    if kind == "nemotron_h":
        del config["num_hidden_layers"]
        changes = changes or {"hybrid_override_pattern": "MEM*E-"}
    return config | changes


def read_model(config: dict[str, Any]) -> MoeShape:
    """What transformers builds: a layer has experts if a parameter or list of modules has one part for each of them."""
    logging.disable(logging.ERROR)
    kind = config["model_type"]
    with torch.device("meta"):
        model = AutoModel.from_config(CONFIG_MAPPING[kind].from_dict(dict(config)))
    logging.disable(logging.NOTSET)
    layers = [name for name, module in model.named_modules() if name.endswith("layers") and len(list(module)) > 1]
    decoder = list(model.get_submodule(min(layers, key=len)))
    has_experts, has_table, counts, topk = [], [], {0}, {0}
    for layer in decoder:
        parts = [part for name, part in layer.named_parameters() if part.dim() == 3 and "conv" not in name]
        lists = [part for part in layer.modules() if isinstance(part, torch.nn.ModuleList) and len(part) == E]
        has_experts.append(bool(parts or lists))
        has_table.append(any("tid2eid" in name for name, _ in layer.named_buffers()))
        if has_experts[-1]:
            routers = [module for module in layer.modules() if hasattr(module, "top_k")]
            topk |= {int(module.top_k) for module in routers} or {model.config.top_k_experts}
            weights = [part for name, part in layer.named_parameters() if part.dim() == 2]
            counts |= {len(part) for part in weights if E <= len(part) < 16}
    moe = [index for index, found in enumerate(has_experts) if found]
    exempt = tuple(index for index in moe if has_table[index])
    return MoeShape(len(decoder), tuple(i for i in moe if i not in exempt), max(counts), max(topk), exempt)


POINTS = [
    pytest.param(config_of(kind, changes), id=f"{kind}-{','.join(changes)}")
    for kind in LAYER_MAPS
    if kind not in WITHOUT_CLASS
    for changes in ({}, *CHANGES.get(kind, ()))
]


@pytest.mark.parametrize("config", POINTS)
def test_layers_with_experts_are_those_of_transformers_modules(config: dict[str, Any]) -> None:
    assert MoeShape.of(config) == read_model(config)


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    """The text model of a public config.json, without the keys of a quantisation."""
    text = config.get("text_config") or config
    return {"model_type": f"{config['model_type']}_text", **text, "quantization_config": None}


OF_MAPS = [name for name, one in PUBLIC.items() if text_of(one["config"])["model_type"] in LAYER_MAPS]


@pytest.mark.parametrize(
    "name", [name for name in OF_MAPS if PUBLIC[name]["config"]["model_type"] not in WITHOUT_CLASS]
)
def test_public_models_have_the_layers_of_transformers_modules(name: str) -> None:
    config = PUBLIC[name]["config"]
    text = text_of(config)
    assert MoeShape.of(config) == MoeShape.of(text)
    small = {
        key: E for key in text if key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    }
    if isinstance(text.get("moe_topk"), list):
        small["moe_topk"] = text["moe_topk"][:1] * text["num_hidden_layers"]
    assert MoeShape.of(text | small) == read_model(MORE.get(text["model_type"], {}) | text | small)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("DeepSeek-V4-Flash", MoeShape(43, tuple(range(3, 43)), 256, 6, (0, 1, 2))),
        ("Kimi-K2.5", MoeShape(61, tuple(range(1, 61)), 384, 8)),
        ("Ring-mini-2.0", MoeShape(20, tuple(range(1, 20)), 256, 8)),
        ("Llama-4-Scout-17B-16E", MoeShape(48, tuple(range(48)), 16, 1)),
    ],
)
def test_public_models_by_hand(name: str, shape: MoeShape) -> None:
    assert MoeShape.of(PUBLIC[name]["config"]) == shape


def test_a_family_of_the_trainer_has_no_second_entry() -> None:
    assert LAYER_MAPS.keys().isdisjoint(FAMILIES)


EVERY_KEY = {
    "sizes": ["num_experts"],
    "optional": ["mlp_layer_types", "moe_layers", "mlp_only_layers"],
    "defaults": {"num_hash_layers": 0},
    "aliases": {"hybrid_override_pattern": "mlp_layer_types", "moe_layer_freq": "mlp_layer_types"}
    | {"moe_topk": "num_experts_per_tok"},
}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"hybrid_override_pattern": "MEMXEE"},
            "hybrid_override_pattern is 'MEMXEE', expected .* one of 'sparse', 'moe', 'E'",
        ),
        ({"moe_layer_freq": 1}, "moe_layer_freq is 1, expected for each of .* 6, one of"),
        ({"mlp_layer_types": ["moe"] * 5}, "for each of .* 6, one of"),
        ({"num_hash_layers": -1}, "num_hash_layers is -1, expected an integer from 0"),
        ({"moe_layers": [6]}, r"moe_layers is \[6\], expected some of layers 0 to 5"),
        ({"mlp_only_layers": ["a"]}, r"mlp_only_layers is \['a'\], expected a list"),
        ({"moe_topk": [1, 2, 1, 1, 1, 1]}, r"moe_topk is \[1, 2.*expected an integer"),
        ({"moe_topk": 12}, "is 12, expected at most the 11 experts"),
        ({"num_experts": None}, "num_experts is None, expected an integer"),
        ({"model_type": "new"}, "model type 'new' is not known"),
        ({"model_type": "new", "text_config": {"text_config": {}}}, "model type 'new_text' is not known"),
    ],
)
def test_what_is_refused_and_how(changes: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYER_MAPS, "every_key", EVERY_KEY)  # type: ignore[arg-type]
    config = {"model_type": "every_key", "num_hidden_layers": 6, "num_experts": E, "moe_topk": K}
    assert MoeShape.of(config) == MoeShape(6, (0, 1, 2, 3, 4, 5), E, K)
    with pytest.raises(ConfigError, match=told):
        MoeShape.of(config | changes)
