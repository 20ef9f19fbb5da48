"""Which layers of a Hugging Face model are MoE layers, how many experts they have, and how many a token uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MoeShape:
    """What a routing trace of the model looks like."""

    num_layers: int
    """All decoder layers, dense ones included."""
    moe_layers: tuple[int, ...]
    """0-based indices of the L MoE layers."""
    num_experts: int
    """E."""
    topk: int
    """K."""

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """0-based indices of the layers without experts."""
        return tuple(sorted(set(range(self.num_layers)) - set(self.moe_layers)))

    @staticmethod
    def of(config: Mapping[str, Any]) -> MoeShape:
        """Read a config.json; ConfigError if it describes no MoE model.

        The names are those of Qwen2/3-MoE, Mixtral, OLMoE (``num_experts``, ``num_local_experts``), DeepSeek and GLM4
        (``n_routed_experts``, ``first_k_dense_replace``).
        """
        experts = next(
            (config[n] for n in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(n)), 0
        )
        topk = config.get("num_experts_per_tok")
        if not experts or not topk:
            raise ConfigError(
                f"model type {config.get('model_type')!r} has no experts: its config.json names neither num_experts, "
                "num_local_experts nor n_routed_experts together with num_experts_per_tok"
            )
        layers = range(config["num_hidden_layers"])
        dense = set(config.get("mlp_only_layers") or ())
        step = config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1
        first = config.get("first_k_dense_replace") or 0
        # Qwen counts layers from 1, DeepSeek from 0.
        offset = 1 if config.get("decoder_sparse_step") else 0
        moe = tuple(i for i in layers if i not in dense and i >= first and (i + offset) % step == 0)
        return MoeShape(len(layers), moe, experts, topk)
