"""The hook objects that Megatron's routers ask for experts, and the sessions in which they record or replay.

Three kinds of calls reach a hook. A forward pass in which autograd records. A forward pass without a graph: either
nobody will ask for gradients, or activation checkpointing runs the layer a first time and will run it again. And that
second run, from inside the backward pass. What tells the first two of these apart is whether the decoder as a whole was
entered with gradients on (``Entry``); what tells the third is whether autograd is running. So each hook knows at any
time how many recomputations are still to come, in the session or outside of one, and none can be mistaken for another.
Each router counts its own micro-batches, which is all the bookkeeping that pipeline and interleaved schedules need,
because each model chunk sees its micro-batches in order in either direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from megarl.errors import ReplayError

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
    """Of ``record()``: the experts that the routers have chosen. They can be replayed."""
    native: list[MicroRoutes] = field(default_factory=list)
    """Of ``replay()``, on demand: the experts each router would have chosen by itself, given its replayed input."""
    shared: list[torch.Tensor] = field(default_factory=list)
    """uint8 [T_local, L_local]: how many of the experts in use are in the routes that the block was compared with."""
    native_shared: list[torch.Tensor] = field(default_factory=list)
    """Of ``replay()``: the same of the experts that each router would have chosen by itself."""
    native_rows: int = 0
    """Of ``replay()``: rows, one per token and layer of a forward pass, that had no route: missing, or padding."""
    untraced_rows: int = 0
    """Rows of multi-token-prediction layers, which no trace has: they route natively in any block."""


class _Columns:
    """One tensor per router and micro-batch."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._of: dict[int, list[torch.Tensor]] = {hook.column: [] for hook in hooks}

    def add(self, hook: Hook, found: torch.Tensor) -> None:
        self._of[hook.column].append(found.detach())

    def get(self, hook: Hook, micro: int) -> torch.Tensor:
        return self._of[hook.column][micro]

    def stacked(self, hooks: Sequence[Hook]) -> list[torch.Tensor]:
        """Per micro-batch, the routers side by side in dimension 1; ReplayError if they saw different numbers."""
        counts = {hook.layer: len(self._of[hook.column]) for hook in hooks}
        if len(set(counts.values())) > 1:
            raise ReplayError(
                f"routers saw different numbers of micro-batches, by layer {counts}; expected equal numbers"
            )
        return [torch.stack(of_micro, 1) for of_micro in zip(*self._of.values(), strict=True)]


def _narrow(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    return experts.to(torch.uint8 if num_experts <= 256 else torch.int16)


def _shared(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """uint8 [T]: experts that two rows [T, K], each without duplicates, have in common."""
    return (left[:, :, None] == right[:, None, :]).any(2).sum(1).to(torch.uint8)


class _Rows:
    """Routes of micro-batches, handed out router by router."""

    def __init__(self, routes: Sequence[MicroRoutes]) -> None:
        self.routes = routes
        self._ahead: dict[tuple[int, int, str], torch.Tensor] = {}

    def of(self, hook: Hook, micro: int, kind: str, device: torch.device) -> torch.Tensor:
        """[T_local, K] of one router, narrow; on a GPU the copy of the next micro-batch's is started too."""
        experts = self.routes[micro].experts
        if device.type == "cpu" or experts.is_cuda:
            return experts[:, hook.column]
        found = self._ahead.pop((hook.column, micro, kind), None)
        if micro + 1 < len(self.routes):
            self._ahead[hook.column, micro + 1, kind] = self._copied(hook.column, micro + 1, device)
        return self._copied(hook.column, micro, device) if found is None else found

    def _copied(self, column: int, micro: int, device: torch.device) -> torch.Tensor:
        # The pinned page goes back to torch's pool when the copy is done; nothing is held twice.
        return self.routes[micro].experts[:, column].contiguous().pin_memory().to(device, non_blocking=True)


class Recorder:
    """Session that routes natively; keeps the choice, or only what it shares with other routes."""

    def __init__(self, hooks: Sequence[Hook], keep: bool, compared: Sequence[MicroRoutes] | None) -> None:
        self._kept = _Columns(hooks) if keep else None
        self._shared = _Columns(hooks)
        self._compared = None if compared is None else _Rows(compared)

    def forward(self, hook: Hook, scores: torch.Tensor, native: TopK) -> tuple[torch.Tensor, torch.Tensor]:
        values, experts = native()
        if self._kept is not None:
            self._kept.add(hook, _narrow(experts, scores.size(1)))
        if self._compared is not None:
            _check_room(self._compared, hook, hook.forwarded, "forward", scores)
            with_rows = self._compared.of(hook, hook.forwarded, "forward", scores.device)
            self._shared.add(hook, _shared(experts, with_rows.long()))
        return values, experts

    def recompute(self, hook: Hook, scores: torch.Tensor, native: TopK) -> tuple[torch.Tensor, torch.Tensor]:
        if self._kept is None:
            return native()
        experts = self._kept.get(hook, hook.recomputed).long()
        return scores.gather(1, experts), experts

    def close(self, hooks: Sequence[Hook], recording: Recording) -> None:
        _check_recomputed(hooks)
        if self._kept is not None:
            recording.routes = [MicroRoutes(experts) for experts in self._kept.stacked(hooks)]
        recording.shared = self._shared.stacked(hooks)


class Replayer:
    """Session that hands out the given experts, micro-batch by micro-batch."""

    def __init__(
        self,
        routes: Sequence[MicroRoutes],
        hooks: Sequence[Hook],
        observe: bool,
        compared: Sequence[MicroRoutes] | None,
    ) -> None:
        self._rows = _Rows(routes)
        self._native = _Columns(hooks) if observe else None
        self._shared, self._native_shared = _Columns(hooks), _Columns(hooks)
        # Comparing with the very routes that are replayed needs no second copy of them.
        self._compared = None if compared is None else self._rows if compared is routes else _Rows(compared)
        self._complete = [micro.present is None or bool(micro.present.all()) for micro in routes]

    def forward(self, hook: Hook, scores: torch.Tensor, native: TopK) -> tuple[torch.Tensor, torch.Tensor]:
        micro = hook.forwarded
        values, experts, given = self._chosen(hook, micro, "forward", scores, native)
        if self._native is not None or self._compared is not None:
            preferred = native()[1]
            if self._native is not None:
                self._native.add(hook, _narrow(preferred, scores.size(1)))
            if self._compared is not None:
                with_rows = given if self._compared is self._rows else self._other(hook, micro, scores)
                self._shared.add(hook, _shared(experts, with_rows))
                self._native_shared.add(hook, _shared(preferred, with_rows))
        return values, experts

    def recompute(self, hook: Hook, scores: torch.Tensor, native: TopK) -> tuple[torch.Tensor, torch.Tensor]:
        return self._chosen(hook, hook.recomputed, "recomputation", scores, native)[:2]

    def _other(self, hook: Hook, micro: int, scores: torch.Tensor) -> torch.Tensor:
        assert self._compared is not None
        _check_room(self._compared, hook, micro, "comparison", scores)
        return self._compared.of(hook, micro, "comparison", scores.device).long()

    def _chosen(
        self, hook: Hook, micro: int, kind: str, scores: torch.Tensor, native: TopK
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scores at the experts, the experts, and the given rows before missing ones were filled in."""
        _check_room(self._rows, hook, micro, kind, scores)
        given = self._rows.of(hook, micro, kind, scores.device).long()
        experts = given
        if not self._complete[micro]:
            present = self._rows.routes[micro].present
            assert present is not None
            experts = torch.where(present.to(scores.device)[:, None], given, native()[1])
        return scores.gather(1, experts), experts, given

    def close(self, hooks: Sequence[Hook], recording: Recording) -> None:
        expected = len(self._rows.routes)
        for hook in hooks:
            if hook.forwarded != expected:
                raise ReplayError(
                    f"layer {hook.layer}: {hook.forwarded} forward passes used the routes of {expected} micro-batches; "
                    "each must be used once. Likely this router was bypassed, or the block closed too early"
                )
        _check_recomputed(hooks)
        recording.native_rows = sum(
            len(hooks) * int((~micro.present).sum()) for micro in self._rows.routes if micro.present is not None
        )
        if self._native is not None:
            recording.native = [MicroRoutes(experts) for experts in self._native.stacked(hooks)]
        recording.shared, recording.native_shared = self._shared.stacked(hooks), self._native_shared.stacked(hooks)


def _check_room(rows: _Rows, hook: Hook, micro: int, kind: str, scores: torch.Tensor) -> None:
    if micro >= len(rows.routes):
        raise ReplayError(
            f"layer {hook.layer}: {kind} of micro-batch {micro + 1}, but there are routes for {len(rows.routes)}; "
            "likely the data iterator and the routes were cut differently, or another pass ran in the same block"
        )
    found = rows.routes[micro].experts.size(0)
    if found != scores.size(0):
        raise ReplayError(
            f"layer {hook.layer}, {kind} of micro-batch {micro}: the router sees {scores.size(0)} tokens, the "
            f"routes have {found}; likely sequence-parallel slices or alignment padding differ"
        )


def _check_recomputed(hooks: Sequence[Hook]) -> None:
    for hook in hooks:
        if hook.recomputed != hook.checkpointed:
            raise ReplayError(
                f"layer {hook.layer}: {hook.recomputed} recomputations, expected {hook.checkpointed}, one for each "
                "forward pass under activation checkpointing. Likely the backward pass runs outside the block, where "
                "routers would choose anew: run it inside, or run a pass without backward under torch.no_grad()"
            )


class Entry:
    """Notes, whenever a chunk's decoder is entered, whether gradients are on."""

    def __init__(self, decoder: torch.nn.Module) -> None:
        self.with_gradients = False
        self._handle = decoder.register_forward_pre_hook(self._note)

    def _note(self, *_: Any) -> None:
        self.with_gradients = torch.is_grad_enabled()

    def remove(self) -> None:
        self._handle.remove()


class Hook:
    """What Megatron finds as ``router.router_replay``."""

    def __init__(self, layer: int, column: int, entry: Entry) -> None:
        self.layer = layer
        self.column = column
        self.entry = entry
        self.session: Recorder | Replayer | None = None
        self.keeps_dispatched = False
        self.dispatched: torch.Tensor | None = None
        """int64 [T_local, K], the experts of the latest call under replay, where auxiliary losses need them."""
        self.forwarded = self.checkpointed = self.recomputed = 0
        self.awaited = 0  # recomputations to come of forward passes outside of any session
        self.broken = False  # the latest session has ended without some of its recomputations

    def begin(self, session: Recorder | Replayer) -> None:
        self.session = session
        self.broken = False
        self.forwarded = self.checkpointed = self.recomputed = 0

    def end(self) -> None:
        self.session = self.dispatched = None
        self.broken = self.recomputed != self.checkpointed

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

        @cache
        def native() -> tuple[torch.Tensor, torch.Tensor]:
            """Once per call: a session may fill missing rows with it and compare with it too."""
            return compute(scores, topk, num_groups, group_topk)

        recomputing = torch._C._current_graph_task_id() != -1
        checkpointing = not recomputing and not torch.is_grad_enabled() and self.entry.with_gradients
        if self.session is None:
            return self._outside(recomputing, checkpointing, native)
        if recomputing:
            if self.recomputed >= self.checkpointed:
                raise self._foreign("there is none to come in this block")
            chosen = self.session.recompute(self, scores, native)
            self.recomputed += 1
        else:
            chosen = self.session.forward(self, scores, native)
            self.forwarded += 1
            self.checkpointed += checkpointing
        self.dispatched = chosen[1] if self.keeps_dispatched and isinstance(self.session, Replayer) else None
        return chosen

    def _outside(self, recomputing: bool, checkpointing: bool, native: TopK) -> tuple[torch.Tensor, torch.Tensor]:
        if recomputing:
            if self.broken or not self.awaited:
                raise self._foreign("the block of its forward pass has closed")
            self.awaited -= 1
        if checkpointing:
            self.awaited += 1
            self.broken = False
        return native()

    def _foreign(self, why: str) -> ReplayError:
        return ReplayError(
            f"layer {self.layer}: recomputation of an unknown forward pass: {why}; run the backward pass inside the "
            "same block as its forward pass"
        )


class Bystander:
    """Hook of a router that no trace knows: it routes natively, and its rows are counted."""

    def __init__(self) -> None:
        self.rows = 0

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The contract of megatron 0.16."""
        assert default_compute_topk is not None
        if torch._C._current_graph_task_id() == -1:
            self.rows += scores.size(0)
        return default_compute_topk(scores, topk, num_groups, group_topk)


def untraced_rows(bystanders: Iterable[Bystander]) -> int:
    """Rows that routers without routes have chosen so far."""
    return sum(one.rows for one in bystanders)
