"""Reads from config.json which layers have experts, and how many, for any family with the usual keys."""

import reprlib
from collections.abc import Mapping
from typing import Any

from megarl.errors import ConfigError
from megarl.files.hf_config import BOUNDS, FAMILIES, HFConfig

DENSE = ("llama", "qwen2", "qwen3")
"""Model types without experts."""
MoeSizes = tuple[int, tuple[int, ...], int, int]
"""The fields of ``MoeShape``: number of layers, MoE layers, experts, top-k."""
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""E under the names of Qwen and OLMoE, of Mixtral, and of DeepSeek and GLM-4."""
_MOE_LAYERS = (
    *("mlp_layer_types", "moe_layers", "interleave_moe_layer_step", "moe_layer_start_index", "moe_layer_interval"),
    *("layers_block_type", "hybrid_override_pattern", "num_dense_layers"),
)
"""Keys of other families that say which layers have experts."""


_ANY_FAMILY: Mapping[str, Any] = {
    "sizes": ("num_hidden_layers", "num_experts_per_tok"),
    "optional": (*_EXPERT_COUNTS, "first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers", "moe_layer_freq"),
}


def read_moe(hf: HFConfig, frequency: int = 1) -> MoeSizes:
    """Return the sizes of a config of one family. ConfigError if they contradict each other."""
    num_layers, dense = hf["num_hidden_layers"], hf.get("mlp_only_layers") or ()
    first, step = hf.get("first_k_dense_replace") or 0, hf.get("decoder_sparse_step")
    frequency, offset = (step, 1) if step else (frequency, 0)  # Qwen counts layers from 1, DeepSeek from 0
    if len(dense) > num_layers or not all(0 <= layer < num_layers for layer in dense):
        raise ConfigError(f"mlp_only_layers is {reprlib.repr(dense)}, expected some of layers 0 to {num_layers - 1}")
    layers = [i for i in range(first, num_layers) if i not in dense and (i + offset) % frequency == 0]
    num_experts, topk = next(filter(None, map(hf.get, _EXPERT_COUNTS))), hf["num_experts_per_tok"]
    if topk > num_experts:
        raise ConfigError(f"num_experts_per_tok is {topk}, expected at most the {num_experts} experts")
    if num_layers * num_experts > (most := BOUNDS["experts_of_all_layers"][1]):
        found = f"num_hidden_layers is {num_layers} with {num_experts} experts each"
        raise ConfigError(f"{found}, expected at most {most} experts in all")
    return num_layers, tuple(layers), num_experts, topk


def read_config(hf: Mapping[str, Any]) -> MoeSizes:
    """Read the config of a model of any family below, or of another with the same names.

    ConfigError if it names no experts and is of no dense family (``DENSE``).
    """
    if (kind := str(hf.get("model_type"))) in DENSE:
        return HFConfig.of(hf)["num_hidden_layers"], (), 0, 0
    if kind in FAMILIES:
        return read_moe(HFConfig.of(hf))
    sizes = (hf.get("num_hidden_layers"), hf.get("num_experts_per_tok"), hf.get("moe_layer_freq") or 1)
    if {type(size) for size in sizes} != {int} or not any(map(hf.get, _EXPERT_COUNTS)):
        *names, last = _EXPERT_COUNTS
        raise ConfigError(
            f"model type {hf.get('model_type')!r} has no experts: its config.json names neither "
            f"{', '.join(names)} nor {last} together with num_experts_per_tok"
        )
    if elsewhere := [key for key in _MOE_LAYERS if hf.get(key)]:
        raise ConfigError(f"{elsewhere[0]} says which layers have experts, in a way that is not known here")
    table = HFConfig(hf, _ANY_FAMILY)
    return read_moe(table, table["moe_layer_freq"] or 1)
