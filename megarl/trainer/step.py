"""The training half of a step: passes without updates, then N optimizer steps.

Each update is: replay, forward, coefficients, backward, optimizer step. The three replay modes differ only in where the
routes come from: nowhere ("none"), the old-log-prob pass ("r2"), or the rollouts ("r3").
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from megarl.config import Config
from megarl.core.devices import to_device
from megarl.core.measures import mismatch_metrics, surrogate_metrics
from megarl.core.metrics import Stat, merge
from megarl.core.objectives import BatchFacts, Objective, coefficients, function_coefficients, gather_facts
from megarl.core.objectives.columns import Denominators
from megarl.core.packing import has_routes, pack
from megarl.core.types import Rollout, TrainBatch
from megarl.errors import AgreementError, MegarlError, ReplayError, RolloutError
from megarl.megatron import distributed
from megarl.megatron.frozen import Reference
from megarl.megatron.passes import forward
from megarl.megatron.policy import Policy
from megarl.megatron.rollout_routes import check_rollouts, deliver_routes, gather_shared
from megarl.models.fit import watches_routes
from megarl.replay import Recording
from megarl.routes import Disagreement
from megarl.run.progress import Advance
from megarl.trainer.mini_batch import Judged, MiniBatch, check_missing_rows, over_ranks, split
from megarl.trainer.token_advantages import set_token_advantages
from megarl.trainer.tripwires import Tripwires
from megarl.watch.tripwires import COLUMNS, count_flips, count_k3


class TrainStep:
    """Trains a policy on the rollouts of a step."""

    def __init__(self, config: Config, policy: Policy, objective: Objective) -> None:
        self.config, self.policy, self.objective = config, policy, objective
        self._function = config.train.objective_function
        """The user's own coefficients, in place of the objective's."""
        self.reference = Reference(policy, config.reference_path) if objective.needs_ref_logprobs else None
        watched = watches_routes(config, policy.shape)
        self.tripwires = Tripwires(config.train.model_copy(update={} if watched else {"max_native_flip": "off"}))
        self.keeps_native_routes = self.measures_replay_bias = False
        self.measures_objective = True
        self._updates = 0

    @property
    def needs_token_advantages(self) -> bool:
        """Whether advantages are computed from old and reference log-probabilities."""
        return self.objective.advantage == "token_level_kl"

    def old_pass_over(self, minis: Sequence[MiniBatch]) -> Sequence[MiniBatch]:
        """Return the mini-batches of a step with an old-log-prob pass before the first update.

        See ``Config.old_passes``. If the step measures the replay bias of r2, it has to be 0 in the first one.
        """
        needs_all = self.measures_replay_bias and self.config.train.replay == "r2"
        return minis if needs_all else minis[len(minis) - self.config.old_passes :]

    def prepare(self, rollouts: Sequence[Rollout], advantages: np.ndarray | Sequence[np.ndarray]) -> MiniBatch:
        """Check, pack and split this rank's rollouts of one mini-batch, and fetch its rows of their routes.

        A collective call. Each rollout has its routes on at least one rank of the model copy. TraceError if
        routes are not of this model, or if replay is "r3" and routes are absent or too many rows are missing.
        """
        config, replay, shape = self.config, self.policy.replay, self.policy.shape
        r3 = config.train.replay == "r3"
        recorded = all(map(has_routes, rollouts))

        def check_and_pack() -> TrainBatch:
            if not rollouts:
                raise RolloutError(
                    "this rank has no sequence of the mini-batch, expected one or more on every data-parallel rank; "
                    "lower train.mini_batches or raise rollout.prompts_per_step"
                )
            if r3 or recorded:
                check_rollouts(rollouts, shape)
            batch = pack(rollouts, advantages, routes=False)
            if r3:
                check_missing_rows(batch, config.train.max_missing_rows)
            return batch

        batch = distributed.run_together("the check of rollouts", check_and_pack)
        micro_batches = split(config, batch)
        denominators = Denominators.of(batch.loss_mask, batch.cu_seqlens, batch.rollout_logprobs)
        gaps = np.zeros((len(rollouts), COLUMNS))
        gaps[:, :2] = [(rollout.group, rollout.sample) for rollout in rollouts]
        bypassed = config.train.old_logprobs == "rollout"
        mini = MiniBatch(
            micro_batches, over_ranks(denominators), gaps, old_updates=self._updates, old_is_rollout=bypassed
        )
        if replay is not None and recorded:
            mini.rollout_routes = deliver_routes(rollouts, micro_batches, replay.layers, shape)
        if r3:
            mini.routes = mini.rollout_routes
        return mini

    def old_logprobs(self, mini: MiniBatch) -> None:
        """Run the old-log-prob pass over one mini-batch; r2 records its routes here."""
        with self._context(mini) as seen:
            outputs = self._run(mini)
        self._compare_engines(mini, outputs, seen)

    def ref_logprobs(self, mini: MiniBatch) -> None:
        """Run the reference policy over one mini-batch. It routes natively unless it replays the policy's routes."""
        assert self.reference is not None, "the objective has no reference"
        replay, block = self.reference.replay, nullcontext()
        if replay is not None:
            assert mini.routes is not None, "routes are known before this pass"
            routes = Recording(mini.routes)  # not checked again, as in ``_block``
            block = self._context(mini, replay.replay(routes, min_agreement=0.0))
        with block:
            mini.ref_logprobs = self.reference.logprobs(mini.micro_batches)

    def token_advantages(self, minis: Sequence[MiniBatch], judged: Judged) -> None:
        """Compute the advantages of tokens in whole groups, after both passes or at moved weights; collective."""
        moved = self._updates != minis[0].old_updates
        logprobs = [column for mini in minis for column in self._current_logprobs(mini)]
        set_token_advantages(self.objective, judged, minis, logprobs, "kl/current" if moved else "kl/ref")

    def update(
        self, mini: MiniBatch, on_micro_batch: Advance | None = None, following: Sequence[MiniBatch] = ()
    ) -> dict[str, Stat]:
        """Take one optimizer step; return the statistics of its mini-batch on this rank.

        following: the mini-batches of the step whose updates come after this one, before the weights are read.

        If this is the first pass over the mini-batch, the tripwires judge the step before the optimizer moves a weight:
        this mini-batch, and those following ones that had a pass. If they drop sequences, the gradients are computed
        again without them.
        """
        is_first_pass = self._is_first_pass(mini)
        biases = self.policy.expert_biases() if is_first_pass else []
        before = [bias.clone() for bias in biases]
        if mini.judged is not None and self._updates != mini.old_updates:
            self.token_advantages([mini], mini.judged)
        native, flips = self._route_natively(mini)
        outputs = self._backward(mini, on_micro_batch, native)
        passed = (other for other in following if other.old_logprobs is not None)
        if is_first_pass and self.tripwires.judge([mini, *passed]):
            for bias, value in zip(biases, before, strict=True):
                bias.copy_(value)  # the pass has moved it, and the second one does so again
            outputs = self._backward(mini, compare_with=native)
        norm, lr = self.policy.optimizer_step(more_follow=bool(following))
        self._updates += 1
        alike = Stat.means_of({"grad_norm": (norm, 1.0), "lr": (lr, 1.0)})
        return merge([alike, flips, *mini.replay_bias(outputs, native or ()), *(output.metrics for output in outputs)])

    def _route_natively(self, mini: MiniBatch) -> tuple[list[forward.MicroOutput] | None, dict[str, Stat]]:
        """In a step that measures the replay bias, a pass with the routers' own choice, compared layer by layer."""
        replay = self.policy.replay
        if not self.measures_replay_bias or replay is None or mini.routes is None:
            return None, {}
        with self._context(mini, replay.record(keep=False, compared=mini.routes)) as seen:
            outputs = self._run(mini, keep_hidden=True)
        shared = np.concatenate(gather_shared([seen.shared], mini.micro_batches, replay.layers))
        return outputs, Disagreement.of(shared[..., 0], self.policy.shape.topk).stats("replay_bias")

    def _backward(
        self,
        mini: MiniBatch,
        on_micro_batch: Advance | None = None,
        compare_with: list[forward.MicroOutput] | None = None,
    ) -> list[forward.MicroOutput]:
        """Leave the gradients of a mini-batch in the model. In the first pass over it, compare the engines."""
        is_first_pass = self._is_first_pass(mini)
        facts = self._facts(mini)

        def weigh(
            index: int, batch: TrainBatch, logprobs: torch.Tensor, entropies: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, Stat]]:
            columns = mini.columns(index, batch, logprobs)
            weigh_tokens = coefficients if self._function is None else partial(function_coefficients, self._function)
            detailed = self.measures_objective
            found = weigh_tokens(self.objective, columns, mini.denominators, facts=facts, detailed=detailed)
            mask, bounds = columns.loss_mask, columns.cu_seqlens
            policies = logprobs, columns.old_logprobs, columns.rollout_logprobs
            theory = surrogate_metrics(*policies, mask, bounds) if detailed else {}
            if mini.old_is_rollout:  # old/mu is 1 then, and not the gap between the engines
                theory = {name: stat for name, stat in theory.items() if not name.startswith("gap/")}
            return found.values, found.entropy, {**found.metrics, **theory, "entropy": Stat.mean(entropies, mask)}

        self.policy.zero_grad()
        with self._context(mini) as seen:
            outputs = self._run(mini, weigh, on_micro_batch, compare_with=compare_with)
        if is_first_pass:
            self._compare_engines(mini, outputs, seen)
        return outputs

    def _facts(self, mini: MiniBatch) -> BatchFacts | None:
        """What the objective must know of the whole mini-batch, on all ranks, before it is weighed; None if nothing."""
        beforehand = self.objective.beforehand
        if not beforehand:
            return None
        if mini.old_logprobs is None and not mini.old_is_rollout:
            return BatchFacts.of_equal_policies(self.objective, torch.cuda.current_device())  # theta is theta_old
        moving = any("theta" in policies for policies in beforehand)
        logprobs = self._current_logprobs(mini) if moving else mini.old_logprobs or []
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return None
        columns = [mini.columns(index, micro.batch, logprobs[index]) for index, micro in enumerate(mini.micro_batches)]
        group = parallel_state.get_data_parallel_group()
        return gather_facts(self.objective, columns, partial(distributed.all_sum, group=group))

    def _current_logprobs(self, mini: MiniBatch) -> list[torch.Tensor]:
        """log pi_theta as the next update will find it; as ``MiniBatch.old_logprobs``, and these if nothing moved."""
        if mini.old_logprobs is not None and self._updates == mini.old_updates:
            return mini.old_logprobs
        with self._context(mini):
            return [output.logprobs for output in self._run(mini)]

    def _run(
        self,
        mini: MiniBatch,
        weigh: forward.CoefficientFn | None = None,
        on_micro_batch: Advance | None = None,
        **compared: Any,
    ) -> list[forward.MicroOutput]:
        return forward.run(
            self.policy.chunks,
            mini.micro_batches,
            temperature=self.config.rollout.temperature,
            vocab_size=self.policy.shape.vocab_size,
            coefficients=weigh,
            on_micro_batch=None if on_micro_batch is None else lambda: on_micro_batch(1),
            **compared,
        )

    @contextmanager
    def _context(self, mini: MiniBatch, block: AbstractContextManager[Recording] | None = None) -> Iterator[Recording]:
        """Replay or record during a pass over a mini-batch. An error at its end is raised on all ranks; collective.

        Routes that agree too little are left to the tripwires, which know the sequences.
        """
        failure: MegarlError | None = None
        ran = False
        try:
            with block or self._block(mini) as seen:
                yield seen
                ran = True
        except ReplayError as error:
            if not ran:  # in the middle of the pass, other ranks are in another collective call
                raise
            if isinstance(error, AgreementError) and self.tripwires.judges_routes:
                mini.mistake = error
            else:
                failure = error
        if self.policy.replay is not None:
            distributed.fail_together(failure, "replay")

    def _block(self, mini: MiniBatch) -> AbstractContextManager[Recording]:
        """Replay if there are routes; in the first pass over a mini-batch, compare the routers with the rollout."""
        replay, first_pass = self.policy.replay, self._is_first_pass(mini)
        if replay is None:
            return nullcontext(Recording())
        compared = mini.rollout_routes if first_pass else None
        if mini.routes is not None:
            observe, min_agreement = first_pass and self.keeps_native_routes, None if first_pass else 0.0
            routes = Recording(mini.routes)  # not checked again: the routers' own, or rows that passed ``prepare``
            return replay.replay(routes, observe, routes if compared is mini.routes else compared, min_agreement)
        if not first_pass:
            return nullcontext(Recording())
        return replay.record(keep=self.config.train.replay == "r2" or self.keeps_native_routes, compared=compared)

    def _is_first_pass(self, mini: MiniBatch) -> bool:
        """Whether the next pass over the mini-batch is its first, and compares the engines.

        Without an old-log-prob pass only the first update of a step does: later ones find weights that have moved.
        """
        moved = self._updates != mini.old_updates
        return mini.old_logprobs is None and not (mini.old_is_rollout and moved)

    def _compare_engines(self, mini: MiniBatch, outputs: Sequence[forward.MicroOutput], seen: Recording) -> None:
        """Compare the rollout with the first pass over a mini-batch; keep its log-probabilities and, for r2, routes."""
        mini.old_logprobs, mini.old_updates = [output.logprobs for output in outputs], self._updates
        metrics, counts = [mini.metrics], []
        for micro, output in zip(mini.micro_batches, outputs, strict=False):  # no outputs on other pipeline stages
            batch, device = micro.batch, output.logprobs.device
            columns = (batch.rollout_logprobs, batch.loss_mask, batch.cu_seqlens)
            given = output.logprobs, *(to_device(column, device) for column in columns)
            metrics += [mismatch_metrics(*given), {"rollout/entropy": Stat.mean(output.entropies, given[2])}]
            counts.append(count_k3(*given))
        mini.metrics = merge(metrics)
        if counts:
            order = [sequence for micro in mini.micro_batches for sequence in micro.sequences]
            mini.gaps[order, 2:5] = torch.cat(counts).cpu()
        self._routing_metrics(mini, seen, replayed=mini.routes is not None)
        if self.config.train.replay == "r2":
            mini.routes = seen.routes

    def _routing_metrics(self, mini: MiniBatch, seen: Recording, replayed: bool) -> None:
        """Compare the rollout's routes with those used here, and with those that the routers choose by themselves."""
        if self.policy.replay is None or mini.rollout_routes is None:
            return
        layers, shape = self.policy.replay.layers, self.policy.shape
        if self.keeps_native_routes:
            own = seen.native if replayed else seen.routes
            mini.native_routes = own if layers else mini.rollout_routes
        both = (seen.shared, seen.native_shared)[: 1 + replayed]
        shared = gather_shared(both, mini.micro_batches, layers)
        together = np.concatenate(shared)
        stats = (
            Disagreement.of(together[..., column], shape.topk).stats(prefix)
            for prefix, column in (("router", 0), ("router/native", -1))
        )
        mini.metrics = merge([mini.metrics, *stats])
        for micro, of_micro in zip(mini.micro_batches, shared, strict=True):
            mini.gaps[list(micro.sequences), 5:] = count_flips(of_micro[..., -1], shape.topk, micro.batch)


def collect(parts: Sequence[dict[str, Stat]]) -> dict[str, Stat] | None:
    """Merge statistics of this rank and gather them on the main rank."""
    return distributed.collect_metrics(merge(parts))
