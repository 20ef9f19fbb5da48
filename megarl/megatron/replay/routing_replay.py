"""Routing replay on Megatron-Core's native hook: the routers of a model use the experts that they are told to.

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
from typing import Any, get_args

import torch
from megatron.core.transformer.moe.router import TopKRouter

from megarl.errors import ReplayError
from megarl.megatron.replay.balancing import AuxLoss, count_dispatched, count_natively
from megarl.megatron.replay.hooks import (
    Bystander,
    Entry,
    Hook,
    MicroRoutes,
    Recorder,
    Recording,
    Replayer,
    untraced_rows,
)
from megarl.megatron.versions import RELEASE
from megarl.megatron.weights import unwrap
from megarl.megatron_fields import replay_blockers

MOST_EXPERTS = 1 << 15
"""Expert numbers travel as int16, which torch indexes everywhere."""


class RoutingReplay:
    """Record and replay the expert choice of all routers of a model's chunks on this rank.

    >>> replay = RoutingReplay(model_chunks)
    >>> with replay.record() as recording: ...     # old-log-prob pass (R2)
    >>> with replay.replay(recording.routes): ...  # forward and backward, each micro-batch exactly once

    A rank without MoE layers, as a pipeline stage may be, has empty routes. Raises ReplayError if Megatron is too
    old to ask the hook, or if a setting would bypass it (``megarl doctor`` lists them).

    Routers of multi-token-prediction layers share layer numbers with the decoder's and have no routes; they route
    natively, and ``Recording.untraced_rows`` counts their rows.

    ``aux_loss`` says what load-balancing losses do under replay. Megatron would count the experts that the router
    would have chosen; "dispatch" counts those that the tokens really go to, "off" leaves the losses out. The z-loss
    reads logits alone and stays as it is. Expert-bias updates count what was dispatched, by Megatron's own doing.
    """

    def __init__(
        self, model_chunks: Sequence[torch.nn.Module] | torch.nn.Module, aux_loss: AuxLoss = "dispatch"
    ) -> None:
        if aux_loss not in get_args(AuxLoss):
            raise ReplayError(f"aux_loss = {aux_loss!r}, expected one of {', '.join(get_args(AuxLoss))}")
        self._hooks: list[Hook] = []
        self._routers: list[TopKRouter] = []
        self._bystanders: list[tuple[TopKRouter, Bystander]] = []
        for chunk in map(unwrap, _as_list(model_chunks)):
            routers = list(_routers(chunk))
            for router in routers:
                _refuse_bypass(router)
                _refuse_while_in_use(router)
            entry = Entry(chunk.decoder) if routers else None
            for router in routers:
                assert entry is not None
                hook = Hook(router.layer_number - 1, len(self._hooks), entry)
                if isinstance(router.router_replay, Hook):
                    router.router_replay.entry.remove()
                router.router_replay = hook
                count_dispatched(router, hook, aux_loss)
                self._hooks.append(hook)
                self._routers.append(router)
            for router in _untraced_routers(chunk):
                router.router_replay = Bystander()
                self._bystanders.append((router, router.router_replay))

    @property
    def layers(self) -> tuple[int, ...]:
        """0-based global layer index of each router of this rank, in the order of the columns of ``MicroRoutes``."""
        return tuple(hook.layer for hook in self._hooks)

    def detach(self) -> None:
        """Give the routers back to Megatron: no hook remains of this object; those of a newer one stay."""
        for router, hook in zip(self._routers, self._hooks, strict=True):
            hook.entry.remove()
            if router.router_replay is hook:
                router.router_replay = None
                count_natively(router)
        for router, bystander in self._bystanders:
            if router.router_replay is bystander:
                router.router_replay = None

    @contextmanager
    def record(self, keep: bool = True, compared: Sequence[MicroRoutes] | None = None) -> Iterator[Recording]:
        """Route natively and keep every choice; ``recording.routes`` holds one MicroRoutes per forward micro-batch.

        With ``compared``, routes of the same micro-batches, ``recording.shared`` says how many experts they have in
        common with the choice; without ``keep`` that is all that is kept.
        """
        recording = Recording()
        session = Recorder(self._hooks, keep, compared)
        with self._open(session, recording):
            yield recording
            session.close(self._hooks, recording)

    @contextmanager
    def replay(
        self,
        routes: Recording | Sequence[MicroRoutes | torch.Tensor],
        observe: bool = False,
        compared: Sequence[MicroRoutes] | None = None,
    ) -> Iterator[Recording]:
        """Use ``routes``, one entry per micro-batch in the order of the forward passes; a tensor has all rows present.

        On closing, every router must have used every micro-batch once, and once more for each pass that activation
        checkpointing repeats; ReplayError names layer, micro-batch and pass. So a backward pass belongs into the block
        of its forward pass, and a pass without one under ``torch.no_grad()``. With ``observe`` the Recording holds the
        experts that the routers would have chosen; with ``compared`` how many experts those in use, and those, have in
        common with other routes of the same micro-batches.
        """
        entries = routes.routes if isinstance(routes, Recording) else routes
        given = [MicroRoutes(entry) if isinstance(entry, torch.Tensor) else entry for entry in entries]
        for micro, entry in enumerate(given):
            if entry.experts.dim() != 3 or entry.experts.size(1) != len(self._hooks):
                raise ReplayError(
                    f"micro-batch {micro}: routes of shape {tuple(entry.experts.shape)}, expected "
                    f"[tokens, {len(self._hooks)} MoE layers of this rank, top-k]"
                )
        session = Replayer(given, self._hooks, observe, given if compared is entries else compared)
        recording = Recording()
        with self._open(session, recording):
            yield recording
            session.close(self._hooks, recording)

    @contextmanager
    def _open(self, session: Recorder | Replayer, recording: Recording) -> Iterator[None]:
        for router, hook in zip(self._routers, self._hooks, strict=True):
            if router.router_replay is not hook:
                raise ReplayError(f"layer {hook.layer}: the router's hook was replaced; use the newest RoutingReplay")
            if hook.session is not None:
                raise ReplayError(f"layer {hook.layer}: already recording or replaying; blocks do not nest")
        for hook in self._hooks:
            hook.begin(session)
        bystanders = [bystander for _, bystander in self._bystanders]
        before = untraced_rows(bystanders)
        try:
            yield
        finally:
            recording.untraced_rows = untraced_rows(bystanders) - before
            for hook in self._hooks:
                hook.end()


def _as_list(chunks: Sequence[torch.nn.Module] | torch.nn.Module) -> list[torch.nn.Module]:
    return [chunks] if isinstance(chunks, torch.nn.Module) else list(chunks)


def _routers(model: Any) -> Iterator[TopKRouter]:
    """Routers of the decoder layers in layer order."""
    decoder = getattr(model, "decoder", None)
    if decoder is None:
        raise ReplayError(f"{type(model).__name__} has no decoder; expected a Megatron GPTModel")
    for layer in decoder.layers:
        yield from (module for module in layer.modules() if isinstance(module, TopKRouter))


def _untraced_routers(model: Any) -> Iterator[TopKRouter]:
    """Routers outside the decoder, which are those of multi-token-prediction layers."""
    traced = set(_routers(model))
    yield from (m for m in model.modules() if isinstance(m, TopKRouter) and m not in traced)


def _refuse_while_in_use(router: TopKRouter) -> None:
    hook = router.router_replay
    if isinstance(hook, Hook) and hook.session is not None:
        raise ReplayError(f"layer {hook.layer}: another RoutingReplay is recording or replaying on this model")


def _refuse_bypass(router: TopKRouter) -> None:
    if not hasattr(router, "router_replay"):
        raise ReplayError(
            f"this Megatron-Core has no replay hook: found {RELEASE} without the patch, expected 0.16.0 or later; run "
            "`python tools/patch.py apply`, or install megatron-core 0.16.1"
        )
    if (router.config.num_moe_experts or 0) > MOST_EXPERTS:
        raise ReplayError(f"{router.config.num_moe_experts} experts, expected at most {MOST_EXPERTS}: rows are 16 bits")
    for blocker in replay_blockers(vars(router.config)):
        found = getattr(router.config, blocker.setting, None)
        raise ReplayError(f"{blocker.setting} = {found!r}: replay cannot hold, because {blocker.reason}")
