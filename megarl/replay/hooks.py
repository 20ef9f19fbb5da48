"""The objects that Megatron's routers ask for experts (``router.router_replay``).

A ``Hook`` finds the pass of the call (``PassLog``) and passes the question to the open session. Without a session, and
outside the block, a hook routes natively.

Megatron's auxiliary losses multiply an expert's mean score by the expert's share of the tokens, from a separate top-k.
Under replay, tokens go elsewhere, so the losses count the dispatched experts (``count_dispatched``).

Gate weights are replaced behind the router (``replace_gates``), where all normalisation and scaling is done.

A copy of a hooked model (``copy.deepcopy``, pickle) routes natively: hooks and wrapped methods of a copy are inert.
"""

from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch.utils.hooks import RemovableHandle

from megarl.replay.megatron_state import tp_position
from megarl.replay.pass_log import PassLog
from megarl.routes.trace import narrow_dtype

_Method = Callable[..., Any]
TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Question:
    """One call of a router: its scores [T_local, E], and the router's own choice."""

    def __init__(self, scores: torch.Tensor, compute: TopK, topk: int, *groups: int | None) -> None:
        self.scores, self._compute, self._topk, self._groups = scores, compute, topk, groups
        self._preferred: torch.Tensor | None = None

    def native(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (scores, experts) of the native choice, with gradients. [T_local, K] each."""
        return self._compute(self.scores, self._topk, *self._groups)

    @torch.no_grad()  # non-reentrant checkpointing requires that both passes of a layer save the same tensors
    def preferred(self) -> torch.Tensor:
        """Return experts int64 [T_local, K] of the native choice, computed once."""
        if self._preferred is None:
            self._preferred = self._compute(self.scores.detach(), self._topk, *self._groups)[1]
        return self._preferred

    def at(self, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores at the experts, experts). experts: [T_local, K]."""
        return self.scores.gather(1, experts), experts


class Hook:
    """The object in ``router.router_replay`` of one router of the decoder; None in a copied router."""

    def __init__(self, router: Any, column: int, log: PassLog, chunk: int = 0, is_first: bool = True) -> None:
        self.layer: int = router.layer_number - 1
        self.column, self.router, self.log = column, router, log
        self.topk: int = router.topk
        self.num_experts: int = router.config.num_moe_experts
        self.dtype: torch.dtype = getattr(torch, narrow_dtype(self.num_experts, signed=True).__name__)
        is_softmax = router.config.moe_router_score_function == "softmax"
        self.ranks_logits = is_softmax and not router.config.moe_router_pre_softmax
        """Whether the scores of a question are logits."""
        self.chunk, self.is_first = chunk, is_first
        """Index of its model chunk, and whether it is the first router there."""
        self.taps: list[RemovableHandle] = []
        """Of ``tap``, on the first router of a chunk."""
        self.keeps_dispatched = False
        self.dispatched: dict[int, torch.Tensor] = {}
        """By thread, int64 [T_local, K]: experts of the latest call under replay; kept for auxiliary losses only."""
        self.gates: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By thread, (experts, gates) [T_local, K] of the latest call, until the router has taken them."""

    @torch.no_grad()
    def log_probs(self, scores: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """fp32 [T_local, K]: ln r at experts int64 [T_local, K], with r the softmax over all experts, or the sigmoid
        without the expert bias. scores: [T_local, E], of a question.
        """
        wide = scores.float()
        if self.ranks_logits:
            return wide.log_softmax(1).gather(1, experts)
        bias = getattr(self.router, "expert_bias", None)
        unbiased = (wide if bias is None else wide - bias).gather(1, experts)
        return unbiased.clamp(min=torch.finfo(torch.float32).tiny).log()

    def remove_taps(self) -> None:
        """Remove the hooks of the chunk."""
        while self.taps:
            self.taps.pop().remove()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """(scores at the chosen experts [T_local, K], experts int64 [T_local, K]) of scores [T_local, E].

        Megatron, from 0.16 on, calls this in place of its own top-k.
        """
        assert default_compute_topk is not None
        question = Question(scores, default_compute_topk, topk, num_groups, group_topk)
        self.dispatched.pop(get_ident(), None)
        self.gates.pop(get_ident(), None)
        call = self.log.identify(self)
        if call is None:
            return question.native()
        choice = call.session.choose(self, call, question)
        if self.keeps_dispatched and call.session.replays:
            self.dispatched[get_ident()] = choice[1]
        if (gates := call.session.find_gates(self, call, choice[1])) is not None:
            self.gates[get_ident()] = choice[1], gates
        return choice


class Tap:
    """Reports running forward passes of a chunk to the log, and input ids to the session."""

    def __init__(self, log: PassLog | None = None, chunk: int = 0) -> None:
        self._log, self._chunk = log, chunk

    def __reduce__(self) -> tuple[Any, ...]:
        return Tap, ()  # inert

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The module is called."""
        if self._log is not None and self._log.is_watching:
            self._log.enter(module, self._chunk)

    def leave(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        """The module has returned, or raised."""
        ended = None if self._log is None else self._log.leave(module)
        if ended is not None and ended.block is not None and ended.block.session is not None:
            ids = kwargs.get("input_ids", args[0] if args else None)  # as other hooks of the module have left them
            if isinstance(ids, torch.Tensor) and not ids.is_floating_point() and ids.dim() == 2:
                ended.block.session.tokens[ended.micro] = _router_order(ids, module.config, kwargs)


def tap(chunk: Any, index: int, log: PassLog) -> list[RemovableHandle]:
    """Hook a chunk."""
    chunk_tap = Tap(log, index)
    on_enter = chunk.register_forward_pre_hook(chunk_tap.enter, with_kwargs=True)
    return [on_enter, chunk.register_forward_hook(chunk_tap.leave, with_kwargs=True, always_call=True)]


def _router_order(ids: torch.Tensor, config: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """int32, a copy of token ids [b, s] in the order of the rows of this rank's routers."""
    by_row = ids.transpose(0, 1)  # hidden states are [s, b, h]
    if config.sequence_parallel:
        size, rank = tp_position()
        by_row = by_row.chunk(size)[rank]
    # From 0.19 on, MoE layers turn packed samples [b s, 1, h] back into [s, b, h].
    sample = getattr(kwargs.get("packed_seq_params"), "tokens_per_sample", None)
    if sample is not None and len(by_row) >= 2 * sample:
        by_row = by_row.reshape(-1, sample).transpose(0, 1)
    return by_row.flatten().to(torch.int32, copy=True)


def count_dispatched(router: TopKRouter, hook: Hook) -> None:
    """Make the auxiliary losses of this router count the experts that tokens are dispatched to."""
    count_natively(router)  # undo what an earlier RoutingReplay did
    if hasattr(router, "is_aux_loss_enabled"):  # from 0.14 on
        hook.keeps_dispatched = router.is_aux_loss_enabled()
    else:
        coefficient = router.config.moe_aux_loss_coeff
        is_used = not isinstance(coefficient, list) and coefficient > 0
        hook.keeps_dispatched = is_used and router.routing_type in ("aux_loss", "seq_aux_loss")
    if hook.keeps_dispatched:
        for name, wrapper in _METHODS.items():
            if hasattr(router, name):  # a partial, which is copied with its router; a closure would stay the original's
                setattr(router, name, partial(wrapper, getattr(router, name), hook))


def count_natively(router: TopKRouter) -> None:
    """Restore Megatron's own losses and gate weights."""
    for name in (*_METHODS, "routing"):
        vars(router).pop(name, None)


class _StraightThrough(torch.autograd.Function):
    """Values of a rollout with the router's own gradient: ``own + (rollout - own).detach()``, but without rounding."""

    @staticmethod
    def forward(ctx: Any, probs: torch.Tensor, experts: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return probs.scatter(1, experts, torch.where(gates.isnan(), probs.gather(1, experts), gates.to(probs.dtype)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0], None, None


def replace_gates(method: _Method, hook: Hook | None, *arguments: Any, **options: Any) -> Any:
    """A method (logits, ...) -> (probs [T_local, E], routing map) -> the same with the gates of the rollout."""
    probs, routing_map = method(*arguments, **options)
    replayed = None if hook is None else hook.gates.pop(get_ident(), None)
    return (probs if replayed is None else _StraightThrough.apply(probs, *replayed)), routing_map


def _dispatched(hook: Hook | None) -> torch.Tensor | None:
    """The experts of this thread's latest call under replay; None on a router that is a copy."""
    return None if hook is None else hook.dispatched.get(get_ident())


def _attach_loss(
    method: _Method, hook: Hook | None, probs: Any, scores: Any, routing_map: Any, *arguments: Any, **options: Any
) -> Any:
    """A method (probs, scores, routing map, ...) -> probs with the loss attached."""
    experts = _dispatched(hook)
    if experts is None:
        return method(probs, scores, routing_map, *arguments, **options)
    counted = routing_map.any(1, keepdim=True)  # rows of padding are empty
    return method(probs, scores, torch.zeros_like(routing_map).scatter(1, experts, 1) * counted, *arguments, **options)


def _score(method: _Method, hook: Hook | None, logits: torch.Tensor) -> Any:
    """A method logits -> (scores, routing map), as in 0.13. In 0.12, it returns scores only."""
    scored, experts = method(logits), _dispatched(hook)
    if experts is None or isinstance(scored, torch.Tensor):
        return scored
    return scored[0], torch.zeros_like(scored[1]).scatter(1, experts, 1)


_METHODS: dict[str, _Method] = {f"_apply_{kind}_loss": _attach_loss for kind in ("aux", "seq_aux", "global_aux")}
_METHODS["compute_routing_scores_for_aux_loss"] = _score
"""Methods of a router that compute balancing losses, with their wrappers; a release has a part."""
