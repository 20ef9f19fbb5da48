"""The hook objects that Megatron's routers ask for experts, and the sessions in which they record or replay.

Forward and recomputation are told apart by whether autograd is running: activation checkpointing runs a layer again
from inside the backward pass. Each router counts its own micro-batches for both, which is all the bookkeeping that
pipeline and interleaved schedules need, because each model chunk sees its micro-batches in order in either direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
    """The experts that the routers really used. Of ``record()``: these can be replayed."""
    native: list[MicroRoutes] = field(default_factory=list)
    """Of an observed ``replay()``: the experts each router would have chosen by itself, given its replayed input."""
    native_rows: int = 0
    """Of ``replay()``: rows, one per token and layer of a forward pass, that had no route: missing, or padding."""
    untraced_rows: int = 0
    """Rows of multi-token-prediction layers, which no trace has: they route natively in any block."""


class _Kept:
    """Expert choices of all routers, by column, one tensor [T_local, K] per micro-batch."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._columns: dict[int, list[torch.Tensor]] = {hook.column: [] for hook in hooks}

    def add(self, hook: Hook, experts: torch.Tensor, num_experts: int) -> None:
        narrow = torch.uint8 if num_experts <= 256 else torch.int16
        self._columns[hook.column].append(experts.detach().to(narrow))

    def get(self, hook: Hook, micro: int) -> torch.Tensor:
        return self._columns[hook.column][micro]

    def stacked(self, hooks: Sequence[Hook]) -> list[MicroRoutes]:
        counts = {hook.layer: len(self._columns[hook.column]) for hook in hooks}
        if len(set(counts.values())) > 1:
            raise ReplayError(
                f"routers saw different numbers of micro-batches, by layer {counts}; expected equal numbers"
            )
        return [MicroRoutes(torch.stack(of_micro, 1)) for of_micro in zip(*self._columns.values(), strict=True)]


class Recorder:
    """Session that routes natively and keeps the choice; a recomputation inside it uses the kept choice."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._kept = _Kept(hooks)

    def forward(self, hook: Hook, scores: torch.Tensor, native: TopK) -> tuple[torch.Tensor, torch.Tensor]:
        values, experts = native()
        self._kept.add(hook, experts, scores.size(1))
        return values, experts

    def recompute(self, hook: Hook, scores: torch.Tensor, native: TopK) -> tuple[torch.Tensor, torch.Tensor]:
        del native
        experts = self._kept.get(hook, hook.recomputed).long()
        return scores.gather(1, experts), experts

    def close(self, hooks: Sequence[Hook], recording: Recording) -> None:
        recording.routes = self._kept.stacked(hooks)


class Replayer:
    """Session that hands out the given experts, micro-batch by micro-batch."""

    def __init__(self, routes: Sequence[MicroRoutes], hooks: Sequence[Hook], observe: bool) -> None:
        self._routes = routes
        self._used, self._native = (_Kept(hooks), _Kept(hooks)) if observe else (None, None)
        self._complete = [micro.present is None or bool(micro.present.all()) for micro in routes]
        self._pinned: dict[int, torch.Tensor] = {}
        self._ahead: dict[tuple[int, int, str], torch.Tensor] = {}

    def forward(self, hook: Hook, scores: torch.Tensor, native: TopK) -> tuple[torch.Tensor, torch.Tensor]:
        values, experts = self._rows(hook, hook.forwarded, "forward", scores, native)
        if self._used and self._native:
            self._used.add(hook, experts, scores.size(1))
            self._native.add(hook, native()[1], scores.size(1))
        return values, experts

    def recompute(self, hook: Hook, scores: torch.Tensor, native: TopK) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rows(hook, hook.recomputed, "recomputation", scores, native)

    def _rows(
        self, hook: Hook, micro: int, kind: str, scores: torch.Tensor, native: TopK
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if micro >= len(self._routes):
            raise ReplayError(
                f"layer {hook.layer}: {kind} of micro-batch {micro + 1}, but there are routes for {len(self._routes)}; "
                "likely the data iterator and the routes were cut differently, or another pass ran in the same block"
            )
        experts = self._experts(hook, micro, kind, scores.device).to(torch.int64)
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

    def _experts(self, hook: Hook, micro: int, kind: str, device: torch.device) -> torch.Tensor:
        """[T_local, K] of one router, narrow; on a GPU the next micro-batch's are already on their way."""
        if device.type == "cpu":
            return self._routes[micro].experts[:, hook.column]
        found = self._ahead.pop((hook.column, micro, kind), None)
        if micro + 1 < len(self._routes):
            self._ahead[hook.column, micro + 1, kind] = self._copied(hook.column, micro + 1, device)
        return self._copied(hook.column, micro, device) if found is None else found

    def _copied(self, column: int, micro: int, device: torch.device) -> torch.Tensor:
        if micro not in self._pinned:
            by_layer = self._routes[micro].experts.transpose(0, 1).contiguous()
            self._pinned[micro] = by_layer if by_layer.is_cuda else by_layer.pin_memory()
        return self._pinned[micro][column].to(device, non_blocking=True)

    def close(self, hooks: Sequence[Hook], recomputes: bool | None, recording: Recording) -> None:
        recording.native_rows = sum(
            len(hooks) * int((~micro.present).sum()) for micro in self._routes if micro.present is not None
        )
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


class Hook:
    """What Megatron finds as ``router.router_replay``."""

    def __init__(self, layer: int, column: int) -> None:
        self.layer = layer
        self.column = column
        self.session: Recorder | Replayer | None = None
        self.keeps_dispatched = False
        self.dispatched: torch.Tensor | None = None
        """int64 [T_local, K], the experts of the latest call in a session, where auxiliary losses need them."""
        self.forwarded = self.recomputed = self.checkpointed = 0
        self.owed = 0  # recomputations that would have to see a replay that has already closed

    def begin(self, session: Recorder | Replayer) -> None:
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
        else:
            chosen = self.session.forward(self, scores, native)
            self.forwarded += 1
            self.checkpointed += not torch.is_grad_enabled()
        self.dispatched = chosen[1] if self.keeps_dispatched else None
        return chosen

    def end(self) -> None:
        self.session = self.dispatched = None


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
