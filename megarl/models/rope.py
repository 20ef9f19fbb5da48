"""Rotary embeddings of a config.json in Megatron's terms."""

from collections.abc import Mapping
from typing import Any

from megarl.errors import ConfigError


def read_rope(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings under the names of transformers 5, also from older configs."""
    found = dict(hf.get("rope_parameters") or {"rope_theta": hf.get("rope_theta", 10000.0)})
    found |= hf.get("rope_scaling") or {}
    found["rope_type"] = found.get("rope_type") or found.get("type") or "default"
    return found


def llama3_factor(rope: Mapping[str, Any]) -> float | None:
    """Megatron has Llama 3.1's scaling with its own bounds of frequencies alone."""
    if rope["rope_type"] != "llama3":
        return None
    found = {name: rope.get(name) for name in _LLAMA3}
    if found != _LLAMA3:
        raise ConfigError(f"rope type 'llama3' with {found} is not supported; expected {_LLAMA3}")
    return float(rope["factor"])


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def latent_rope(hf: Mapping[str, Any]) -> dict[str, Any]:
    rope = read_rope(hf)
    base = {"rotary_base": float(rope.get("rope_theta", 10000.0))}
    if rope["rope_type"] == "default":
        return base | {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    all_dim = rope.get("mscale_all_dim") or 0.0
    if rope["rope_type"] != "yarn" or rope.get("mscale", 1.0) != all_dim:
        raise ConfigError(
            f"rope type {rope['rope_type']!r} with mscale {rope.get('mscale')} and mscale_all_dim {all_dim} is not "
            "supported; expected 'default', or 'yarn' with equal mscales"
        )
    return base | {
        "rope_type": "yarn",
        "rotary_scaling_factor": float(rope["factor"]),
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": float(rope.get("beta_fast", 32)),
        "beta_slow": float(rope.get("beta_slow", 1)),
        "mscale": float(all_dim),
        "mscale_all_dim": float(all_dim),
    }
