"""The training half of a step: passes that only look, then N mini-batches of replay, coefficients, backward, optimizer.

The three replay modes differ in one thing only, where the routes come from: nowhere (none), from the old-log-prob pass
(r2), or from the rollouts (r3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.config import Config
from megarl.core.diagnostics import entropy_stat, mismatch_metrics
from megarl.core.metrics import Stat, merge
from megarl.core.objectives import Objective, coefficients, function_coefficients, mini_batch_power
from megarl.core.objectives.columns import Denominators, TokenColumns
from megarl.core.packing import drop_routes, pack
from megarl.core.routing import Disagreement
from megarl.core.types import Rollout, TrainBatch
from megarl.errors import MegarlError, ReplayError, RolloutError, TraceError
from megarl.megatron import distributed
from megarl.megatron.frozen import Reference
from megarl.megatron.passes import forward
from megarl.megatron.passes.micro_batches import MicroBatch, split_by_sequence, split_micro_batches
from megarl.megatron.policy import Policy
from megarl.megatron.replay import MicroRoutes, Recording
from megarl.megatron.replay.rollout_routes import check_rollouts, deliver_routes, gather_shared
from megarl.run.progress import Advance
from megarl.train.token_advantages import Judged, with_token_advantages


@dataclass(slots=True)
class MiniBatch:
    """One optimizer step's share of this rank, and what passes over it leave behind."""

    micro_batches: list[MicroBatch]
    denominators: Denominators
    """Over all ranks."""
    rollout_routes: list[MicroRoutes] | None = None
    """The engine's routes, this rank's rows and layers; None if it recorded none, or nothing here could use them."""
    routes: list[MicroRoutes] | None = None
    """What training replays; None routes natively."""
    native_routes: list[MicroRoutes] | None = None
    """What the routers chose by themselves in the first pass, or would have chosen; kept only on demand."""
    old_logprobs: list[torch.Tensor] | None = None
    """[T] per micro-batch, on the last pipeline stage (elsewhere empty); None if they are the update's own."""
    old_updates: int = 0
    """How many updates the weights of that pass had seen."""
    ref_logprobs: list[torch.Tensor] | None = None
    """The same of the reference policy; None without one."""
    metrics: dict[str, Stat] = field(default_factory=dict)
    """About the gap between the engines; belongs to the step."""


class TrainStep:
    """Trains a policy on the rollouts of a step."""

    def __init__(self, config: Config, policy: Policy, objective: Objective) -> None:
        self.config = config
        self.policy = policy
        self.objective = objective
        function = config.train.objective_function
        self._coefficients = coefficients if function is None else partial(function_coefficients, function)
        self.reference = Reference(policy, config.reference_path) if objective.needs_ref_logprobs else None
        self.keeps_native_routes = False
        self._updates = 0
        self._padded = config.parallel.equal_micro_batches
        self._multiple = config.parallel.micro_batch_multiple

    @property
    def needs_token_advantages(self) -> bool:
        """Whether advantages wait for old and reference log-probabilities."""
        return self.objective.advantage == "token_level_kl"

    @property
    def needs_old_pass(self) -> bool:
        """Whether a step runs the old-log-prob pass.

        Before the only update of a step, theta is theta_old: the pass would repeat what the update computes anyway. r2
        records in that pass; without it, and without an update since, native routing is what it would replay. Not so
        where the update must know log-probabilities of the whole mini-batch beforehand.
        """
        beforehand = self.objective.weight_fn == "adaptive_power" and self.objective.corrected != "theta_old"
        return self.config.train.mini_batches > 1 or self.needs_token_advantages or beforehand

    def prepare(
        self,
        rollouts: Sequence[Rollout],
        advantages: np.ndarray | Sequence[np.ndarray],
        one_by_one: bool = False,
    ) -> MiniBatch:
        """Check, pack and cut this rank's rollouts of one mini-batch, and fetch its rows of their routes; collective.

        A rollout has its routes on one rank of the model copy at least. With ``one_by_one`` each is a micro-batch, in
        the given order; that is for passes which take one at a time, and no mini-batch to train on. TraceError if a
        trace is not of this model, or if replay is "r3" and routes are absent or too many rows missing.
        """
        r3, replay = self.config.train.replay == "r3", self.policy.replay
        bare = [drop_routes(rollout) for rollout in rollouts]
        recorded = all(rollout.routed_mask is not None for rollout in bare)
        failure: MegarlError | None = None
        try:
            if not rollouts:
                raise RolloutError(
                    "this rank has no sequence of the mini-batch, expected one or more on every data-parallel rank; "
                    "lower train.mini_batches or raise rollout.prompts_per_step"
                )
            if r3 or recorded:
                check_rollouts(rollouts, self.policy.shape)
            batch = pack(bare, advantages)
            if r3:
                self._check_missing(batch)
        except MegarlError as error:
            failure = error
        distributed.fail_together(failure, "the check of rollouts")
        if one_by_one:
            micro_batches = split_by_sequence(batch, self._padded)
        else:
            micro_batches = split_micro_batches(
                batch, self.config.train.micro_batch_tokens, self._padded, self._multiple
            )
        mini = MiniBatch(
            micro_batches, over_ranks(Denominators.of(batch.loss_mask, batch.cu_seqlens, batch.rollout_logprobs))
        )
        if replay is not None and recorded:
            mini.rollout_routes = deliver_routes(rollouts, micro_batches, replay.layers, self.policy.shape)
        if r3:
            mini.routes = mini.rollout_routes
        return mini

    def _check_missing(self, batch: TrainBatch) -> None:
        assert batch.routed_mask is not None
        missing, limit = ~batch.routed_mask, self.config.train.max_missing_rows
        # Engines have no row for the last token: they never processed it. Nothing is predicted from it either.
        missing[batch.cu_seqlens[1:] - 1] = False
        missing = float(missing.double().mean())
        if missing > limit:
            raise TraceError(
                f"{missing:.1%} of the tokens have no recorded route, more than train.max_missing_rows = {limit:.1%}; "
                "find out why the engine lost them, or raise the limit: missing rows route natively"
            )

    def old_logprobs(self, mini: MiniBatch) -> None:
        """The old-log-prob pass over one mini-batch; r2 records its routes here."""
        with self._context(mini) as seen:
            outputs = self._run(mini, None, None)
        mini.old_logprobs = [output.logprobs for output in outputs]
        mini.old_updates = self._updates
        mini.metrics = merge(
            self._mismatch(micro.batch, output.logprobs, output.entropies)
            for micro, output in zip(mini.micro_batches, outputs, strict=bool(outputs))
        )
        self._routing_metrics(mini, seen, replayed=mini.routes is not None)
        if self.config.train.replay == "r2":
            mini.routes = seen.routes

    def ref_logprobs(self, mini: MiniBatch) -> None:
        """The reference policy's pass over one mini-batch; it routes natively, whatever is replayed elsewhere."""
        assert self.reference is not None, "the objective has no reference"
        mini.ref_logprobs = self.reference.logprobs(mini.micro_batches)

    def token_advantages(self, minis: Sequence[MiniBatch], judged: Judged) -> None:
        """Give every token of a step its advantage, after both passes over all mini-batches; a collective call."""
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return  # advantages enter where the loss is
        old, ref = [mini.old_logprobs for mini in minis], [mini.ref_logprobs for mini in minis]
        assert None not in old
        assert None not in ref
        found, metrics = with_token_advantages(
            self.objective,
            judged,
            [mini.micro_batches for mini in minis],
            old,  # type: ignore[arg-type]
            ref,  # type: ignore[arg-type]
            parallel_state.get_data_parallel_group(),
        )
        for mini, micro_batches in zip(minis, found, strict=True):
            mini.micro_batches = micro_batches
        minis[0].metrics = merge([minis[0].metrics, metrics])

    def update(self, mini: MiniBatch, on_micro_batch: Advance | None = None) -> dict[str, Stat]:
        """One optimizer step; returns the statistics of its mini-batch on this rank."""
        first_sight = mini.old_logprobs is None
        power = self._power(mini)

        def weigh(
            index: int, batch: TrainBatch, logprobs: torch.Tensor, entropies: torch.Tensor
        ) -> tuple[torch.Tensor, dict[str, Stat]]:
            columns = _columns(mini, index, batch, logprobs)
            found = self._coefficients(self.objective, columns, mini.denominators, power=power)
            metrics = {**found.metrics, "entropy": entropy_stat(entropies, columns.loss_mask)}
            if first_sight:
                mini.metrics = merge([mini.metrics, self._mismatch(batch, logprobs, entropies)])
            return found.values, metrics

        self.policy.zero_grad()
        with self._context(mini) as seen:
            outputs = self._run(mini, weigh, on_micro_batch)
        if first_sight:
            self._routing_metrics(mini, seen, replayed=mini.routes is not None)
        norm, lr = self.policy.optimizer_step()
        self._updates += 1
        alike = {"grad_norm": Stat.mean(torch.tensor([norm])), "lr": Stat.mean(torch.tensor([lr], dtype=torch.float64))}
        return merge([alike, *(output.metrics for output in outputs)])

    def _power(self, mini: MiniBatch) -> float | None:
        """The exponent that all micro-batches and ranks of this update share, if the objective has one."""
        if self.objective.weight_fn != "adaptive_power":
            return None
        if mini.old_logprobs is None:
            return 1.0  # theta is theta_old, and all ratios are 1
        logprobs = mini.old_logprobs
        if self._updates != mini.old_updates and self.objective.corrected != "old_mu":
            with self._context(mini):
                logprobs = [output.logprobs for output in self._run(mini, None, None)]
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return None
        columns = [
            _columns(mini, index, micro.batch, logprobs[index]) for index, micro in enumerate(mini.micro_batches)
        ]
        return mini_batch_power(self.objective, columns, _sum_over_ranks)

    def _run(
        self, mini: MiniBatch, weigh: forward.CoefficientFn | None, on_micro_batch: Advance | None
    ) -> list[forward.MicroOutput]:
        return forward.run(
            self.policy.chunks,
            mini.micro_batches,
            temperature=self.config.rollout.temperature,
            vocab_size=self.policy.shape.vocab_size,
            coefficients=weigh,
            on_micro_batch=None if on_micro_batch is None else lambda: on_micro_batch(1),
        )

    @contextmanager
    def _context(self, mini: MiniBatch) -> Iterator[Recording]:
        """Around a pass over a mini-batch; what is wrong when it closes is an error on all ranks. A collective call."""
        failure: MegarlError | None = None
        ran = False
        try:
            with self._block(mini) as seen:
                yield seen
                ran = True
        except ReplayError as error:
            if not ran:  # in the middle of the pass, where other ranks wait for something else
                raise
            failure = error
        if self.policy.replay is not None:
            distributed.fail_together(failure, "replay")

    def _block(self, mini: MiniBatch) -> AbstractContextManager[Recording]:
        """Replay if there are routes; in the first pass over a mini-batch, compare the routers with the rollout."""
        replay = self.policy.replay
        first_pass = mini.old_logprobs is None
        if replay is None:
            return nullcontext(Recording())
        compared = mini.rollout_routes if first_pass else None
        if mini.routes is not None:
            observe, min_agreement = first_pass and self.keeps_native_routes, None if first_pass else 0.0
            return replay.replay(mini.routes, observe, compared, min_agreement)
        if not first_pass:
            return nullcontext(Recording())
        return replay.record(keep=self.config.train.replay == "r2" or self.keeps_native_routes, compared=compared)

    def _mismatch(self, batch: TrainBatch, logprobs: torch.Tensor, entropies: torch.Tensor) -> dict[str, Stat]:
        mask = batch.loss_mask.to(logprobs.device)
        found = mismatch_metrics(
            logprobs, batch.rollout_logprobs.to(logprobs.device), mask, batch.cu_seqlens.to(logprobs.device)
        )
        return {**found, "rollout/entropy": entropy_stat(entropies, mask)}

    def _routing_metrics(self, mini: MiniBatch, seen: Recording, replayed: bool) -> None:
        """Disagreement between the rollout's routes and those used here, and those the routers would have chosen.

        What is collective here must not hang on what this rank's routers saw: a stage may have none.
        """
        if self.policy.replay is None or mini.rollout_routes is None:
            return
        layers, shape = self.policy.replay.layers, self.policy.shape
        device = torch.cuda.current_device()  # what a stage without MoE layers sends travels like the others'
        nothing = [torch.zeros(len(rows.experts), 0, dtype=torch.uint8, device=device) for rows in mini.rollout_routes]
        if self.keeps_native_routes:
            own = seen.native if replayed else seen.routes
            mini.native_routes = own if layers else mini.rollout_routes
        for prefix, counts in (("router", seen.shared), ("router/native", seen.native_shared))[: 1 + replayed]:
            shared = gather_shared(counts if layers else nothing, mini.micro_batches, layers)
            stats = Disagreement.of(np.concatenate(shared), shape.topk).stats(prefix)
            mini.metrics = merge([mini.metrics, stats])


def _columns(mini: MiniBatch, index: int, batch: TrainBatch, logprobs: torch.Tensor) -> TokenColumns:
    """What the objective reads of one micro-batch, for given log pi_theta."""
    old = logprobs if mini.old_logprobs is None else mini.old_logprobs[index]
    ref = None if mini.ref_logprobs is None else mini.ref_logprobs[index]
    device = logprobs.device
    return TokenColumns(
        logprobs,
        old,
        batch.rollout_logprobs.to(device),
        batch.advantages.to(device),
        batch.loss_mask.to(device),
        batch.cu_seqlens.to(device),
        ref,
    )


def _sum_over_ranks(sums: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    return sums


def over_ranks(local: Denominators) -> Denominators:
    """The sum over data-parallel ranks."""
    counts = torch.tensor([local.num_tokens, local.num_sequences], device=torch.cuda.current_device())
    dist.all_reduce(counts, group=parallel_state.get_data_parallel_group())
    return Denominators(*counts.tolist())


def collect(parts: Sequence[dict[str, Stat]]) -> dict[str, Stat] | None:
    """Merge statistics of this rank and gather them on the main rank."""
    return distributed.collect_metrics(merge(parts))
