"""What a step does, a rank's share of an optimizer step, and its making from rollouts.

Shapes: ``n`` sequences of this rank, ``T`` packed tokens of a micro-batch, ``L`` MoE layers, ``K`` experts of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch
from megatron.core import parallel_state

from megarl.config import Config
from megarl.core.devices import to_device
from megarl.core.metrics import Stat, merge
from megarl.core.objectives.columns import Denominators, TokenColumns
from megarl.core.ratios import segment_expand
from megarl.core.types import Rollout, TrainBatch
from megarl.errors import AgreementError, TraceError, refusal
from megarl.megatron.distributed import all_sum
from megarl.megatron.passes.micro_batches import MicroBatch, split_micro_batches
from megarl.replay import MicroRoutes, RouterScores


@dataclass(frozen=True, slots=True)
class Judged:
    """The rewards of a global step, equal on all ranks, and the rank's sequences."""

    rewards: np.ndarray
    """float64 [S], 0 where the reward function failed; such a response has no loss token."""
    groups: np.ndarray
    """int64 [S]."""
    owned: list[list[int]]
    """By mini-batch, the sequences of the data-parallel rank, in the order of the rollouts."""


@dataclass(frozen=True, slots=True)
class FirstPass:
    """Results of the first pass over a mini-batch, at the step's first weights."""

    logprobs: list[torch.Tensor]
    """fp32 [T] by micro-batch, of pi_old, on the last pipeline stage; empty on other stages."""
    routes: list[MicroRoutes] | None
    """The routes that later passes replay: the engine's (r3) or the routers' own (r2). None routes natively."""
    native_routes: list[MicroRoutes] | None
    """What the routers chose, or would have chosen. Kept for trace files only."""
    gaps: np.ndarray
    """float64 [n, COLUMNS]: how far the engines are apart (``megarl.watch.tripwires.Column``)."""
    mistake: AgreementError | None
    """Wrong routes of the rank, found by replay, for the tripwires."""
    metrics: dict[str, Stat]
    scores: list[RouterScores] = field(default_factory=list)
    """Of the experts in use, for ``router_drift``; empty if the objective reads none."""


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The rank's share of an optimizer step. A pass returns a record; ``replace`` puts the record here."""

    micro_batches: list[MicroBatch]
    denominators: Denominators
    """Over all ranks."""
    keys: np.ndarray
    """float64 [n, 2]: group and sample of each sequence."""
    engine_routes: list[MicroRoutes] | None = None
    """The engine's routes, this rank's rows and layers. None without recorded routes, or without a router to use them.
    """
    routes: list[MicroRoutes] | None = None
    """``engine_routes`` for r3, else None."""
    first: FirstPass | None = None
    """None until the first pass: the old-log-prob pass, or the forward pass of the update."""
    ref_logprobs: list[torch.Tensor] | None = None
    """As ``FirstPass.logprobs``, of the reference policy; None without a reference."""
    router_drift: list[torch.Tensor] | None = None
    """fp32 [T] by micro-batch, since the first pass; None if the objective reads none."""
    metrics: dict[str, Stat] = field(default_factory=dict)
    """Of drops and of the KL to the reference."""

    @property
    def replayed(self) -> list[MicroRoutes] | None:
        """The routes that the next pass replays; None routes natively."""
        return self.routes if self.first is None else self.first.routes

    @property
    def statistics(self) -> dict[str, Stat]:
        """This mini-batch's part of the step's record."""
        return merge([self.metrics, {} if self.first is None else self.first.metrics])

    def without(self, dropped: np.ndarray) -> Self:
        """Return the mini-batch without the loss tokens of dropped sequences, bool [n]; the denominators stay."""
        micros = []
        for micro in self.micro_batches:
            batch, stays = micro.batch, torch.from_numpy(~dropped[list(micro.sequences)])
            mask = batch.loss_mask & segment_expand(stays, batch.cu_seqlens)
            micros.append(replace(micro, batch=replace(batch, loss_mask=mask)))
        return replace(self, micro_batches=micros) if dropped.any() else self

    def columns(self, index: int, logprobs: torch.Tensor, old_is_rollout: bool = False) -> TokenColumns:
        """Return what an objective reads of micro-batch ``index``, on the device of ``logprobs`` [T].

        Before the first pass has ended, the policy is the old policy. old_is_rollout: mu stands in for pi_old.
        """
        batch, device = self.micro_batches[index].batch, logprobs.device
        mu = to_device(batch.rollout_logprobs, device)
        old = logprobs if self.first is None else self.first.logprobs[index]
        columns = batch.advantages, batch.loss_mask, batch.cu_seqlens
        advantages, mask, bounds = (to_device(column, device) for column in columns)
        ref = None if self.ref_logprobs is None else self.ref_logprobs[index]
        drift = None if self.router_drift is None else self.router_drift[index]
        policies = logprobs, mu if old_is_rollout else old, mu
        return TokenColumns(*policies, advantages, mask, bounds, ref, router_drift=drift)


def split(config: Config, batch: TrainBatch) -> list[MicroBatch]:
    """Split a batch as the layout needs it, at ``train.micro_batch_tokens``; a collective call."""
    parallel = config.parallel
    is_padded = parallel.dispatcher == "allgather"  # it exchanges no sizes: equal micro-batches
    return split_micro_batches(batch, config.train.micro_batch_tokens, is_padded, parallel.micro_batch_multiple)


def make_rollout(tokens: np.ndarray, loss_mask: np.ndarray | None = None) -> Rollout:
    """Return tokens [T] that no engine sampled as a rollout without routes; by default without loss."""
    loss_mask = np.zeros(len(tokens), bool) if loss_mask is None else loss_mask
    logprobs, versions = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32)
    return Rollout(0, 0, np.asarray(tokens, np.int32), loss_mask, logprobs, None, None, versions, "abort")


def over_ranks(local: Denominators) -> Denominators:
    """Return the sum of denominators over data-parallel ranks; a collective call."""
    counts = to_device(torch.tensor([local.num_tokens, local.num_sequences]), torch.cuda.current_device())
    return Denominators(*all_sum(counts, parallel_state.get_data_parallel_group()).tolist())


def check_missing_rows(batch: TrainBatch, limit: float) -> None:
    """TraceError if a larger share of the tokens than ``limit`` has no recorded route."""
    assert batch.routed_mask is not None
    missing = ~batch.routed_mask.numpy()
    # Engines never process the last token, and no token is predicted from it.
    missing[batch.cu_seqlens[1:].numpy() - 1] = False
    share = np.count_nonzero(missing) / len(missing)
    if share > limit:
        raise TraceError(refusal("missing_rows", share=share, limit=limit))


def collect_sequences(minis: Sequence[MiniBatch], owned: Sequence[Sequence[int]]) -> list[int]:
    """Return the sequences of the step in the order of their micro-batches; ``owned``: see ``Judged``."""
    pairs = zip(minis, owned, strict=True)
    return [rows[index] for mini, rows in pairs for micro in mini.micro_batches for index in micro.sequences]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The passes, measurements and records of a step; equal on all ranks."""

    old_passes: int
    """The last mini-batches of the step, which have an old-log-prob pass before the first update."""
    writes_traces: bool = False
    """Keep the routers' own choice in the first pass, and write the routes of the step."""
    evaluates: bool = False
    """Evaluate after the step."""
    saves: bool = False
    """Save a checkpoint after the step."""

    @classmethod
    def of(cls, config: Config, done: int) -> Self:
        """Return the plan of the step after which ``done`` steps are finished."""
        is_last = done == config.run.steps
        evaluates = bool(config.eval.every) and (is_last or _is_due(done, config.eval.every))
        saves = (is_last and config.checkpoint.at_end) or _is_due(done, config.checkpoint.every)
        return cls(config.old_passes, config.log.writes_traces(done), evaluates, saves)


def _is_due(done: int, every: int) -> bool:
    return bool(every) and done % every == 0
