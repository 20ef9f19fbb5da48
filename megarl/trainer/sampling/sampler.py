"""Samples and judges the responses of a step, and returns the training data of this rank.

Every rank draws the samples of its ``assignment``. Only rewards, a few numbers per sample, are known on all ranks:
advantages need whole groups, and groups may span ranks.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from megarl.config import Config
from megarl.core.choices.stopping import Uniform
from megarl.core.metrics import Stat
from megarl.core.objectives import Objective
from megarl.core.sampling.collector import Selection
from megarl.data.prompts import Prompt, PromptOrder
from megarl.engines.player import Asker, Draw, Key, Sample
from megarl.engines.protocol import Engine, SamplingParams
from megarl.errors import CheckpointError, MegarlError, refusal
from megarl.megatron import distributed
from megarl.models.fit import wants_routes
from megarl.models.shapes import read_shape
from megarl.routes.turns import provenance_metrics
from megarl.run.progress import Advance
from megarl.trainer.mini_batch import Judged
from megarl.trainer.sampling import assignment, excerpts, requests, step_rollouts, untrained
from megarl.trainer.sampling.allocators import AdaEst, Gvm
from megarl.trainer.sampling.evaluation import draw, pool, read_inputs, score_table
from megarl.trainer.step import TrainStep


@dataclass(frozen=True, slots=True)
class _AssignedStep:
    """A step whose samples are assigned to ranks, and perhaps being drawn in the background."""

    step: int
    position: int
    """The place of the first prompt in the run's order."""
    assignment: assignment.Assignment
    background: requests.BackgroundSampling | None = None


class Sampler:
    """Prompts, engine, environment and reward of a run, on one rank."""

    def __init__(
        self, config: Config, engine: Engine, objective: Objective, train_step: TrainStep | None = None,
        on_finish: Advance | None = None,
    ) -> None:  # fmt: skip
        """``train_step``: for the rule based on the policy, GVM.

        ``on_finish`` is called with numbers of complete responses, and may be called with 0. An error of the callback
        ends the sampling.
        """
        self.config, self.engine, self.objective = config, engine, objective
        self._inputs = read_inputs(config)
        self.warnings = [*self._inputs.warnings()]
        self.tokenizer, self.prompts, self.player = self._inputs.tokenizer, self._inputs.prompts, self._inputs.player
        self.benchmarks, self._stop_tokens = self._inputs.benchmarks, self._inputs.stop_tokens
        self.order = PromptOrder(len(self.prompts), config.run.seed)
        self._shape = read_shape(config.model.path)
        self._position = 0
        """The next prompt in the run's order, with refill. Without refill, the step determines the position."""
        self._ahead: _AssignedStep | None = None
        self._untrained: untrained.Untrained | None = None
        self._under_way: tuple[Draw, requests.BackgroundSampling] | None = None
        """With ``max_staleness``: what servers sample while the trainer trains."""
        self.on_finish = on_finish
        self._allocator: AdaEst | Gvm | None = None
        if config.sampling.rule == "ada_est":
            self._allocator = AdaEst(config, len(self.prompts))
        elif config.sampling.rule == "gvm":
            assert train_step is not None, "gradients are of a policy"
            self._allocator = Gvm(config, train_step, self._step_prompts, self._presample)
        if config.rollout.max_staleness:
            fixed = self._assign(0).assignment
            assert isinstance(fixed, assignment.SequenceAssignment), "other rules are refused"
            self._untrained = untrained.Untrained(config, fixed.prompts)

    def close(self) -> None:
        """End the processes of the rewards."""
        self._inputs.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; plain, and equal on all ranks."""
        estimates = {} if self._allocator is None else self._allocator.state_dict()
        outlasting = {} if self._untrained is None else self._untrained.state_dict()
        return {"position": self._position, "estimates": estimates, **outlasting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``; CheckpointError for the state of an earlier megarl, or of another rule."""
        if "position" not in state or not self.state_dict()["estimates"].keys() <= state["estimates"].keys():
            raise CheckpointError(refusal("state_of_sampler"))
        self._position = int(state["position"])
        if self._allocator is not None:
            self._allocator.load_state_dict(state["estimates"])
        if self._untrained is not None:
            self._untrained.load_state_dict(state, self._position)
        elif (state.get("trained") or {}).get("trained"):
            raise CheckpointError("the run has passed over prompts that must still train: keep rollout.max_staleness")

    def begin_step(self, step: int) -> None:
        """Have the engine sample a step's responses in the background, with its present weights; a collective call.

        ``sample_step`` returns the responses. Until that call the engine's weights must not change.
        """
        assert self._ahead is None, "only one step may be under way"
        assigned = self._assign(step)
        self._ahead = replace(assigned, background=self._begin(self._make_step_draw(assigned), step))

    def settle(self) -> None:
        """Wait until the engine may get new weights, and have the engine prove the weights of the responses; a
        collective call. With ``max_staleness``, unfinished responses are paused.

        If sampling failed, ``sample_step`` raises the error. RolloutError as in ``requests.require_weights``.
        """
        if self._untrained is not None and self._under_way is not None:
            (drawn, background), self._under_way = self._under_way, None
            drawn.pause()
            samples = requests.sample_together(self.engine, partial(background.result, self.on_finish), "sampling")
            samples = {**self._untrained.samples, **samples}
            self._untrained = replace(self._untrained, samples=samples, paused=drawn.unfinished)
        if self._ahead is None or (background := self._ahead.background) is None:
            return
        has_failed = False
        try:
            background.result(self.on_finish)
        except MegarlError:
            has_failed = True
        if not distributed.largest(int(has_failed)):
            requests.require_weights(self.engine)

    def sample_step(self, step: int) -> step_rollouts.StepRollouts:
        """Sample, judge and distribute the responses of a global step; a collective call."""
        assigned, self._ahead = self._ahead or self._assign(step), None
        assert assigned.step == step, f"step {assigned.step} was begun, step {step} is asked for"
        begun, of_window = self._untrained, dict[str, Stat]()
        places = assigned.position + np.arange(self.config.prompts_per_step_at_most)
        drawn = self._make_step_draw(assigned) if begun is None else self._make_window_draw(begun, step)
        sample = partial(drawn.run, self.engine, self._params(step), self.on_finish)
        if assigned.background is not None:
            sample = partial(assigned.background.result, self.on_finish)
        samples = requests.sample_together(self.engine, sample, "sampling")
        if begun is not None:
            samples, places, of_window, begun = begun.take(drawn)
        table = step_rollouts.SampleTable.gather(samples, tuple(self.config.reward.weights))
        selection = step_rollouts.select(assigned.assignment, table, step)
        advantages, trains = step_rollouts.response_advantages(self.config, self.objective, selection, table)
        keys = assigned.assignment.keys_of(selection)
        share = step_rollouts.exchange_rollouts(keys, selection, samples)
        by_token = step_rollouts.process_advantages(self.objective, share, selection, samples)
        metrics = step_rollouts.sampling_metrics(self.config, table, selection) | of_window
        if self.config.rollout.engine_kind.server:
            metrics |= step_rollouts.count_answers(self.engine)
        if rollouts := share.without_dummies(keys):  # empty: no response of this model copy was selected
            metrics |= provenance_metrics(rollouts, trainer_version=step)
        # Update persistent state last: a failed step then leaves the previous checkpoint valid.
        metrics |= self._update_estimates(step, selection)
        # The next step begins behind the last training prompt, or behind all prompts if too few train. Spare prompts
        # come again: their number depends on timing, and the training data must not.
        is_full = len(selection.pools) == self.config.rollout.prompts_per_step
        used = selection.pools[-1].prompt + 1 if is_full else self.config.prompts_per_step_at_most
        self._position = assigned.position + used
        self._untrained = begun
        return step_rollouts.StepRollouts(
            share.mask_unless(trains),
            by_token or [np.append(advantages, 0.0)[rows] for rows in share.rows],
            Judged(np.append(selection.rewards, 0.0), np.append(selection.prompts, -1), share.rows),
            metrics,
            table.describe_unjudged(),
            places,
            np.stack([places[selection.prompts], selection.samples], 1)[trains],
            self._excerpts(step, samples, places, table.failed),
        )

    def go_on(self, step: int) -> None:
        """Have the servers go on with the responses of later steps during training, until ``settle``."""
        assert self._untrained is not None
        drawn = self._make_window_draw(self._untrained, step, ends=False)
        self._under_way = drawn, self._begin(drawn, step)

    def _begin(self, draw: Draw, step: int) -> requests.BackgroundSampling:
        params = self._params(step)
        return requests.BackgroundSampling(lambda on_finish: draw.run(self.engine, params, on_finish))

    def _excerpts(
        self, step: int, samples: Mapping[Key, Sample], places: np.ndarray, failed: Key | None
    ) -> dict[Key, excerpts.Excerpt]:
        count = self.config.log.samples_per_step
        keys = excerpts.choose([*samples], count, step) if count == "all" or distributed.is_main_rank() else []
        if count and failed is not None and failed in samples and failed not in keys:
            keys = sorted([*keys, failed])
        names = tuple(self.config.reward.weights)
        described = partial(excerpts.describe, tokenizer=self.tokenizer, names=names)
        return {key: described(samples[key], self._prompt_at(places[key[0]])) for key in keys}

    def evaluate(self) -> tuple[dict[str, float], str | None]:
        """Return mean reward, pass rate and length on every benchmark, and their averages; a collective call.

        The second value counts the responses with a reward by benchmark, and names the first failure; None if all have
        a reward. Prompts get ``eval.samples`` responses. An average weighs benchmarks by prompts.
        """
        metrics_of: dict[str, dict[str, float]] = {}
        unjudged: list[str] = []
        counts = getattr(self.engine, "answer_counts", {})  # an engine of the user's own need not count
        of_training = dict(counts)
        for name, benchmark in self.benchmarks.items():
            number, stop_tokens = self.config.eval.samples, self._stop_tokens
            samples = draw(self.config, self.engine, benchmark, number, stop_tokens, self.on_finish)
            table = step_rollouts.SampleTable.gather(samples)
            metrics_of[name] = score_table(table, benchmark)
            if note := table.describe_unjudged():
                unjudged.append(f"{name}: {note}")
        if isinstance(counts, MutableMapping):  # the next step counts the answers of training alone
            counts.clear()
            counts.update(of_training)
        num_prompts = [len(benchmark.prompts) for benchmark in self.benchmarks.values()]
        return pool(metrics_of, num_prompts), "; ".join(unjudged) or None

    def _assign(self, step: int) -> _AssignedStep:
        """Assign the samples of a step to ranks; a collective call for allocating rules."""
        config, sampling, number = self.config, self.config.sampling, self.config.rollout.prompts_per_step
        position = self._position if sampling.refill else step * number
        of_copy, group = (distributed.dp_rank(), distributed.dp_size()), distributed.model_group()
        sizes = number, config.train.mini_batches, assignment.RankCoordinates(*of_copy, group.rank(), group.size())
        if self._allocator is None:
            rule = sampling.rule_of(config.rollout.group_size, config.reward.threshold)
            if sampling.fixed:
                assert isinstance(rule, Uniform)
                return _AssignedStep(step, position, assignment.SequenceAssignment(rule, *sizes))
        else:
            rule = self._allocator.allot(step, self._step_prompts(step))
        limit = config.prompts_per_step_at_most if sampling.refill else None
        seed = requests.sampling_seed(config.run.seed, requests.KEEP, step, 0, 0) if sampling.keep == "random" else None
        prompts = assignment.PromptAssignment(rule, *sizes, max_prompts=limit, spare=sampling.spare, seed=seed)
        return _AssignedStep(step, position, prompts)

    def _presample(self, step: int, keys: Sequence[Key]) -> dict[Key, Sample]:
        """Draw given samples of a step's prompts, with separate seeds."""
        draw = self._make_draw(assignment.FixedSamples(keys), self._step_prompts(step), requests.PRESAMPLE, step)
        replayed = self.config.train.replay == "r3"  # the routes have no further use
        params = requests.train_params(self.config, self._stop_tokens, routes=replayed)
        return requests.sample_together(self.engine, partial(draw.run, self.engine, params, self.on_finish), "sampling")

    def _params(self, step: int) -> SamplingParams:
        partial_rollouts, config = self._untrained is not None, self.config
        # A response of several steps has routes in all parts, or in none.
        routes = wants_routes(config, self._shape, None if partial_rollouts else step + 1)
        params = requests.train_params(config, self._stop_tokens, routes)
        return replace(params, segment_tokens=-(-params.max_response_tokens // 8)) if partial_rollouts else params

    def _step_prompts(self, step: int) -> Sequence[Prompt]:
        """The prompts of a step without refill."""
        number = self.config.rollout.prompts_per_step
        return [self.prompts[index] for index in self.order.take(step * number, number)]

    def _make_step_draw(self, assigned: _AssignedStep) -> Draw:
        positions = self.order.take(assigned.position, self.config.prompts_per_step_at_most)
        prompts = [self.prompts[index] for index in positions]
        return self._make_draw(assigned.assignment.asker(), prompts, requests.TRAIN, assigned.step)

    def _make_draw(self, asker: Asker, prompts: Sequence[Prompt], purpose: int, step: int) -> Draw:
        request_of = requests.make_requests(self.config.run.seed, purpose, step, prompts.__getitem__)
        return Draw(asker, request_of, self.player)

    def _make_window_draw(self, begun: untrained.Untrained, step: int, *, ends: bool = True) -> Draw:
        """Return the draw of prompts that are numbered by place: seeds are of (0, place), in any step."""
        request_of = requests.make_requests(self.config.run.seed, requests.TRAIN, 0, self._prompt_at)
        return Draw(begun.asker(step, ends=ends), request_of, self.player, begun.paused)

    def _prompt_at(self, place: int) -> Prompt:
        return self.prompts[int(self.order.take(int(place), 1)[0])]

    def _update_estimates(self, step: int, selection: Selection) -> dict[str, Stat]:
        """Give the allocator the outcomes by prompt; a collective call."""
        if self._allocator is None:
            return {}
        prompts = self._step_prompts(step)
        samples, positives = np.zeros((2, len(prompts)), dtype=np.int64)
        number, _, num_judged, num_positive = selection.drawn
        samples[number], positives[number] = num_judged, num_positive
        return self._allocator.learn(prompts, samples, positives)
