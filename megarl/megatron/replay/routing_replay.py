"""The object that a training loop holds: it puts one hook per router, and opens blocks that record or replay.

Megatron-Core 0.16, or an older release with the patch of ``patches/``, asks ``router.router_replay`` for the experts of
a batch by ``get_replay_topk(scores, topk, ...)``. ``RoutingReplay`` puts one hook object there per router. A hook
without a session routes natively; ``record()`` and ``replay(routes)`` open a session for the duration of a ``with``
block, and close it even when the block raises. There is no module-level state, so models do not see each other.

Only the choice of experts is replayed. The gate weights are computed from the logits of the pass itself, at the
replayed experts, and gradients reach the router through them (Ma et al., arXiv 2510.11370; Zheng et al., arXiv
2512.01374).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import get_args

import torch
from megatron.core.transformer.moe.router import TopKRouter

from megarl.errors import ReplayError
from megarl.megatron.model import unwrap
from megarl.megatron.replay.balancing import AuxLoss, count_dispatched, count_natively
from megarl.megatron.replay.checks import (
    check_chunks,
    check_routers,
    check_routes,
    find_routers,
    find_untraced_routers,
)
from megarl.megatron.replay.hooks import Bystander, Hook, InputTap, count_rows
from megarl.megatron.replay.pass_log import Block
from megarl.megatron.replay.records import MicroRoutes, Recording
from megarl.megatron.replay.sessions import Recorder, Replayer

MIN_AGREEMENT = 0.5
"""Of replayed experts with the routers' own choice, beyond chance; engines that run one model agree in about 0.9."""


Routes = Recording | Sequence[MicroRoutes | torch.Tensor]
"""One entry per micro-batch; a tensor has all rows present."""


class RoutingReplay:
    """Record and replay the expert choice of all routers of a model's chunks on this rank.

    >>> replay = RoutingReplay(model_chunks)
    >>> with replay.record() as recording: ...     # old-log-prob pass (R2)
    >>> with replay.replay(recording.routes): ...  # forward and backward, each micro-batch exactly once

    A rank without MoE layers, as a pipeline stage may be, has empty routes. Raises ReplayError if Megatron is too
    old to ask the hook, if a setting would bypass it (``megarl doctor`` lists them), if a MoE layer has a router that
    is no TopKRouter, or if these are not all chunks of one model on this rank.

    Routers of multi-token-prediction layers share layer numbers with the decoder's and have no routes; they route
    natively, and ``Recording.untraced_rows`` counts their rows.

    ``aux_loss`` says what load-balancing losses do under replay. Megatron would count the experts that the router
    would have chosen; "dispatch" counts those that the tokens really go to, "off" leaves the losses out. The z-loss
    reads logits alone and stays as it is. Expert-bias updates count what was dispatched, by Megatron's own doing.

    ``min_agreement`` in [0, 1]: how far the replayed experts must agree with what the routers would have chosen, beyond
    chance (``agreement.py``); rows of another batch do not. 0 switches the check off.
    """

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module] | torch.nn.Module,
        aux_loss: AuxLoss = "dispatch",
        min_agreement: float = MIN_AGREEMENT,
    ) -> None:
        if aux_loss not in get_args(AuxLoss):
            raise ReplayError(f"aux_loss = {aux_loss!r}, expected one of {', '.join(get_args(AuxLoss))}")
        self._min_agreement = _checked_agreement(min_agreement)
        self._hooks: list[Hook] = []
        self._bystanders: list[tuple[TopKRouter, Bystander]] = []
        chunks = [unwrap(chunk) for chunk in _as_list(model_chunks)]
        routers = [find_routers(chunk) for chunk in chunks]
        check_chunks(chunks)
        check_routers([router for of_chunk in routers for router in of_chunk])
        for chunk, of_chunk in zip(chunks, routers, strict=True):
            hooks = [self._attach(router, aux_loss) for router in of_chunk]
            if hooks:
                hooks[0].tap = InputTap(chunk, hooks[0])
            for router in find_untraced_routers(chunk):
                router.router_replay = Bystander()
                self._bystanders.append((router, router.router_replay))

    def _attach(self, router: TopKRouter, aux_loss: AuxLoss) -> Hook:
        older = router.router_replay if isinstance(router.router_replay, Hook) else None
        if older is not None and older.tap is not None:
            older.tap.remove()
        hook = Hook(router, len(self._hooks), None if older is None else older.log)
        router.router_replay = hook
        count_dispatched(router, hook, aux_loss)
        self._hooks.append(hook)
        return hook

    @property
    def layers(self) -> tuple[int, ...]:
        """0-based global layer index of each router of this rank, in the order of the columns of ``MicroRoutes``."""
        return tuple(hook.layer for hook in self._hooks)

    def detach(self) -> None:
        """Give the routers back to Megatron: no hook remains of this object; those of a newer one stay.

        Call it when no graph of a block is left: without hooks, a late recomputation routes natively.
        """
        for hook in self._hooks:
            if hook.session is not None:
                raise ReplayError(f"layer {hook.layer}: recording or replaying; detach after the block")
        for hook in self._hooks:
            if hook.tap is not None:
                hook.tap.remove()
            if hook.router.router_replay is hook:
                hook.router.router_replay = None
                count_natively(hook.router)
        for router, bystander in self._bystanders:
            if router.router_replay is bystander:
                router.router_replay = None

    @contextmanager
    def record(self, keep: bool = True, compared: Routes | None = None) -> Iterator[Recording]:
        """Route natively and keep every choice; ``recording.routes`` holds one MicroRoutes per forward micro-batch.

        With ``compared``, routes of the same micro-batches, ``recording.shared`` says how many experts they have in
        common with the choice; without ``keep`` that is all that is kept.
        """
        recording = Recording()
        session = Recorder(self._hooks, keep, None if compared is None else self._checked(compared, contents=False))
        with self._open(session, recording):
            yield recording
            session.close(self._hooks, recording)

    @contextmanager
    def replay(
        self,
        routes: Routes,
        observe: bool = False,
        compared: Routes | None = None,
        min_agreement: float | None = None,
    ) -> Iterator[Recording]:
        """Use ``routes``, one entry per micro-batch in the order of the forward passes.

        ReplayError on opening if routes cannot be of this model; on closing if a router did not use every micro-batch
        once, or if rows are of other tokens than the model got (``MicroRoutes.token_ids``) or agree too little with
        the routers (``min_agreement``, default as of this object). A recomputation uses the experts of its own first
        pass, in whatever order backward passes run, or raises: so a backward pass under activation checkpointing
        belongs in the block of its forward pass.

        With ``observe`` the Recording holds the experts that the routers would have chosen; with ``compared`` how many
        experts those in use, and those, have in common with other routes of the same micro-batches.
        """
        checked = self._checked(routes, contents=not isinstance(routes, Recording))
        others = (
            checked if compared is routes else None if compared is None else self._checked(compared, contents=False)
        )
        limit = self._min_agreement if min_agreement is None else _checked_agreement(min_agreement)
        session = Replayer(checked, self._hooks, observe, others, limit)
        recording = Recording()
        with self._open(session, recording):
            yield recording
            session.close(self._hooks, recording)

    def _checked(self, routes: Routes, contents: bool) -> list[MicroRoutes]:
        entries = routes.routes if isinstance(routes, Recording) else routes
        if isinstance(entries, (MicroRoutes, torch.Tensor)):
            raise ReplayError(f"routes are one {type(entries).__name__}, expected a list with one per micro-batch")
        return check_routes(entries, self._hooks, contents)

    @contextmanager
    def _open(self, session: Recorder | Replayer, recording: Recording) -> Iterator[None]:
        for hook in self._hooks:
            if hook.router.router_replay is not hook:
                raise ReplayError(f"layer {hook.layer}: the router's hook was replaced; use the newest RoutingReplay")
            if hook.session is not None:
                raise ReplayError(f"layer {hook.layer}: already recording or replaying; blocks do not nest")
        block = Block()
        for hook in self._hooks:
            hook.begin(session, block)
        bystanders = [bystander for _, bystander in self._bystanders]
        before = count_rows(bystanders)
        try:
            yield
            block.check_thread()
        finally:
            recording.untraced_rows = count_rows(bystanders) - before
            for hook in self._hooks:
                hook.end()


def _as_list(chunks: Sequence[torch.nn.Module] | torch.nn.Module) -> list[torch.nn.Module]:
    return [chunks] if isinstance(chunks, torch.nn.Module) else list(chunks)


def _checked_agreement(value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise ReplayError(f"min_agreement = {value!r}, expected a number from 0 (no check) to 1")
    return value
