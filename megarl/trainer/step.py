"""The training half of a step: the passes before the first update, then N updates.

Each update is: replay, forward, coefficients, backward, optimizer step. The three replay modes differ only in where the
routes come from: nowhere ("none"), the old-log-prob pass ("r2"), or the rollouts ("r3").

The tripwires judge the gaps of a step over all ranks, which come to the same verdict (``megarl.watch.tripwires``). A
dropped sequence has no loss token any more, while the denominators stay: it is masked as by a trust mask.

Shapes: ``N`` sequences, ``T`` packed tokens of a micro-batch, ``L`` MoE layers, ``K`` experts of a token.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from megarl.config import Config
from megarl.core.devices import DeviceChecks
from megarl.core.measures import surrogate_metrics
from megarl.core.metrics import Stat, merge
from megarl.core.objectives import BatchFacts, Objective, coefficients, function_coefficients, gather_facts
from megarl.core.objectives.columns import Denominators
from megarl.core.packing import has_routes, pack
from megarl.core.types import Rollout, TrainBatch
from megarl.errors import AgreementError, RolloutError, refusal
from megarl.megatron import distributed
from megarl.megatron.checkpoints.checkpoint import FrozenModel
from megarl.megatron.policy import Policy
from megarl.megatron.rollout_routes import check_rollouts, deliver_keys, deliver_routes
from megarl.models.fit import check_reference, watches_routes
from megarl.run.progress import Advance
from megarl.stand_ins.sparse_attention import find_indexers
from megarl.trainer import passes
from megarl.trainer.mini_batch import FirstPass, Judged, MiniBatch, StepPlan, check_missing_rows, over_ranks, split
from megarl.watch.tripwires import StepJudge

Phase = Callable[[str], AbstractContextManager[None]]


class TrainStep:
    """Trains a policy on the rollouts of a step: ``prepare`` mini-batches, ``look``, then ``update`` one by one."""

    def __init__(self, config: Config, policy: Policy, objective: Objective) -> None:
        self.config, self.policy, self.objective = config, policy, objective
        self.reference: FrozenModel | None = None
        if objective.needs_ref_logprobs:
            check_reference(config.reference_path, policy.shape)
            self.reference = FrozenModel(config, Path(config.reference_path), config.train.replay_reference)
        watched = watches_routes(config, policy.shape)
        self.tripwires = Tripwires(config.train.model_copy(update={} if watched else {"max_native_flip": "off"}))
        self._by_token = objective.advantage == "token_level_kl"
        self._old_is_rollout = config.train.old_logprobs == "rollout"

    def prepare(self, rollouts: Sequence[Rollout], advantages: np.ndarray | Sequence[np.ndarray]) -> MiniBatch:
        """Check, pack and split the rank's rollouts of a mini-batch, and fetch the rank's rows of their routes.

        advantages: float64 [n], or [T] per rollout. A collective call. The routes of a rollout are on at least one rank
        of the model copy. TraceError if routes are not of this model, or if replay is "r3" and routes are absent or too
        many rows are missing; RolloutError on a rank without rollouts.
        """
        config, replay, shape = self.config, self.policy.replay, self.policy.shape
        is_r3, is_recorded = config.train.replay == "r3", all(map(has_routes, rollouts))
        train = config.train

        def check_and_pack() -> TrainBatch:
            if not rollouts:
                raise RolloutError(refusal("rank_without_sequence"))
            if is_r3 or is_recorded:
                check_rollouts(rollouts, shape, train.replay_gates, train.replay_indexer)
            batch = pack(rollouts, advantages)
            if is_r3:
                check_missing_rows(batch, config.train.max_missing_rows)
            return batch

        batch = distributed.run_together("the check of rollouts", check_and_pack)
        micro_batches = split(config, batch)
        denominators = over_ranks(Denominators.of(batch.loss_mask, batch.cu_seqlens, batch.rollout_logprobs))
        keys = np.array([(rollout.group, rollout.sample) for rollout in rollouts], float)
        engine_routes = None
        if replay is not None and is_recorded:
            engine_routes = deliver_routes(rollouts, micro_batches, replay.layers, shape, train.replay_gates)
        if train.replay_indexer:
            micro_batches = deliver_keys(rollouts, micro_batches, find_indexers(self.policy.chunks), shape)
        return MiniBatch(micro_batches, denominators, keys, engine_routes, engine_routes if is_r3 else None)

    def look(
        self, plan: StepPlan, minis: Sequence[MiniBatch], judged: Judged | None = None, phase: Phase = nullcontext
    ) -> list[MiniBatch]:
        """Run the passes before the first update; return the mini-batches with what the passes found.

        judged: for objectives with advantages by token.
        """
        minis = list(minis)
        if plan.old_passes:
            with phase("old_logprobs"):  # log pi_old [T]; r2 records its routes [T, L, K]
                begin = len(minis) - plan.old_passes
                minis[begin:] = [self.old_pass(plan, mini) for mini in minis[begin:]]
                if begin == 0:  # otherwise the first update includes the first pass, and judges
                    minis, _ = self.tripwires.judge(minis)
        if self.reference is not None:
            with phase("ref_logprobs"):  # log pi_ref [T]
                refs = [passes.ref_pass(self.policy, self.reference, mini) for mini in minis]
                minis = [replace(mini, ref_logprobs=ref) for mini, ref in zip(minis, refs, strict=True)]
        if self._by_token:
            with phase("advantages"):  # A [T]
                minis = self._set_token_advantages(minis, judged, is_current=False)
        return minis

    def old_pass(self, plan: StepPlan, mini: MiniBatch) -> MiniBatch:
        """Run the old-log-prob pass over a mini-batch, and compare the engines there."""
        routing = passes.compared(self.policy, mini, plan, scored=self.objective.router_shift_floor is not None)
        output = passes.run_pass(self.policy, mini, routing, leaves_mistakes=self.tripwires.judges_routes)
        return replace(mini, first=passes.compare_engines(self.policy, mini, output, plan))

    def update(
        self, plan: StepPlan, minis: Sequence[MiniBatch], index: int, judged: Judged | None = None,
        advance: Advance | None = None,
    ) -> tuple[list[MiniBatch], dict[str, Stat]]:  # fmt: skip
        """Take the optimizer step of mini-batch ``index``; return all mini-batches, and statistics of this rank.

        The weights have moved since ``look`` unless ``index`` is 0. If the update includes the first pass over the
        mini-batch, the tripwires judge the step before the optimizer moves a weight: all mini-batches with a first
        pass. If sequences are dropped, the gradients are computed again without them.
        """
        minis, policy = list(minis), self.policy
        if index and self._by_token and self.objective.kl_at == "theta":
            of_mini = judged and replace(judged, owned=[judged.owned[index]])
            [minis[index]] = self._set_token_advantages([minis[index]], of_mini, is_current=True)
        if self.objective.router_shift_floor is not None:
            minis[index] = replace(minis[index], router_drift=passes.router_drift(policy, minis[index], index > 0))
        is_first_pass = index == 0 and minis[0].first is None
        biases = policy.expert_biases() if is_first_pass else []
        biases_before = [buffer.clone() for buffer in biases]
        output = self.backward(plan, minis, index, advance)
        if is_first_pass:
            minis[0] = replace(minis[0], first=passes.compare_engines(policy, minis[0], output, plan))
            with_pass = [place for place, mini in enumerate(minis) if mini.first is not None]
            judged_minis, any_dropped = self.tripwires.judge([minis[place] for place in with_pass])
            for place, mini in zip(with_pass, judged_minis, strict=True):
                minis[place] = mini
            if any_dropped:
                for buffer, value in zip(biases, biases_before, strict=True):
                    buffer.copy_(value)  # each pass moves the bias
                output = self.backward(plan, minis, index)
        norm, lr = policy.optimizer_step(more_follow=index + 1 < len(minis))
        equal_on_ranks = Stat.means_of({"grad_norm": (norm, 1.0), "lr": (lr, 1.0)})
        return minis, merge([equal_on_ranks, output.metrics, *(micro.metrics for micro in output.micros)])

    def backward(
        self, plan: StepPlan, minis: Sequence[MiniBatch], index: int, advance: Advance | None = None
    ) -> passes.PassOutput:
        """Leave the gradients of mini-batch ``index`` in the model."""
        mini, function, checks = minis[index], self.config.train.objective_function, DeviceChecks()
        facts = self._facts(mini, has_moved=index > 0)
        weigh_tokens = coefficients if function is None else partial(function_coefficients, function)

        def weigh(
            micro: int, _: TrainBatch, logprobs: torch.Tensor, entropies: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, Stat]]:
            columns = mini.columns(micro, logprobs, self._old_is_rollout)
            weights = weigh_tokens(self.objective, columns, mini.denominators, facts=facts, checks=checks)
            policies = logprobs, columns.old_logprobs, columns.rollout_logprobs
            theory = surrogate_metrics(*policies, columns.loss_mask, columns.cu_seqlens)
            if self._old_is_rollout:  # old/mu is 1 then, and not the gap between the engines
                theory = {name: stat for name, stat in theory.items() if not name.startswith("gap/")}
            entropy = Stat.mean(entropies, columns.loss_mask)
            return weights.values, weights.entropy, {**weights.metrics, **theory, "entropy": entropy}

        self.policy.zero_grad()
        is_first_pass = index == 0 and mini.first is None
        route = partial(passes.compared, plan=plan) if is_first_pass else passes.replayed
        options: dict[str, Any] = {"coefficients": weigh, "on_micro_batch": advance and partial(advance, 1)}
        options |= {"checks": checks, "leaves_mistakes": is_first_pass and self.tripwires.judges_routes}
        output = passes.run_pass(self.policy, mini, route(self.policy, mini, checks=checks), **options)
        return replace(output, metrics=passes.replaced_experts(self.policy, mini, output.recording))

    def _facts(self, mini: MiniBatch, has_moved: bool) -> BatchFacts | None:
        """Return what the objective must know of the whole mini-batch, on all ranks, beforehand; None if nothing."""
        beforehand = self.objective.beforehand
        if not beforehand:
            return None
        if mini.first is None and not self._old_is_rollout:
            return BatchFacts.of_equal_policies(self.objective, torch.cuda.current_device())  # theta is theta_old
        if any("theta" in policies for policies in beforehand):
            logprobs = self._current_logprobs(mini, has_moved)
        else:
            logprobs = [] if mini.first is None else mini.first.logprobs
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return None
        indices = range(len(mini.micro_batches))
        columns = [mini.columns(micro, logprobs[micro], self._old_is_rollout) for micro in indices]
        group = parallel_state.get_data_parallel_group()
        return gather_facts(self.objective, columns, partial(distributed.all_sum, group=group))

    def _set_token_advantages(self, minis: list[MiniBatch], judged: Judged | None, is_current: bool) -> list[MiniBatch]:
        """Return mini-batches of whole groups with advantages by token; is_current: of the policy whose weights moved.

        The first one's metrics get mean(log pi - log pi_ref).
        """
        logprobs = [column for mini in minis for column in self._current_logprobs(mini, is_current)]
        assert judged is not None, "the objective computes advantages from rewards"
        minis, drift = passes.token_advantages(self.objective, judged, minis, logprobs)
        if drift is not None:
            metric = {"kl/current" if is_current else "kl/ref": drift}
            minis[0] = replace(minis[0], metrics=merge([minis[0].metrics, metric]))
        return minis

    def _current_logprobs(self, mini: MiniBatch, has_moved: bool) -> list[torch.Tensor]:
        """Return log pi_theta [T] by micro-batch at the weights of the next update: pi_old's unless they moved."""
        return passes.run_pass(self.policy, mini).logprobs if has_moved or mini.first is None else mini.first.logprobs


class Tripwires(StepJudge):
    """``StepJudge`` for the mini-batches of a rank."""

    def judge(self, minis: Sequence[MiniBatch]) -> tuple[list[MiniBatch], bool]:
        """Drop sequences of the mini-batches of a step, each of which had its first pass.

        Returns the mini-batches without the dropped sequences, and whether any rank drops one. A collective call.
        RolloutError if the step is the first after a start and is bad; AgreementError if replay
        found routes that agree too little, and the dropped sequences do not explain them.
        """
        if self.is_off:
            return list(minis), False
        firsts = [mini.first for mini in minis if mini.first is not None]
        mistake = next((str(first.mistake) for first in firsts if first.mistake is not None), None)
        is_suspect = distributed.largest(int(mistake is not None)) > 0
        begin, gaps = _gather(firsts)
        mistakes = distributed.gather_objects(mistake) if is_suspect else []
        drops = self.judge_step(gaps, next(filter(None, mistakes), ""))
        unexplained, judged = None, list[MiniBatch]()
        for mini in minis:
            rows = slice(begin, begin := begin + len(mini.keys))
            unexplained = unexplained or _unexplained(mini, drops.dropped[rows], drops.judged[rows])
            judged.append(mini.without(drops.dropped[rows]))
        judged[0] = replace(judged[0], metrics=merge([judged[0].metrics, drops.metrics()]))
        if is_suspect:
            distributed.fail_together(unexplained, "replay")
        self.announce(drops)
        return judged, bool(drops.dropped.any())


def _unexplained(mini: MiniBatch, dropped: np.ndarray, judged: np.ndarray) -> AgreementError | None:
    """Return what replay found in a mini-batch, unless a sequence is dropped wherever routes agree too little.

    Where no sequence trains any more, nothing is left to explain. dropped, judged: bool [n].
    """
    mistake = None if mini.first is None else mini.first.mistake
    if mistake is None:
        return None
    suspects = [list(mini.micro_batches[index].sequences) for index in mistake.micro_batches]
    trains = judged & ~dropped
    is_explained = all(dropped[rows].any() or not trains[rows].any() for rows in suspects)
    return None if is_explained and (suspects or not trains.any()) else mistake


def _gather(firsts: Sequence[FirstPass]) -> tuple[int, np.ndarray]:
    """Return the first row of this model copy, and the gaps of all copies, float64 [S, COLUMNS]; a collective call."""
    gaps_here = np.concatenate([first.gaps for first in firsts])
    # One rank of a copy speaks for the whole copy, for agreement to the last bit.
    gaps = torch.from_numpy(gaps_here if distributed.holds_outputs() else np.zeros_like(gaps_here))
    gaps = distributed.all_sum(gaps.to(torch.cuda.current_device()), distributed.model_group())
    copies = distributed.all_gather(gaps, parallel_state.get_data_parallel_group())
    return distributed.dp_rank() * len(gaps_here), copies.flatten(0, 1).cpu().numpy()
