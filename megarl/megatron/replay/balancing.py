"""Load-balancing losses under replay: they count the experts that tokens are sent to, or are left out.

Megatron's auxiliary losses multiply each expert's mean score by its share of the tokens, and take that share from a
top-k of their own. Under replay tokens go elsewhere, so the loss would balance a load that no expert carries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from megatron.core.transformer.moe.router import TopKRouter

from megarl.megatron.replay.hooks import Hook

AuxLoss = Literal["dispatch", "off"]
_Method = Callable[..., Any]


def count_dispatched(router: TopKRouter, hook: Hook, aux_loss: AuxLoss) -> None:
    """Hand the auxiliary losses of this one router the experts that tokens are dispatched to."""
    count_natively(router)  # a later RoutingReplay takes over from an earlier one
    hook.keeps_dispatched = _has_balancing_loss(router)
    if hook.keeps_dispatched:
        for name, wrap in _METHODS.items():
            setattr(router, name, wrap(getattr(router, name), hook, aux_loss))


def count_natively(router: TopKRouter) -> None:
    """Give the losses back to Megatron."""
    for name in _METHODS:
        vars(router).pop(name, None)


def _has_balancing_loss(router: TopKRouter) -> bool:
    if hasattr(router, "is_aux_loss_enabled"):  # from 0.14 on
        return router.is_aux_loss_enabled()
    return router.routing_type in ("aux_loss", "seq_aux_loss") and router.config.moe_aux_loss_coeff > 0


def _attached(method: _Method, hook: Hook, aux_loss: AuxLoss) -> _Method:
    """(probs, scores, routing map, ...) -> probs with the loss attached."""

    def attach(probs: torch.Tensor, scores: torch.Tensor, routing_map: torch.Tensor, *rest: Any, **named: Any) -> Any:
        if hook.dispatched is None:
            return method(probs, scores, routing_map, *rest, **named)
        if aux_loss == "off":
            return probs
        dispatched = torch.zeros_like(routing_map).scatter(1, hook.dispatched, 1)
        counted = routing_map.any(1, keepdim=True)  # Megatron has taken padding out
        return method(probs, scores, dispatched * counted, *rest, **named)

    return attach


def _scored(method: _Method, hook: Hook, _: AuxLoss) -> _Method:
    """logits -> (scores, routing map) in 0.13; 0.12 returns scores alone, and counts what the hook has returned."""

    def score(logits: torch.Tensor) -> Any:
        scored = method(logits)
        if hook.dispatched is None or isinstance(scored, torch.Tensor):
            return scored
        scores, routing_map = scored
        return scores, torch.zeros_like(routing_map).scatter(1, hook.dispatched, 1)

    return score


def _attached_or_not(method: _Method, hook: Hook, aux_loss: AuxLoss) -> _Method:
    """(probs, loss function) -> probs with the loss attached, before 0.14."""

    def attach(activation: torch.Tensor, load_balancing_loss_func: Callable[..., torch.Tensor]) -> Any:
        off = aux_loss == "off" and hook.dispatched is not None
        return activation if off else method(activation, load_balancing_loss_func)

    return attach


_METHODS: dict[str, Callable[[_Method, Hook, AuxLoss], _Method]] = {
    name: wrap
    for name, wrap in {
        "_apply_aux_loss": _attached,
        "_apply_seq_aux_loss": _attached,
        "_apply_global_aux_loss": _attached,
        "compute_routing_scores_for_aux_loss": _scored,
        "apply_load_balancing_loss": _attached_or_not,
    }.items()
    if hasattr(TopKRouter, name)
}
"""The methods of this release's router by which balancing losses are computed, and what to wrap them in."""
