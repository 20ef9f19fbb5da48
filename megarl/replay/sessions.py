"""Answers the routers while a block is open: a ``Session`` records the routers' choice, or gives routes.

A router call does not synchronise host and device. The routes of all micro-batches go to the device when the block
opens, stored layer by layer. Counts are read when the block closes. All state is kept by micro-batch, because passes
may overtake each other.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from threading import get_ident

import torch

from megarl.core.devices import DeviceChecks, to_device
from megarl.errors import ReplayError, refusal
from megarl.replay.agreement import check_agreement, check_tokens, sample_rows
from megarl.replay.hooks import Hook, Question
from megarl.replay.pass_log import PassBlock, RouterCall
from megarl.replay.records import MicroRoutes, Recording, RouterScores

Routes = Sequence[MicroRoutes]
Scored = bool | Sequence[RouterScores]
"""Whether to record how likely routers find the experts in use, or the experts of earlier scores."""
Columns = defaultdict[Hook, dict[int, torch.Tensor]]
"""For each router, one tensor per micro-batch."""


def _stack(columns: Columns, hooks: Sequence[Hook], block: PassBlock) -> list[torch.Tensor]:
    """Return [T_local, L_local, ...] per micro-batch. ReplayError if routers saw different micro-batches."""
    if not columns:
        return []
    micros_by_layer = {hook.layer: block.micros_of(hook.column) for hook in hooks}
    if len({frozenset(micros) for micros in micros_by_layer.values()}) > 1:
        counts = {layer: len(micros) for layer, micros in micros_by_layer.items()}
        raise ReplayError(refusal("micro_batches_of_layers", counts=counts))
    # Stored layer by layer, because a replay reads one layer at a time.
    micros = sorted(micros_by_layer[hooks[0].layer])
    return [torch.stack([columns[hook][micro] for hook in hooks]).transpose(0, 1) for micro in micros]


def _count_shared(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return uint8 [T]: number of common experts of two rows [T, K] without duplicates."""
    return (first[:, :, None] == second[:, None, :]).any(2).sum(1).to(torch.uint8)


@torch.no_grad()
def replace_weak(
    question: Question, experts: torch.Tensor, min_score: float, are_logits: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (experts int64 [T, K], number of replaced experts uint8 [T]) without the experts that a router rates low.

    With w the weakest score among the router's own top K, an expert stays if ``score >= min(min_score w, w)``. Scores
    are those by which the router ranks (expert bias included); of logits, softmax probabilities are compared. The best
    of the own top K that are not in the row take the places of the others. experts: int64 [T, K], none twice in a row.
    Source: prime-rl, pull request 2703.
    """
    preferred, scores = question.preferred(), question.scores.detach()
    best = scores.gather(1, preferred).double()
    weakest = best.amin(1, keepdim=True)
    lowest = weakest + math.log(min_score) if are_logits else torch.minimum(weakest * min_score, weakest)
    is_weak = scores.gather(1, experts).double() < lowest
    # No weak expert is preferred, so that as many preferred experts as weak ones, or more, are not in the row.
    is_used = (preferred[:, :, None] == experts[:, None, :]).any(2)
    order = torch.sort(best.masked_fill(is_used, -math.inf), dim=1, descending=True, stable=True).indices
    substitutes = preferred.gather(1, order).gather(1, (is_weak.cumsum(1) - 1).clamp(min=0))
    return torch.where(is_weak, substitutes, experts), is_weak.sum(1).to(torch.uint8)


class _Table:
    """The routes of one micro-batch on the device of its routers: a copy, because absent rows are filled in."""

    def __init__(self, routes: MicroRoutes, hook: Hook, samples: bool) -> None:
        device = hook.router.weight.device
        no_rows = torch.empty(0, dtype=torch.int64)
        absent = no_rows if routes.present is None else (~routes.present).nonzero()[:, 0]
        self.num_absent = len(absent)
        self.asked = to_device(torch.cat([absent, sample_rows(routes) if samples else no_rows]), device)
        """int64, rows whose native choice is computed: absent rows, then sampled rows."""
        by_layer = routes.experts.detach().transpose(0, 1)
        self.experts = to_device(by_layer.to(hook.dtype, copy=True, memory_format=torch.contiguous_format), device)
        """[L_local, T_local, K], narrow."""
        self.gates: torch.Tensor | None = None
        """float32, as ``experts``; NaN where the router's own are taken."""
        if routes.gates is not None:
            gates = routes.gates.detach().float().index_fill(0, absent.to(routes.gates.device), torch.nan)
            self.gates = to_device(gates.transpose(0, 1).contiguous(), device)


def _make_tables(routes: Routes, hooks: Sequence[Hook], samples: bool = False) -> list[_Table]:
    return [_Table(micro, hooks[0], samples) for micro in routes] if hooks else []


def _find_table(tables: Sequence[_Table], hook: Hook, call: RouterCall, scores: torch.Tensor) -> _Table:
    """The table of a call's micro-batch, which must have a row for each of the scores."""
    if call.micro >= len(tables):
        raise ReplayError(refusal("routes_of_pass", hook=hook, number=call.micro + 1, num=len(tables)))
    table, tokens = tables[call.micro], len(scores)
    if (rows := table.experts.size(1)) != tokens:
        raise ReplayError(refusal("tokens_of_router", hook=hook, call=call, tokens=tokens, rows=rows))
    return table


class Session:
    """Gives the routers the experts of ``routes``, micro-batch by micro-batch; without routes, their own choice.

    keep: keep the routers' own choice. compared: count the experts shared with these routes, too. min_score: of
    ``replace_weak``. scored: record scores.
    """

    def __init__(
        self, hooks: Sequence[Hook], routes: Routes | None, keep: bool, compared: Routes | None,
        min_agreement: float = 0.0, checks: DeviceChecks | None = None, min_score: float = 0.0, scored: Scored = False,
    ) -> None:  # fmt: skip
        self.replays = routes is not None
        """Whether the experts come from given routes and not from the router."""
        self._routes, self._checks, self._min_agreement = routes or (), checks, min_agreement
        self._tables = _make_tables(self._routes, hooks, min_agreement > 0)
        self._sampled = Columns(dict)  # the routers' own choice in the sampled rows
        self._min_score, self._replaced, self._in_use = min_score, Columns(dict), Columns(dict)
        self._native = Columns(dict) if keep else None
        self._shared, self._native_shared = Columns(dict), Columns(dict)
        # If the replayed routes are compared with themselves, they need no second copy on the device.
        same = compared is routes
        self._compared = None if compared is None else self._tables if same else _make_tables(compared, hooks)
        self._scored, self._scored_experts, self._log_probs = scored, Columns(dict), Columns(dict)
        self.tokens: dict[int, torch.Tensor] = {}
        """By micro-batch, the model's input ids, one per row of the routers."""

    def choose(self, hook: Hook, call: RouterCall, question: Question) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (scores, experts), [T_local, K] each."""
        if self.replays:
            experts = self._find_experts(hook, call, question)
        elif call.first or self._native is None:
            experts = question.preferred()
        else:
            experts = self._native[hook][call.micro]
        if call.first and self._native is not None:
            self._native[hook][call.micro] = question.preferred().to(hook.dtype)
        if call.first and self._compared is not None:
            compared = _find_table(self._compared, hook, call, question.scores).experts[hook.column]
            self._shared[hook][call.micro] = _count_shared(experts, compared)
            if self.replays:
                self._native_shared[hook][call.micro] = _count_shared(question.preferred(), compared)
        if call.first and self._scored:
            scored = experts if self._scored is True else self._scored[call.micro].experts[:, hook.column]
            self._scored_experts[hook][call.micro] = scored.to(hook.dtype)
            self._log_probs[hook][call.micro] = hook.log_probs(question.scores, scored.long())
        return question.at(experts.long())

    def _find_experts(self, hook: Hook, call: RouterCall, question: Question) -> torch.Tensor:
        """Return the experts of a call's routes, narrow [T_local, K]; the router fills absent rows."""
        table = _find_table(self._tables, hook, call, question.scores)
        narrow = table.experts[hook.column]
        if call.first and (table.num_absent or self._min_agreement > 0):
            preferred = question.preferred().index_select(0, table.asked).to(hook.dtype)
            absent, sampled = preferred.tensor_split([table.num_absent])
            narrow.index_copy_(0, table.asked[: table.num_absent], absent)
            self._sampled[hook][call.micro] = sampled
        if call.first and self._min_score:
            experts, count = replace_weak(question, narrow.long(), self._min_score, hook.ranks_logits)
            self._in_use[hook][call.micro], self._replaced[hook][call.micro] = experts.to(hook.dtype), count
        return self._in_use[hook][call.micro] if self._min_score else narrow

    def find_gates(self, hook: Hook, call: RouterCall, experts: torch.Tensor) -> torch.Tensor | None:
        """Return the gates of a call's routes, float32 [T_local, K], for the ``experts`` in use, [T_local, K].

        NaN in a row takes the router's own, as in every row that does not use all its experts; None: all rows.
        """
        if not self.replays or (gates := self._tables[call.micro].gates) is None:
            return None
        is_used = (self._tables[call.micro].experts[hook.column] == experts).all(1, keepdim=True)
        return gates[hook.column].masked_fill(~is_used, torch.nan)

    def close(self, hooks: Sequence[Hook], block: PassBlock, recording: Recording) -> None:
        """ReplayError as ``RoutingReplay.replay`` on closing, and if nothing was recorded."""
        if not self.replays and hooks and not block.passes:
            raise ReplayError("nothing was recorded: run forward passes in the block, on the thread that opened it")
        for hook in hooks if self.replays else ():
            used = len(block.micros_of(hook.column))
            if used != len(self._routes):
                raise ReplayError(refusal("passes_of_layer", hook=hook, used=used, num=len(self._routes)))
            if get_ident() in hook.gates:
                raise ReplayError(refusal("gates_of_router", hook=hook))
        checks = DeviceChecks() if self._checks is None else self._checks
        recording.compared_tokens = check_tokens(self._routes, self.tokens, checks)
        if self._checks is None:
            checks.require()
        native = [] if self._native is None else _stack(self._native, hooks, block)
        if self.replays:
            recording.native = [MicroRoutes(experts) for experts in native]
        else:
            for micro, experts in enumerate(native):
                ids = self.tokens.get(micro)
                fits = ids is not None and len(ids) == len(experts)
                recording.routes.append(MicroRoutes(experts, None, ids if fits else None))
        recording.shared = _stack(self._shared, hooks, block)
        recording.native_shared = _stack(self._native_shared, hooks, block)
        recording.replaced = _stack(self._replaced, hooks, block)
        columns = (_stack(of_kind, hooks, block) for of_kind in (self._scored_experts, self._log_probs))
        recording.scores = [RouterScores(*of_micro) for of_micro in zip(*columns, strict=True)]
        recording.native_rows = len(hooks) * sum(table.num_absent for table in self._tables)
        if self._tables and self._min_agreement > 0:  # last, because a caller may go on after an AgreementError
            preferred, layers = _stack(self._sampled, hooks, block), [hook.layer for hook in hooks]
            rows = [t.experts[:, t.asked[t.num_absent :]].transpose(0, 1).contiguous() for t in self._tables]
            num_experts = hooks[0].num_experts
            recording.agreement = check_agreement(rows, preferred, layers, num_experts, self._min_agreement)
