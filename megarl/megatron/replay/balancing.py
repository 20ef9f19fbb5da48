"""Load-balancing losses under replay: they count the experts that tokens are sent to, or are left out.

Megatron's auxiliary losses multiply each expert's mean score by its share of the tokens, and compute that share from a
top-k of their own. Under replay, tokens go elsewhere: the loss would balance a load that no expert has.
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
    """Make the auxiliary losses of this router count the experts that tokens are dispatched to."""
    count_natively(router)  # undo what an earlier RoutingReplay did
    if hasattr(router, "is_aux_loss_enabled"):  # from 0.14 on
        hook.keeps_dispatched = router.is_aux_loss_enabled()
    else:
        is_used = router.config.moe_aux_loss_coeff > 0
        hook.keeps_dispatched = is_used and router.routing_type in ("aux_loss", "seq_aux_loss")
    if hook.keeps_dispatched:
        for name, wrap in _METHODS.items():
            if hasattr(router, name):
                setattr(router, name, wrap(getattr(router, name), hook, aux_loss))


def count_natively(router: TopKRouter) -> None:
    """Restore Megatron's own losses."""
    for name in _METHODS:
        vars(router).pop(name, None)


def _wrap_loss(method: _Method, hook: Hook, aux_loss: AuxLoss) -> _Method:
    """Wrap a method (probs, scores, routing map, ...) -> probs with the loss attached."""

    def attach(probs: torch.Tensor, scores: torch.Tensor, routing_map: torch.Tensor, *rest: Any, **named: Any) -> Any:
        if hook.dispatched is None:
            return method(probs, scores, routing_map, *rest, **named)
        if aux_loss == "off":
            return probs
        dispatched = torch.zeros_like(routing_map).scatter(1, hook.dispatched, 1)
        counted = routing_map.any(1, keepdim=True)  # rows of padding are empty
        return method(probs, scores, dispatched * counted, *rest, **named)

    return attach


def _wrap_scores(method: _Method, hook: Hook, _: AuxLoss) -> _Method:
    """Wrap a method logits -> (scores, routing map), as in 0.13. In 0.12, it returns scores only."""

    def score(logits: torch.Tensor) -> Any:
        scored = method(logits)
        if hook.dispatched is None or isinstance(scored, torch.Tensor):
            return scored
        scores, routing_map = scored
        return scores, torch.zeros_like(routing_map).scatter(1, hook.dispatched, 1)

    return score


def _wrap_switch(method: _Method, hook: Hook, aux_loss: AuxLoss) -> _Method:
    """Wrap a method (probs, loss function) -> probs with the loss attached, as releases before 0.14 have."""

    def attach(activation: torch.Tensor, load_balancing_loss_func: Callable[..., torch.Tensor]) -> Any:
        off = aux_loss == "off" and hook.dispatched is not None
        return activation if off else method(activation, load_balancing_loss_func)

    return attach


_METHODS: dict[str, Callable[[_Method, Hook, AuxLoss], _Method]] = {
    "_apply_aux_loss": _wrap_loss,
    "_apply_seq_aux_loss": _wrap_loss,
    "_apply_global_aux_loss": _wrap_loss,
    "compute_routing_scores_for_aux_loss": _wrap_scores,
    "apply_load_balancing_loss": _wrap_switch,
}
"""Methods of a router that compute balancing losses, with their wrappers; each release has some of them."""
