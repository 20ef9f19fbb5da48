"""The objects that Megatron's routers ask for experts (``router.router_replay``).

A ``Hook`` identifies the pass that it is asked for (``PassLog``) and passes the question to the open session. Without
a session, and for passes outside the block, it routes natively.

Megatron's auxiliary losses multiply each expert's mean score by its share of the tokens, and compute that share from a
top-k of their own. Under replay, tokens go elsewhere, so the losses count what is dispatched (``count_dispatched``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch.utils.hooks import RemovableHandle

from megarl.core.routing.trace import narrow_dtype
from megarl.megatron.distributed import tp_position
from megarl.megatron.replay.pass_log import Block, Call, PassLog

AuxLoss = Literal["dispatch", "off"]
_Method = Callable[..., Any]
TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Session(Protocol):
    """Answers the routers while a block is open."""

    replays: bool
    """Whether the experts come from given routes and not from the router."""
    tokens: dict[int, torch.Tensor]
    """By micro-batch, the ids that the model gets, one per row of its routers."""

    def choose(self, hook: Hook, call: Call, question: Question) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores at the experts [T_local, K], experts int64 [T_local, K]) for a pass of the block."""
        ...


class Question:
    """One call of a router: its scores [T_local, E], and the router's own choice."""

    def __init__(self, scores: torch.Tensor, compute: TopK, topk: int, *groups: int | None) -> None:
        self.scores, self._compute, self._topk, self._groups = scores, compute, topk, groups
        self._preferred: torch.Tensor | None = None

    def native(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores, experts) of the router's own choice, with their graph."""
        return self._compute(self.scores, self._topk, *self._groups)

    @torch.no_grad()  # non-reentrant checkpointing requires that both passes of a layer save the same tensors
    def preferred(self) -> torch.Tensor:
        """Experts int64 [T_local, K] of the router's own choice, computed once."""
        if self._preferred is None:
            self._preferred = self._compute(self.scores.detach(), self._topk, *self._groups)[1]
        return self._preferred

    @torch.no_grad()
    def preferred_at(self, rows: torch.Tensor) -> torch.Tensor:
        """The same in some rows, int64 [R, K]; computed for these rows alone where that is possible."""
        if self._groups[1] or self._preferred is not None:  # Megatron's group-limited top-k takes all tokens
            return self.preferred().index_select(0, rows)
        return self._compute(self.scores.detach().index_select(0, rows), self._topk, *self._groups)[1]

    def at(self, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores at the experts, experts)."""
        return self.scores.gather(1, experts), experts


class RouterHook:
    """What Megatron finds as ``router.router_replay``."""

    def answer(self, question: Question) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores at the chosen experts [T_local, K], experts int64 [T_local, K])."""
        raise NotImplementedError

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Megatron, from 0.16 on, calls this in place of its own top-k."""
        assert default_compute_topk is not None
        return self.answer(Question(scores, default_compute_topk, topk, num_groups, group_topk))


class Hook(RouterHook):
    """The hook of one router of the decoder."""

    def __init__(self, router: Any, column: int, log: PassLog | None) -> None:
        self.layer: int = router.layer_number - 1
        self.column = column
        self.router = router
        self.topk: int = router.topk
        self.num_experts: int = router.config.num_moe_experts
        self.dtype: torch.dtype = getattr(torch, narrow_dtype(self.num_experts, signed=True).__name__)
        self.log = PassLog(self.layer) if log is None else log.take_over()
        self.session: Session | None = None
        self.tap: RemovableHandle | None = None
        """Of ``tap_inputs``, on the first router of a chunk."""
        self.keeps_dispatched = False
        self.dispatched: torch.Tensor | None = None
        """int64 [T_local, K], the experts of the latest call under replay; kept for auxiliary losses only."""

    def begin(self, session: Session, block: Block) -> None:
        self.session = session
        self.log.open(block)

    def end(self) -> None:
        self.session = self.dispatched = None
        self.log.close()

    def answer(self, question: Question) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``RouterHook``."""
        call = self.log.identify(self.router.training)
        if self.session is None or call.micro is None:
            self.dispatched = None
            return question.native()
        chosen = self.session.choose(self, call, question)
        self.dispatched = chosen[1] if self.keeps_dispatched and self.session.replays else None
        return chosen


def tap_inputs(chunk: torch.nn.Module, hook: Hook) -> RemovableHandle:
    """Give the session the token ids of each forward pass of a chunk, in the order of its routers' rows."""

    def see(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if hook.session is None or torch._C._current_graph_task_id() != -1:
            return
        if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.dim() != 2:
            return
        by_row = ids.transpose(0, 1)  # hidden states are [s, b, h]
        if hook.router.config.sequence_parallel:
            size, rank = tp_position()
            by_row = by_row.chunk(size)[rank]
        # From 0.19 on, MoE layers turn packed samples [b s, 1, h] back into [s, b, h].
        sample = getattr(kwargs.get("packed_seq_params"), "tokens_per_sample", None)
        if sample is not None and len(by_row) >= 2 * sample:
            by_row = by_row.reshape(-1, sample).transpose(0, 1)
        hook.session.tokens[hook.log.forwarded] = by_row.flatten().to(torch.int32, copy=True)

    return chunk.register_forward_pre_hook(see, with_kwargs=True)


class Bystander(RouterHook):
    """The hook of a router that no trace has rows for: it routes natively, and counts its rows."""

    def __init__(self) -> None:
        self.rows = 0

    def answer(self, question: Question) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``RouterHook``."""
        if torch._C._current_graph_task_id() == -1:  # not a recomputation
            self.rows += question.scores.size(0)
        return question.native()


def count_dispatched(router: TopKRouter, hook: Hook, aux_loss: AuxLoss) -> None:
    """Make the auxiliary losses of this router count the experts that tokens are dispatched to."""
    count_natively(router)  # undo what an earlier RoutingReplay did
    if hasattr(router, "is_aux_loss_enabled"):  # from 0.14 on
        hook.keeps_dispatched = router.is_aux_loss_enabled()
    else:
        coefficient = router.config.moe_aux_loss_coeff
        is_used = not isinstance(coefficient, list) and coefficient > 0
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
