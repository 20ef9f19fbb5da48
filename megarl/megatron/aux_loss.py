"""Load-balancing losses under replay: they count the experts that tokens are sent to, or are left out.

Megatron's auxiliary losses multiply each expert's mean score by its share of the tokens, and take that share from a
top-k of their own. Under replay tokens go elsewhere, so the loss would balance a load that no expert carries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from megatron.core.transformer.moe.router import TopKRouter

from megarl.megatron.replay_hooks import Hook

AuxLoss = Literal["dispatch", "off"]
_AUX_LOSSES = ("_apply_aux_loss", "_apply_seq_aux_loss", "_apply_global_aux_loss")
"""Methods of Megatron's router: (probs, scores, routing map, ...) -> probs with the loss attached."""


def count_dispatched(router: TopKRouter, hook: Hook, aux_loss: AuxLoss) -> None:
    """Hand the auxiliary losses of this one router the experts that tokens are dispatched to."""
    count_natively(router)  # a later RoutingReplay takes over from an earlier one
    hook.keeps_dispatched = router.is_aux_loss_enabled()
    if not hook.keeps_dispatched:
        return

    def attached(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def attach(
            probs: torch.Tensor, scores: torch.Tensor, routing_map: torch.Tensor, *rest: Any, **named: Any
        ) -> Any:
            if hook.dispatched is None:
                return method(probs, scores, routing_map, *rest, **named)
            if aux_loss == "off":
                return probs
            dispatched = torch.zeros_like(routing_map).scatter(1, hook.dispatched, 1)
            counted = routing_map.any(1, keepdim=True)  # Megatron has taken padding out
            return method(probs, scores, dispatched * counted, *rest, **named)

        return attach

    for name in _AUX_LOSSES:
        setattr(router, name, attached(getattr(router, name)))


def count_natively(router: TopKRouter) -> None:
    """Give the losses back to Megatron."""
    for name in _AUX_LOSSES:
        vars(router).pop(name, None)
