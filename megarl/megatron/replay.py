"""Routing replay on Megatron-Core's native hook: the routers of a model use the experts that they are told to.

Megatron-Core 0.16 asks ``router.router_replay.get_replay_topk(scores, topk, ...)`` for the experts of a batch.
``RoutingReplay`` puts one hook object there per router. A hook without a session routes natively; ``record()`` and
``replay(routes)`` open a session for the duration of a ``with`` block, and close it even when the block raises. There
is no module-level state, so models do not see each other.

Only the choice of experts is replayed. The gate weights are computed from the logits of the pass itself, at the
replayed experts, and gradients reach the router through them (Ma et al., arXiv 2510.11370; Zheng et al., arXiv
2512.01374).

Forward and recomputation are told apart by whether autograd is running: activation checkpointing runs a layer again
from inside the backward pass. Each router counts its own micro-batches for both, which is all the bookkeeping that
pipeline and interleaved schedules need, because each model chunk sees its micro-batches in order in either direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

from megarl.errors import ReplayError
from megarl.megatron.weights import unwrap
from megarl.megatron_fields import replay_blockers

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class MicroRoutes:
    """The experts of one micro-batch as one rank needs them: the tokens its routers see, the MoE layers it holds."""

    experts: torch.Tensor
    """uint8 or wider integers [T_local, L_local, K]; layers in the order of ``RoutingReplay.layers``."""
    present: torch.Tensor | None = None
    """bool [T_local], False where the row is missing and the router chooses natively; None = all present."""


@dataclass(slots=True)
class Recording:
    """What a block has seen, one entry per forward micro-batch; complete when the block has closed."""

    routes: list[MicroRoutes] = field(default_factory=list)
    """The experts that the routers really used. Of ``record()``: these can be replayed."""
    native: list[MicroRoutes] = field(default_factory=list)
    """Of an observed ``replay()``: the experts each router would have chosen by itself, given its replayed input."""


class _Kept:
    """Expert choices of all routers, by column, one tensor [T_local, K] per micro-batch."""

    def __init__(self, hooks: Sequence[_Hook]) -> None:
        self._columns: dict[int, list[torch.Tensor]] = {hook.column: [] for hook in hooks}

    def add(self, hook: _Hook, experts: torch.Tensor, num_experts: int) -> None:
        narrow = torch.uint8 if num_experts <= 256 else torch.int16
        self._columns[hook.column].append(experts.detach().to(narrow))

    def get(self, hook: _Hook, micro: int) -> torch.Tensor:
        return self._columns[hook.column][micro]

    def stacked(self, hooks: Sequence[_Hook]) -> list[MicroRoutes]:
        counts = {hook.layer: len(self._columns[hook.column]) for hook in hooks}
        if len(set(counts.values())) > 1:
            raise ReplayError(
                f"routers saw different numbers of micro-batches, by layer {counts}; expected equal numbers"
            )
        return [MicroRoutes(torch.stack(of_micro, 1)) for of_micro in zip(*self._columns.values(), strict=True)]


class _Recorder:
    """Session that routes natively and keeps the choice; a recomputation inside it uses the kept choice."""

    def __init__(self, hooks: Sequence[_Hook]) -> None:
        self._kept = _Kept(hooks)

    def forward(self, hook: _Hook, scores: torch.Tensor, native: TopK) -> tuple[torch.Tensor, torch.Tensor]:
        values, experts = native()
        self._kept.add(hook, experts, scores.size(1))
        return values, experts

    def recompute(self, hook: _Hook, scores: torch.Tensor, native: TopK) -> tuple[torch.Tensor, torch.Tensor]:
        del native
        experts = self._kept.get(hook, hook.recomputed).long()
        return scores.gather(1, experts), experts

    def close(self, hooks: Sequence[_Hook], recording: Recording) -> None:
        recording.routes = self._kept.stacked(hooks)


class _Replayer:
    """Session that hands out the given experts, micro-batch by micro-batch."""

    def __init__(self, routes: Sequence[MicroRoutes], hooks: Sequence[_Hook], observe: bool) -> None:
        self._routes = routes
        self._used, self._native = (_Kept(hooks), _Kept(hooks)) if observe else (None, None)
        self._complete = [micro.present is None or bool(micro.present.all()) for micro in routes]

    def forward(self, hook: _Hook, scores: torch.Tensor, native: TopK) -> tuple[torch.Tensor, torch.Tensor]:
        values, experts = self._rows(hook, hook.forwarded, "forward", scores, native)
        if self._used and self._native:
            self._used.add(hook, experts, scores.size(1))
            self._native.add(hook, native()[1], scores.size(1))
        return values, experts

    def recompute(self, hook: _Hook, scores: torch.Tensor, native: TopK) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rows(hook, hook.recomputed, "recomputation", scores, native)

    def _rows(
        self, hook: _Hook, micro: int, kind: str, scores: torch.Tensor, native: TopK
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if micro >= len(self._routes):
            raise ReplayError(
                f"layer {hook.layer}: {kind} of micro-batch {micro + 1}, but there are routes for {len(self._routes)}; "
                "likely the data iterator and the routes were cut differently, or another pass ran in the same block"
            )
        experts = self._routes[micro].experts[:, hook.column].to(scores.device, torch.int64)
        if experts.size(0) != scores.size(0):
            raise ReplayError(
                f"layer {hook.layer}, {kind} of micro-batch {micro}: the router sees {scores.size(0)} tokens, the "
                f"routes have {experts.size(0)}; likely sequence-parallel slices or alignment padding differ"
            )
        if not self._complete[micro]:
            present = self._routes[micro].present
            assert present is not None
            experts = torch.where(present.to(scores.device)[:, None], experts, native()[1])
        return scores.gather(1, experts), experts

    def close(self, hooks: Sequence[_Hook], recomputes: bool | None, recording: Recording) -> None:
        if self._used and self._native:
            recording.routes, recording.native = self._used.stacked(hooks), self._native.stacked(hooks)
        expected = len(self._routes)
        seen = any(hook.recomputed for hook in hooks)
        for hook in hooks:
            if hook.forwarded != expected:
                raise ReplayError(
                    f"layer {hook.layer}: {hook.forwarded} forward passes used the routes of {expected} micro-batches; "
                    "each must be used once. Likely this router was bypassed, or the block closed too early"
                )
            owed = hook.checkpointed if recomputes or (recomputes is None and seen) else 0
            if hook.recomputed != owed:
                raise ReplayError(
                    f"layer {hook.layer}: {hook.recomputed} recomputations, expected {owed} (forward passes without "
                    "gradient). Likely the backward pass ran outside the block"
                )
            hook.owed = hook.checkpointed if recomputes is None and not seen else 0


class _Hook:
    """What Megatron finds as ``router.router_replay``."""

    def __init__(self, layer: int, column: int) -> None:
        self.layer = layer
        self.column = column
        self.session: _Recorder | _Replayer | None = None
        self.forwarded = self.recomputed = self.checkpointed = 0
        self.owed = 0  # recomputations that would have to see a replay that has already closed

    def begin(self, session: _Recorder | _Replayer) -> None:
        self.session = session
        self.forwarded = self.recomputed = self.checkpointed = self.owed = 0

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores at the chosen experts [T_local, K], experts int64 [T_local, K]): the contract of megatron 0.16."""
        assert default_compute_topk is not None
        compute = default_compute_topk

        def native() -> tuple[torch.Tensor, torch.Tensor]:
            return compute(scores, topk, num_groups, group_topk)

        recomputing = torch._C._current_graph_task_id() != -1
        if self.session is None:
            if recomputing and self.owed:
                raise ReplayError(
                    f"layer {self.layer}: recomputation of a forward pass whose replay has already closed; "
                    "run the backward pass inside the same `with replay.replay(routes)` block"
                )
            self.owed = 0
            return native()
        if recomputing:
            chosen = self.session.recompute(self, scores, native)
            self.recomputed += 1
            return chosen
        chosen = self.session.forward(self, scores, native)
        self.forwarded += 1
        self.checkpointed += not torch.is_grad_enabled()
        return chosen


class RoutingReplay:
    """Record and replay the expert choice of all routers of a model's chunks on this rank.

    >>> replay = RoutingReplay(model_chunks)
    >>> with replay.record() as recording: ...     # old-log-prob pass (R2)
    >>> with replay.replay(recording.routes): ...  # forward and backward, each micro-batch exactly once

    A rank without MoE layers, as a pipeline stage may be, has empty routes. Raises ReplayError if Megatron is too
    old to ask the hook, or if a setting would bypass it (``megarl doctor`` lists them).
    """

    def __init__(self, model_chunks: Sequence[torch.nn.Module] | torch.nn.Module) -> None:
        chunks = [model_chunks] if isinstance(model_chunks, torch.nn.Module) else list(model_chunks)
        routers = [router for chunk in chunks for router in _routers(unwrap(chunk))]
        for router in routers:
            _refuse_bypass(router)
        self._routers = routers
        self._hooks = [_Hook(router.layer_number - 1, column) for column, router in enumerate(routers)]
        for router, hook in zip(routers, self._hooks, strict=True):
            if isinstance(router.router_replay, _Hook) and router.router_replay.session is not None:
                raise ReplayError(f"layer {hook.layer}: another RoutingReplay is recording or replaying on this model")
            router.router_replay = hook

    @property
    def layers(self) -> tuple[int, ...]:
        """0-based global layer index of each router of this rank, in the order of the columns of ``MicroRoutes``."""
        return tuple(hook.layer for hook in self._hooks)

    def detach(self) -> None:
        """Give the routers back to Megatron: no hook remains."""
        for router, hook in zip(self._routers, self._hooks, strict=True):
            if router.router_replay is hook:
                router.router_replay = None

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Route natively and keep every choice; ``recording.routes`` holds one MicroRoutes per forward micro-batch."""
        recording = Recording()
        session = _Recorder(self._hooks)
        with self._open(session):
            yield recording
            session.close(self._hooks, recording)

    @contextmanager
    def replay(
        self,
        routes: Recording | Sequence[MicroRoutes | torch.Tensor],
        recomputes: bool | None = None,
        observe: bool = False,
    ) -> Iterator[Recording]:
        """Use ``routes``, one entry per micro-batch in the order of the forward passes; a tensor has all rows present.

        On closing, every router must have used every micro-batch once, and once more for each pass that activation
        checkpointing recomputes. ``recomputes`` says whether the backward pass runs in this block: True demands the
        recomputations, False (a forward-only pass) forbids them, None accepts either all or none, and a recomputation
        after the block then raises. ReplayError names layer, micro-batch and pass. With ``observe`` the Recording holds
        the experts used, and those that the routers would have chosen.
        """
        entries = routes.routes if isinstance(routes, Recording) else routes
        given = [MicroRoutes(entry) if isinstance(entry, torch.Tensor) else entry for entry in entries]
        for micro, entry in enumerate(given):
            if entry.experts.dim() != 3 or entry.experts.size(1) != len(self._hooks):
                raise ReplayError(
                    f"micro-batch {micro}: routes of shape {tuple(entry.experts.shape)}, expected "
                    f"[tokens, {len(self._hooks)} MoE layers of this rank, top-k]"
                )
        session = _Replayer(given, self._hooks, observe)
        recording = Recording()
        with self._open(session):
            yield recording
            session.close(self._hooks, recomputes, recording)

    @contextmanager
    def _open(self, session: _Recorder | _Replayer) -> Iterator[None]:
        for router, hook in zip(self._routers, self._hooks, strict=True):
            if router.router_replay is not hook:
                raise ReplayError(f"layer {hook.layer}: the router's hook was replaced; use the newest RoutingReplay")
            if hook.session is not None:
                raise ReplayError(f"layer {hook.layer}: already recording or replaying; blocks do not nest")
        for hook in self._hooks:
            hook.begin(session)
        try:
            yield
        finally:
            for hook in self._hooks:
                hook.session = None


def _routers(model: Any) -> Iterator[TopKRouter]:
    """Routers of the decoder layers in layer order; those of multi-token-prediction layers are left native."""
    decoder = getattr(model, "decoder", None)
    if decoder is None:
        raise ReplayError(f"{type(model).__name__} has no decoder; expected a Megatron GPTModel")
    for layer in decoder.layers:
        yield from (module for module in layer.modules() if isinstance(module, TopKRouter))


def _refuse_bypass(router: TopKRouter) -> None:
    if not hasattr(router, "router_replay"):
        raise ReplayError("this Megatron-Core has no replay hook (added in 0.16.0); install 0.16.1 or patch it")
    for blocker in replay_blockers(vars(router.config)):
        found = getattr(router.config, blocker.setting, None)
        raise ReplayError(f"{blocker.setting} = {found!r}: replay cannot hold, because {blocker.reason}")
