"""Which layers of a model have experts, and how many: the shape of its routes. Needs no numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Which layers of a model have experts, and how many: the shape of its routing traces. A dense model has none."""

    num_layers: int  # all decoder layers, dense ones included
    moe_layers: tuple[int, ...]  # 0-based indices of the L MoE layers
    num_experts: int  # E
    topk: int  # K

    @property
    def dense_layers(self) -> tuple[int, ...]:
        return tuple(sorted(set(range(self.num_layers)) - set(self.moe_layers)))

    @staticmethod
    def of(hf: Mapping[str, Any]) -> MoeShape:
        """Read a model's config.json. ConfigError for a family that megarl does not know."""
        from megarl.files.hf_config import read_config  # its tables of families, for those who ask

        return MoeShape(*read_config(hf))

    @staticmethod
    def of_megatron(config: Any) -> MoeShape:
        """Read Megatron's ``TransformerConfig``; without experts it has no MoE layers."""
        count, frequency = config.num_layers, config.moe_layer_freq
        is_moe = frequency if isinstance(frequency, list) else [index % frequency == 0 for index in range(count)]
        layers = tuple(index for index, moe in enumerate(is_moe) if moe) if config.num_moe_experts else ()
        return MoeShape(count, layers, config.num_moe_experts or 0, config.moe_router_topk if layers else 0)
