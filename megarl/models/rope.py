"""Rotary embeddings of a config.json in Megatron's terms."""

from typing import Any

from megarl.errors import ConfigError
from megarl.files.hf_config import ROPE, HFConfig


def read_rope(hf: HFConfig) -> HFConfig:
    """The rotary settings under the names of transformers 5, also from older configs.

    ConfigError where two places say two things: releases of transformers and engines differ in which of them counts.
    """
    place = "rope_scaling" if hf["rope_scaling"] else "rope_parameters"
    values = dict(hf[place] or {})
    if place == "rope_scaling" and hf["rope_parameters"] not in (None, {}, values):
        raise ConfigError(
            f"rope_scaling {values} and rope_parameters {hf['rope_parameters']} differ, expected one of them"
        )
    stated = {key: hf[key] for key in _BESIDE if key in hf.values}
    if "type" in values:
        stated["rope_type"] = values.pop("type")
    for key, value in stated.items():
        if values.setdefault(key, value) != value:
            raise ConfigError(f"{key} is {value!r} and, in {place}, {values[key]!r}; expected one value")
    left_out = {key: hf[key] for key in _BESIDE}
    left_out["original_max_position_embeddings"] = hf["max_position_embeddings"]
    return HFConfig({**left_out, **values}, ROPE, prefix=f"{place}.")


_BESIDE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
"""Keys that stand in the rotary table or beside it."""


def llama3_factor(rope: HFConfig) -> float | None:
    """Megatron has Llama 3.1's scaling with its own bounds of frequencies alone."""
    if rope["rope_type"] == "default":
        return None
    if rope["rope_type"] != "llama3":
        raise ConfigError(f"rope_type {rope['rope_type']!r} is not supported; expected 'default' or 'llama3'")
    bounds = {name: rope[name] for name in _LLAMA3}
    if bounds != _LLAMA3:
        raise ConfigError(f"rope_type 'llama3' with {bounds} is not supported; expected {_LLAMA3}")
    return float(rope["factor"])


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def latent_rope(rope: HFConfig) -> dict[str, Any]:
    base = {"rotary_base": float(rope["rope_theta"])}
    if rope["rope_type"] == "default":
        return base | {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    mscale, all_dim = rope["mscale"], rope["mscale_all_dim"]
    if rope["rope_type"] != "yarn" or mscale != all_dim or not mscale:
        raise ConfigError(
            f"rope_type {rope['rope_type']!r} with mscale {mscale} and mscale_all_dim {all_dim} is not supported; "
            "expected 'default', or 'yarn' with equal mscales above 0"
        )
    return base | {
        "rope_type": "yarn",
        "rotary_scaling_factor": float(rope["factor"]),
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": float(rope["beta_fast"] or 32),
        "beta_slow": float(rope["beta_slow"] or 1),
        "mscale": float(all_dim),
        "mscale_all_dim": float(all_dim),
    }
