"""The names under which Megatron looks for parameters in a ``torch_dist`` checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megarl.models.names import Rule
from megarl.models.shapes import ModelShape

Layers = Literal["local", "te"]
"""Which layers will load the checkpoint: Megatron's local ones, or Transformer Engine's."""

_FUSED_IN_LOCAL = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""What local layers with grouped attention call these parameters in checkpoints."""
_LAYER = "layers.{layer}."
_LAYERS: tuple[Layers, ...] = ("local", "te")


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a parameter in a global tensor: ``global[(*index, ...)]`` is the parameter."""

    key: str
    index: tuple[int, ...]
    """Layer, expert, or both, where the global tensor has an axis for them."""
    sizes: tuple[int, ...]
    """Lengths of these axes."""


@dataclass(frozen=True, slots=True)
class Keys:
    """One way in which Megatron names parameters in checkpoints; ``Keys.all_of`` lists all that it has used."""

    layers: Layers
    stacked: bool
    """One tensor [L, ...] for all layers, Megatron's default where all layers are of one kind; else one per layer."""
    single_experts: bool = False
    """One key per expert, and gate and up apart (``singleton_local_shards``); else one axis for the experts."""

    @staticmethod
    def all_of(shape: ModelShape) -> list[Keys]:
        one_kind = len(shape.moe_layers) in (0, shape.num_layers)
        plain = [Keys(layers, stacked) for stacked in ([False, True] if one_kind else [False]) for layers in _LAYERS]
        return [*plain, *(Keys(layers, False, single_experts=True) for layers in _LAYERS)]

    @staticmethod
    def of_megatron(shape: ModelShape, layers: Layers, stacked: bool = False) -> Keys:
        """The keys that Megatron asks for: it stacks the layers of a dense model, not those of a MoE model.

        The reason: ``moe_layer_freq`` is a list.
        """
        return Keys(layers, stacked or not shape.moe_layers)

    def places(self, rule: Rule, shape: ModelShape, layer: int, expert: int) -> list[Place]:
        """One, or with ``single_experts`` the two halves of a gated matrix."""
        name = self._name(rule, shape)
        index, sizes = [], []
        if rule.scope != "model":
            if self.stacked:
                name = name.replace(_LAYER, "layers.")
                index, sizes = [layer], [shape.num_layers]
            else:
                name = name.replace(_LAYER, f"layers.{layer}.")
        if rule.scope == "expert" and self.single_experts:
            name = name.replace("{expert}", str(expert))
        elif rule.scope == "expert":
            name = name.replace("{expert}.", "")
            index, sizes = [*index, expert], [*sizes, shape.num_experts]
        halves = ("_w", "_v") if self.single_experts and rule.layout == "gate_up" else ("",)
        return [Place(name + half, tuple(index), tuple(sizes)) for half in halves]

    def _name(self, rule: Rule, shape: ModelShape) -> str:
        if rule.scope == "expert":  # the same for both kinds of layers
            return rule.megatron[0].replace("local_experts.{expert}", "experts.{expert}")
        name = rule.megatron[0 if self.layers == "local" else -1]
        if self.layers == "local" and not shape.fields.get("multi_latent_attention"):
            for local, fused in _FUSED_IN_LOCAL.items():
                name = name.replace(local, fused)
        return name

    def extra_states(self, rule: Rule, shape: ModelShape, layer: int, expert: int) -> list[str]:
        """Names of the ``_extra_state`` objects that the parameter's module loads: None without FP8 training."""
        place = self.places(rule, shape, layer, expert)[0]
        module = place.key.rpartition(".")[0]
        leaf = module.rpartition(".")[2]
        is_linear = leaf.startswith("linear_")
        if (rule.scope == "model" and leaf != "final_layernorm") or not (is_linear or self.layers == "te"):
            return []
        index, sizes = (".".join(map(str, numbers)) for numbers in (place.index or (0,), place.sizes or (1,)))
        modules = [module]
        if self.layers == "te" and leaf == "linear_proj":
            modules.append(module.replace("linear_proj", "core_attention"))
        return [f"{name}._extra_state/shard_{index}_{sizes}" for name in modules if leaf != "router"]
