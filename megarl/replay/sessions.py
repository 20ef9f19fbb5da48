"""Answers the routers while a block is open: ``Recorder`` keeps the routers' choice, ``Replayer`` gives routes.

A router call does not synchronise host and device. The routes of a micro-batch go to the device in one copy, stored
layer by layer, and stay there until the last recomputation. Counts are read when the block closes. All state is kept by
micro-batch, because passes may overtake each other.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch

from megarl.core.devices import DeviceChecks, to_device
from megarl.errors import ReplayError
from megarl.replay.agreement import check_agreement, check_tokens, sample_rows
from megarl.replay.hooks import Hook, Question
from megarl.replay.pass_log import PassBlock, RouterCall
from megarl.replay.records import MicroRoutes, Recording

Routes = Sequence[MicroRoutes]
Columns = defaultdict[Hook, dict[int, torch.Tensor]]
"""For each router, one tensor per micro-batch."""


def _stack(columns: Columns, hooks: Sequence[Hook], block: PassBlock) -> list[torch.Tensor]:
    """Return [T_local, L_local, ...] per micro-batch. ReplayError if routers saw different micro-batches."""
    if not columns:
        return []
    micros_by_layer = {hook.layer: block.micros_of(hook.column) for hook in hooks}
    if len({frozenset(micros) for micros in micros_by_layer.values()}) > 1:
        counts = {layer: len(micros) for layer, micros in micros_by_layer.items()}
        raise ReplayError(
            f"routers saw different numbers of micro-batches, by layer {counts}; expected equal numbers. Likely a "
            "layer was skipped; run whole forward passes in the block"
        )
    # Stored layer by layer, because a replay reads one layer at a time.
    micros = sorted(micros_by_layer[hooks[0].layer])
    return [torch.stack([columns[hook][micro] for hook in hooks]).transpose(0, 1) for micro in micros]


def _explain_few(block: PassBlock) -> str:
    """Explain why a block has fewer passes than expected."""
    if block.elsewhere:
        return (
            f"{block.elsewhere} forward passes ran on other threads, which have no block, and routed natively; open "
            "the block on the thread that runs the passes"
        )
    return "Likely this router was bypassed, or the block closed too early; close it after the last forward pass"


def _count_shared(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return uint8 [T]: number of common experts of two rows [T, K] without duplicates."""
    return (first[:, :, None] == second[:, None, :]).any(2).sum(1).to(torch.uint8)


class _Table:
    """The routes of one micro-batch on the device of its routers."""

    def __init__(
        self, routes: MicroRoutes, sampled: torch.Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        absent = None if routes.present is None else (~routes.present).nonzero()[:, 0]
        self.num_absent = 0 if absent is None else len(absent)
        index_parts = [index for index in (absent, sampled) if index is not None and len(index)]
        no_rows = torch.empty(0, dtype=torch.int64, device=device)
        self.asked = to_device(torch.cat(index_parts), device) if index_parts else no_rows
        """int64, rows whose native choice is computed: absent rows, then sampled rows."""
        by_layer = routes.experts.transpose(0, 1)
        # Always a copy, because absent rows are filled in, and a Recording may be overwritten.
        owned = torch.empty(by_layer.shape, dtype=dtype, device=by_layer.device).copy_(by_layer)
        self.experts = to_device(owned, device)
        """[L_local, T_local, K], narrow."""
        self.filled: set[int] = set()
        """Columns whose absent rows have been filled."""
        self.forwarded = self.awaited = 0


class _Rows:
    """The routes of all micro-batches, on the device while routers use the micro-batch."""

    def __init__(self, routes: Sequence[MicroRoutes], num_hooks: int, sampled: Sequence[torch.Tensor] = ()) -> None:
        self.routes, self._num_hooks, self._sampled = routes, num_hooks, sampled
        self._versions = [_version(micro.experts) for micro in routes]
        self._tables: dict[int, _Table] = {}

    def of(self, hook: Hook, micro: int, kind: str, scores: torch.Tensor) -> _Table:
        """The table of a micro-batch, which must have a row for each of the scores."""
        if micro >= len(self.routes):
            raise ReplayError(
                f"layer {hook.layer}: {kind} of micro-batch {micro + 1}, but there are routes for {len(self.routes)}. "
                "Likely iterator and routes were split differently, or another pass ran in the same block; give "
                "one entry per micro-batch"
            )
        num_rows = self.routes[micro].experts.size(0)
        if num_rows != scores.size(0):
            raise ReplayError(
                f"layer {hook.layer}, {kind} of micro-batch {micro}: the router sees {scores.size(0)} tokens, the "
                f"routes have {num_rows}. Likely sequence-parallel slices or alignment padding differ; docs/plugin.md "
                "lists the rows of each layout"
            )
        if micro not in self._tables:
            if _version(self.routes[micro].experts) != self._versions[micro]:
                raise ReplayError(
                    f"layer {hook.layer}, {kind} of micro-batch {micro}: its recorded routes were overwritten after "
                    "the block opened; leave a Recording alone, or give replay() a list, which is copied"
                )
            sampled = self._sampled[micro] if self._sampled else None
            self._tables[micro] = _Table(self.routes[micro], sampled, hook.dtype, scores.device)
            if kind == "recomputation":  # after the table was freed: assume that all routers are recomputed
                self._tables[micro].forwarded = self._tables[micro].awaited = self._num_hooks
        return self._tables[micro]

    def take_once(self, hook: Hook, micro: int, kind: str, scores: torch.Tensor) -> torch.Tensor:
        """int64 [T_local, K] of one router, read once per forward pass."""
        experts = self.of(hook, micro, kind, scores).experts[hook.column].long()
        self.finish(micro, first=True, checkpointed=False)
        return experts

    def finish(self, micro: int, first: bool, checkpointed: bool) -> None:
        """Free the table once all routers have used it and no recomputation will."""
        table = self._tables[micro]
        table.forwarded += first
        table.awaited += checkpointed if first else -1
        if table.forwarded >= self._num_hooks and table.awaited <= 0:
            del self._tables[micro]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class Recorder:
    """Routes natively. Keeps the choice (``keep``), and the number of experts shared with ``compared`` routes."""

    replays = False

    def __init__(self, hooks: Sequence[Hook], keep: bool, compared: Sequence[MicroRoutes] | None) -> None:
        self._kept = Columns(dict) if keep else None
        self._shared = Columns(dict)
        self._compared = None if compared is None else _Rows(compared, len(hooks))
        self.tokens: dict[int, torch.Tensor] = {}

    def choose(self, hook: Hook, call: RouterCall, question: Question) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (scores, experts), [T_local, K] each."""
        if not call.first and self._kept is not None:
            return question.at(self._kept[hook][call.micro].long())
        experts = question.preferred()
        if call.first and self._kept is not None:
            self._kept[hook][call.micro] = experts.to(hook.dtype)
        if call.first and self._compared is not None:
            compared_experts = self._compared.take_once(hook, call.micro, "forward", question.scores)
            self._shared[hook][call.micro] = _count_shared(experts, compared_experts)
        return question.at(experts)

    def close(self, hooks: Sequence[Hook], block: PassBlock, recording: Recording) -> None:
        """ReplayError if routers saw different micro-batches, or none."""
        if block.elsewhere and not block.passes:
            raise ReplayError(f"nothing was recorded: {_explain_few(block)}")
        if self._kept is not None:
            for micro, experts in enumerate(_stack(self._kept, hooks, block)):
                ids = self.tokens.get(micro)
                fits = ids is not None and len(ids) == len(experts)
                recording.routes.append(MicroRoutes(experts, None, ids if fits else None))
        recording.shared = _stack(self._shared, hooks, block)


class Replayer:
    """Gives the routers the experts of ``routes``, micro-batch by micro-batch."""

    replays = True

    def __init__(
        self,
        routes: Routes,
        hooks: Sequence[Hook],
        observe: bool,
        compared: Routes | None,
        min_agreement: float,
        checks: DeviceChecks | None = None,
    ) -> None:
        self._checks = checks
        self._min_agreement = min_agreement
        self._sampled = [sample_rows(micro) for micro in routes] if min_agreement > 0 else []
        self._rows = _Rows(routes, len(hooks), self._sampled)
        self._own = Columns(dict)  # the routers' own choice in the sampled rows
        self._fills: dict[tuple[int, int], torch.Tensor] = {}  # the same in absent rows, by (micro-batch, column)
        self._native = Columns(dict) if observe else None
        self._shared, self._native_shared = Columns(dict), Columns(dict)
        # If the replayed routes are compared with themselves, they need no second copy on the device.
        same = compared is routes
        self._compared = None if compared is None else self._rows if same else _Rows(compared, len(hooks))
        self.tokens: dict[int, torch.Tensor] = {}

    def choose(self, hook: Hook, call: RouterCall, question: Question) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (scores, experts), [T_local, K] each."""
        table = self._rows.of(hook, call.micro, "forward" if call.first else "recomputation", question.scores)
        compares = call.first and (self._native is not None or self._compared is not None)
        if compares:
            question.preferred()  # of all rows at once
        self._ask_router(hook, call, table, question)
        experts = table.experts[hook.column].long()
        if compares:
            self._compare(hook, call.micro, experts, question)
        self._rows.finish(call.micro, call.first, call.checkpointed)
        return question.at(experts)

    def _ask_router(self, hook: Hook, call: RouterCall, table: _Table, question: Question) -> None:
        """In the first pass, compute the router's choice for absent and sampled rows. Fill the absent ones."""
        key = call.micro, hook.column
        asks = table.num_absent > 0 and (call.first or key not in self._fills)
        samples = call.first and bool(self._sampled)
        if asks or samples:
            rows = table.asked if samples else table.asked[: table.num_absent]
            preferred = question.preferred_at(rows).to(hook.dtype)
            if asks:
                self._fills[key] = preferred[: table.num_absent]
            if samples:
                self._own[hook][call.micro] = preferred[table.num_absent :]
        if table.num_absent and (call.first or hook.column not in table.filled):
            table.experts[hook.column].index_copy_(0, table.asked[: table.num_absent], self._fills[key])
            table.filled.add(hook.column)

    def _compare(self, hook: Hook, micro: int, experts: torch.Tensor, question: Question) -> None:
        preferred = question.preferred()
        if self._native is not None:
            self._native[hook][micro] = preferred.to(hook.dtype)
        if self._compared is None:
            return
        same = self._compared is self._rows
        compared_experts = experts if same else self._compared.take_once(hook, micro, "comparison", question.scores)
        self._shared[hook][micro] = _count_shared(experts, compared_experts)
        self._native_shared[hook][micro] = _count_shared(preferred, compared_experts)

    def close(self, hooks: Sequence[Hook], block: PassBlock, recording: Recording) -> None:
        """ReplayError as ``RoutingReplay.replay`` on closing."""
        routes = self._rows.routes
        for hook in hooks:
            used = len(block.micros_of(hook.column))
            if used != len(routes):
                raise ReplayError(
                    f"layer {hook.layer}: {used} forward passes used the routes of {len(routes)} "
                    f"micro-batches; each must be used once. {_explain_few(block)}"
                )
        checks = DeviceChecks() if self._checks is None else self._checks
        recording.compared_tokens = check_tokens(routes, self.tokens, checks)
        if self._checks is None:
            checks.require()
        recording.shared, recording.native_shared = (
            _stack(counts, hooks, block) for counts in (self._shared, self._native_shared)
        )
        absent = sum(int((~micro.present).sum()) for micro in routes if micro.present is not None)
        recording.native_rows = len(hooks) * absent
        if self._native is not None:
            recording.native = [MicroRoutes(experts) for experts in _stack(self._native, hooks, block)]
        if self._sampled and hooks:  # last, because a caller may go on after an AgreementError
            preferred, layers = _stack(self._own, hooks, block), [hook.layer for hook in hooks]
            recording.agreement = check_agreement(
                routes, self._sampled, preferred, layers, hooks[0].num_experts, self._min_agreement
            )
