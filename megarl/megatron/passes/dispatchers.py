"""Token dispatchers that forget a finished pass.

Megatron's dispatchers keep tensors of a layer's pass until the layer's next pass: probabilities with their graph,
routing maps, permutations. The graph of a recomputed layer holds all activations of the layer. With activation
checkpointing, the activations of every MoE layer would stay in memory, as if without recomputation.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import BaseMoELayer

_LAST_METHODS = ("combine_postprocess", "token_unpermutation")  # the second one up to 0.12


def release_after_use(model: torch.nn.Module) -> None:
    """Let all token dispatchers of a new model drop the tensors of a pass after the last method."""
    for module in model.modules():
        if isinstance(module, BaseMoELayer):
            _release_after_use(module.token_dispatcher)


def _release_after_use(dispatcher: Any) -> None:
    name = next(name for name in _LAST_METHODS if hasattr(dispatcher, name))
    last = getattr(dispatcher, name)
    # The flex dispatcher leaves the tensors to a manager.
    holders = [
        vars(holder) for holder in (dispatcher, getattr(dispatcher, "_comm_manager", None)) if holder is not None
    ]
    constants = [set(_tensors_of(holder)) for holder in holders]

    def combine(*arguments: Any, **options: Any) -> Any:
        output = last(*arguments, **options)
        for holder, constant in zip(holders, constants, strict=True):
            holder.update(dict.fromkeys(set(_tensors_of(holder)) - constant))
        return output

    setattr(dispatcher, name, combine)


def _tensors_of(holder: dict[str, Any]) -> list[str]:
    return [name for name, value in holder.items() if isinstance(value, torch.Tensor)]
