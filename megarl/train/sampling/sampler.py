"""The sampling half of a step: which responses this rank draws, their rewards, and who trains on them.

``megarl.train.sampling.assignment`` says who draws and trains what. The ranks of one model copy exchange the rollouts
that they train on, but not the routes, of which every rank needs other rows: those stay on the rank that drew them
until the step is cut into micro-batches. Only rewards, a few numbers each, are known everywhere: advantages need whole
groups, which may span ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megarl.config import Config
from megarl.core.choices.credit import Credit
from megarl.core.choices.parts import TOKEN_ADVANTAGES
from megarl.core.choices.stopping import Allotted, SamplingRule, Uniform
from megarl.core.diagnostics import effective_prompt_ratio
from megarl.core.metrics import Stat
from megarl.core.objectives import Objective, selected_responses, sequence_advantages, step_advantages
from megarl.core.packing import without_routes
from megarl.core.routing.provenance import provenance_metrics, refuse_mixed_versions
from megarl.core.sampling.collector import Selection
from megarl.core.sampling.credit_assignment import assign
from megarl.core.types import Rollout, SampleRequest
from megarl.data.judge import Judge
from megarl.data.prompts import Prompt, PromptOrder, load_prompts
from megarl.errors import CheckpointError, ConfigError, MegarlError, RolloutError
from megarl.megatron import distributed
from megarl.rollout.draw import Asker, Draw
from megarl.rollout.engine import Engine, SamplingParams
from megarl.rollout.player import Sample
from megarl.run.progress import Advance
from megarl.train.environments import make_player, turn_ends
from megarl.train.sampling.allotment import AdaEst, Allotment, Gvm
from megarl.train.sampling.assignment import (
    Assignment,
    FixedSamples,
    Key,
    PromptAssignment,
    RankCoordinates,
    Refill,
    SequenceAssignment,
)
from megarl.train.sampling.background import BackgroundSampling
from megarl.train.sampling.sample_table import SampleTable
from megarl.train.step import TrainStep
from megarl.train.token_advantages import Judged

TRAIN, EVALUATE, PRESAMPLE, KEEP = 0, 1, 2, 3
"""Purposes of a sampling seed, so that evaluation never repeats the noise of training."""


Steps = tuple[tuple[int, float], ...]
"""See ``Sample.steps``."""
Dealt = list[list[tuple[Rollout, int]]]
"""The sequences of a model copy by mini-batch: rollout, and row of the selection, or its length for none."""


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """What one data-parallel rank trains on in a global step."""

    mini_batches: list[list[Rollout]]
    """One list of rollouts per mini-batch, in the order of the sequences; equally long on all ranks."""
    advantages: list[np.ndarray] | list[list[np.ndarray]]
    """By mini-batch, float64: one per rollout, or by rollout one per token (process rewards); 0 where the objective's
    take a pass."""
    judged: Judged
    """What such an objective needs besides."""
    metrics: dict[str, Stat]
    """Rewards are over the whole step and on every rank alike; the rest is of this rank's rollouts."""
    first_error: str | None
    """Of a reward or an environment, on this rank."""
    trained: list[Key]
    """All that trains, on any rank: (place of the prompt in the run's order, sample). No two steps share one."""

    @property
    def weights(self) -> int:
        """How many steps the oldest weights had seen that drew any of this rank's rollouts."""
        return min(int(rollout.weight_versions.min()) for part in self.mini_batches for rollout in part)

    def drop_routes(self) -> None:
        """Let go of the traces, once every rank has its rows of them."""
        for part in self.mini_batches:
            part[:] = [without_routes(rollout) for rollout in part]


def sampling_seed(run_seed: int, purpose: int, step: int, group: int, sample: int) -> int:
    """One seed per response of a run, the same on whatever rank it is drawn."""
    words = np.random.SeedSequence([run_seed, purpose, step, group, sample]).generate_state(1, np.uint64)
    return int(words[0])


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step's plan, and the drawing under way if it is one step ahead."""

    step: int
    position: int
    assignment: Assignment
    drawing: BackgroundSampling[dict[Key, Sample]] | None = None


class Sampler:
    """Prompts, engine, environment and reward of a run, on one rank."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        objective: Objective,
        train_step: TrainStep | None = None,
        while_waiting: Advance | None = None,
    ) -> None:
        """``train_step``: for rules that look at the policy, a value head's and GVM's. ``while_waiting`` is called with
        responses that no caller counts, and may be with 0; what it raises ends the sampling."""
        self.config = config
        self.engine = engine
        self.objective = objective
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(config.model.path)
        data = config.data
        self.prompts = self._load(data.train, data.split, None)
        self.heldout: list[Prompt] = []
        if data.heldout is not None:
            self.heldout = self._load(data.heldout, data.resolved_heldout_split, config.eval.max_prompts)
        self.order = PromptOrder(len(self.prompts), config.run.seed)
        self.judge = Judge(config.reward.function, workers=config.reward.workers, timeout_s=config.reward.timeout_s)
        self.player = make_player(config, self.tokenizer, self.judge)
        self.stop_tokens = turn_ends(config, self.tokenizer)
        self._position = 0
        """Where the order of prompts stands, with refill; else it follows from the step."""
        self._ahead: _Begun | None = None
        self._while_waiting = while_waiting
        self._allotment = self._make_allotment(train_step)

    def close(self) -> None:
        """End the processes of the reward."""
        self.judge.close()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of sampling; plain, and equal on all ranks."""
        estimates = {} if self._allotment is None else self._allotment.state_dict()
        return {"position": self._position, "estimates": estimates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``."""
        if "position" not in state:
            raise CheckpointError(
                "the checkpoint says nothing of sampling: it is of an earlier megarl; begin a new run"
            )
        self._position = int(state["position"])
        if self._allotment is not None:
            self._allotment.load_state_dict(state["estimates"])

    def begin_step(self, step: int) -> None:
        """Have the engine sample a step's responses in the background, with the weights that it has now; collective.

        ``sample_step`` of the same step takes them; until then the engine's weights must stay.
        """
        assert self._ahead is None, "one step ahead is all there is"
        begun = self._begun(step)
        draw, params = self._draw(begun), self._params(self.config.rollout.temperature, routes=True)
        self._ahead = replace(
            begun, drawing=BackgroundSampling(lambda on_finish: self._conversed(draw, params, on_finish))
        )

    def settle(self) -> None:
        """Wait until the engine is at rest; an error is kept for ``sample_step``."""
        if self._ahead is not None and self._ahead.drawing is not None:
            with suppress(MegarlError):
                self._ahead.drawing.result(self._while_waiting)

    def sample_step(self, step: int, on_finish: Advance | None = None) -> StepRollouts:
        """Draw the responses of a global step, judge them, and deal them out; a collective call."""
        begun, self._ahead = self._ahead or self._begun(step), None
        assert begun.step == step, f"step {begun.step} was begun, step {step} is asked for"
        params = self._params(self.config.rollout.temperature, routes=True)
        samples = self._together(
            (lambda: begun.drawing.result(on_finish))
            if begun.drawing is not None
            else (lambda: self._conversed(self._draw(begun), params, on_finish))
        )
        drawn = SampleTable.gather(samples)
        error = next(filter(None, (s.reward_error or s.episode_error for s in samples.values())), None)
        if not drawn.is_judged.any():
            raise RolloutError(f"step {step}: no response has a reward; first: {error}")
        selection = begun.assignment.select(drawn.rewards())
        if not len(selection.prompts):
            raise RolloutError(
                f"step {step}: none of {int(selection.drawn.shape[1])} prompts had rewards that differ: take other "
                "prompts, raise sampling.max_prompts or rollout.group_size, or set sampling.refill = false"
            )
        advantages, counted = self._advantages(selection)
        own = begun.assignment.own_keys(selection)
        dealt = _deal_out(own, selection, samples)
        trains = np.append(counted, False)
        rows = [[row for _, row in part] for part in dealt]
        wanted = {key for part in own for key in part}
        by_key = {(rollout.group, rollout.sample): rollout for part in dealt for rollout, _ in part}
        present = [rollout for key, rollout in by_key.items() if key in wanted]  # no place holder
        by_token = self._by_token(dealt, selection, samples)
        # What lasts beyond the step changes last: if the step fails, a checkpoint of the one before is to be right.
        metrics = self._metrics(drawn, selection, counted) | self._learn(step, selection)
        self._move_on(begun, selection)
        used = [
            (begun.position + prompt, sample)
            for (prompt, sample), it in zip(selection.keys, counted, strict=True)
            if it
        ]
        return StepRollouts(
            [[_counted(rollout, bool(trains[row])) for rollout, row in part] for part in dealt],
            by_token or [np.append(advantages, 0.0)[part] for part in rows],
            Judged(np.append(selection.rewards, 0.0), np.append(selection.prompts, -1), rows),
            metrics | _rollout_metrics(present, trainer_version=step),
            error,
            used,
        )

    def evaluate(self, step: int, on_finish: Advance | None = None) -> dict[str, float]:
        """Mean reward, pass rate and length on held-out prompts, ``eval.samples`` responses each; a collective call.

        The seeds do not depend on the step, so that a change of the figures is a change of the weights.
        """
        samples = self.config.eval.samples
        total = len(self.heldout) * samples
        mine = [divmod(s, samples) for s in range(dist.get_rank(), total, dist.get_world_size())]
        params = self._params(self.config.eval.temperature, routes=False)
        draw = self._drawing_of(FixedSamples(mine), lambda number: self.heldout[number], EVALUATE, 0)
        drawn = SampleTable.gather(self._together(lambda: self._conversed(draw, params, on_finish)))
        if not drawn.is_judged.any():
            raise RolloutError(f"evaluation at step {step}: no response has a reward")
        judged = drawn.column("reward")[drawn.is_judged]
        return {
            "eval/reward": float(judged.mean()),
            "eval/pass_rate": float((judged > self.config.reward.threshold).mean()),
            "eval/length_mean": float(drawn.column("generated").mean()),
            "eval/responses": float(len(judged)),
            "eval/reward_errors": float(total - len(judged)),
        }

    def _load(self, source: str, split: str | None, limit: int | None) -> list[Prompt]:
        data = self.config.data
        return load_prompts(
            source,
            tokenizer=self.tokenizer,
            prompt_field=data.prompt_field,
            answer_field=data.answer_field,
            chat_template=data.chat_template,
            max_prompt_tokens=data.max_prompt_tokens,
            split=split,
            limit=limit,
        )

    def _params(self, temperature: float, routes: bool) -> SamplingParams:
        rollout = self.config.rollout
        params = SamplingParams(
            temperature=temperature,
            top_p=rollout.top_p,
            max_response_tokens=rollout.max_response_tokens,
            stop_token_ids=self.stop_tokens,
            return_routed_experts=routes,
        )
        if routes:
            params.require_stochastic()
        return params

    def _begun(self, step: int) -> _Begun:
        """The plan of a step; a collective call where counts are allotted."""
        sampling, number = self.config.sampling, self.config.rollout.prompts_per_step
        position = self._position if sampling.refill else step * number
        place = rank_coordinates()
        mini_batches, threshold = self.config.train.mini_batches, self.config.reward.threshold
        if self._allotment is not None:
            counts = self._allotment.counts(step, self._step_prompts(step))
            rule: SamplingRule = Allotted(tuple(counts.tolist()), threshold=threshold)
            return _Begun(step, position, PromptAssignment(rule, number, mini_batches, place))
        rule = sampling.rule_of(self.config.rollout.group_size, threshold)
        if sampling.fixed:
            assert isinstance(rule, Uniform)
            return _Begun(step, position, SequenceAssignment(rule, number, mini_batches, place))
        refill = Refill(self.config.prompts_per_step_at_most, sampling.spare) if sampling.refill else None
        seed = sampling_seed(self.config.run.seed, KEEP, step, 0, 0) if sampling.keep == "random" else None
        return _Begun(step, position, PromptAssignment(rule, number, mini_batches, place, refill=refill, seed=seed))

    def _make_allotment(self, train_step: TrainStep | None) -> Allotment | None:
        if self.config.sampling.rule == "ada_est":
            return AdaEst(self.config, len(self.prompts), train_step)
        if self.config.sampling.rule == "gvm":
            assert train_step is not None, "gradients are of a policy"
            return Gvm(self.config, train_step, self._step_prompts, self._presampled)
        return None

    def _presampled(self, step: int, keys: Sequence[Key]) -> dict[Key, Sample]:
        """Given samples of a step's prompts, with noise of their own."""
        prompts = self._step_prompts(step)
        draw = self._drawing_of(FixedSamples(keys), lambda number: prompts[number], PRESAMPLE, step)
        params = self._params(self.config.rollout.temperature, routes=True)
        return self._together(lambda: self._conversed(draw, params, self._while_waiting))

    def _step_prompts(self, step: int) -> list[Prompt]:
        """The prompts of a step that replaces none."""
        number = self.config.rollout.prompts_per_step
        return [self.prompts[i] for i in self.order.take(step * number, number)]

    def _draw(self, begun: _Begun) -> Draw:
        most = self.config.prompts_per_step_at_most
        prompts = [self.prompts[i] for i in self.order.take(begun.position, most)]
        return self._drawing_of(begun.assignment.asker(), lambda number: prompts[number], TRAIN, begun.step)

    def _drawing_of(self, asker: Asker, prompt_of: Callable[[int], Prompt], purpose: int, step: int) -> Draw:
        def request_of(number: int, sample: int) -> tuple[SampleRequest, Prompt]:
            prompt = prompt_of(number)
            seed = sampling_seed(self.config.run.seed, purpose, step, number, sample)
            return SampleRequest(prompt.tokens, group=number, sample=sample, seed=seed), prompt

        return Draw(asker, request_of, self.player)

    def _conversed(self, draw: Draw, params: SamplingParams, on_finish: Advance | None) -> dict[Key, Sample]:
        self.engine.converse(draw.begin, params, on_finish)
        return draw.samples

    def _together(self, draw: Callable[[], dict[Key, Sample]]) -> dict[Key, Sample]:
        """This rank's samples; an error on one rank is one on all, so that none waits."""
        failure: MegarlError | None = None
        samples: dict[Key, Sample] = {}
        try:
            samples = draw()
            if self.config.train.mixed_versions == "refuse":
                refuse_mixed_versions([s.rollout for s in samples.values() if s.rollout is not None])
        except MegarlError as error:
            failure = error
        distributed.fail_together(failure, "sampling")
        return samples

    def _move_on(self, begun: _Begun, selection: Selection) -> None:
        """The next step begins behind the last prompt that trains, or behind all where there were too few.

        Spare prompts that were not needed come again: how many of them were drawn depends on timing, and what a run
        trains on must not.
        """
        full = len(selection.pools) == self.config.rollout.prompts_per_step
        used = selection.pools[-1].prompt + 1 if full else self.config.prompts_per_step_at_most
        self._position = begun.position + used

    def _learn(self, step: int, selection: Selection) -> dict[str, Stat]:
        """Let estimates take in what was drawn of each prompt; a collective call."""
        if self._allotment is None:
            return {}
        prompts = self._step_prompts(step)
        samples, positives = np.zeros((2, len(prompts)), dtype=np.int64)
        number, _, judged, good = selection.drawn
        samples[number], positives[number] = judged, good
        return self._allotment.learn(prompts, samples, positives)

    def _advantages(self, selection: Selection) -> tuple[np.ndarray, np.ndarray]:
        """float64 [N], 0 where the objective has one per token; bool [N], which train and count in denominators."""
        rewards, groups, threshold = selection.rewards, selection.prompts, self.config.reward.threshold
        counted = selected_responses(self.objective, rewards, groups, threshold).numpy()
        credit = self.config.credit_record
        if self.config.sampling.uses_credit:
            _require_rates(credit, selection)
        else:  # only its weights are used
            credit = replace(credit, combination="plain", scale="none")
        credited, weights = assign(credit, selection, counted)
        if self.config.sampling.uses_credit:
            return credited * weights, counted
        if self.objective.advantage in TOKEN_ADVANTAGES:
            return np.zeros(len(rewards)), counted
        advantages = sequence_advantages(self.objective, rewards, groups, threshold)
        return advantages.double().numpy() * weights, counted

    def _by_token(
        self, dealt: Dealt, selection: Selection, samples: Mapping[Key, Sample]
    ) -> list[list[np.ndarray]] | None:
        """The advantages of process rewards, of this rank's sequences; a collective call. None for other objectives."""
        if self.objective.advantage != "process":
            return None
        told: list[dict[Key, Steps]] = [{}] * dist.get_world_size()
        dist.all_gather_object(
            told, {key: _steps(sample) for key, sample in samples.items() if sample.reward is not None}
        )
        steps = {key: each for of_rank in told for key, each in of_rank.items()}
        keys = selection.keys
        length_of = {row: rollout.num_tokens for part in dealt for rollout, row in part}
        lengths = [length_of.get(row, 0) for row in range(len(keys))]
        values = step_advantages(self.objective, [steps[key] for key in keys], selection.prompts, lengths)
        return [
            [values[row] if row < len(keys) else np.zeros(rollout.num_tokens) for rollout, row in part]
            for part in dealt
        ]

    def _metrics(self, drawn: SampleTable, selection: Selection, counted: np.ndarray) -> dict[str, Stat]:
        trained, groups = torch.from_numpy(selection.rewards), torch.from_numpy(selection.prompts)
        places = len(drawn.rows) if self.config.sampling.fixed else len(counted)
        found = drawn.metrics(self.config.environment.function is not None, self.config.reward.threshold) | {
            "prompts/effective_ratio": effective_prompt_ratio(trained, groups),
            "rollout/trains_fraction": Stat.mean((torch.arange(places) < int(counted.sum())).double()),
        }
        # What adds up is told by one model copy alone.
        once = {**selection.metrics, "sampling/tokens": Stat.total(float(drawn.column("tokens").sum()))}
        return found | (once if distributed.dp_rank() == 0 else {})


def _require_rates(credit: Credit, selection: Selection) -> None:
    """Raise ConfigError at the first negative reward, not at the first prompt whose mean is negative."""
    if credit.combination == "unbiased" or credit.scale not in ("rate", "root_rate"):
        return
    least = min((float(pool.values().min(initial=np.inf)) for pool in selection.pools), default=0.0)
    if least < 0:
        raise ConfigError(
            f'credit.scale: found "{credit.scale}", which divides by the mean of rewards from 0 to 1, but a reward is '
            f'{least:g}; set credit.scale = "none" or "std", or change the reward'
        )


def _deal_out(own: list[list[Key]], selection: Selection, samples: Mapping[Key, Sample]) -> Dealt:
    """Exchange rollouts in the model copy, and fill up so that all copies have equally many; a collective call.

    own: equal on the ranks of a model copy; samples: this rank's.
    """
    keys = selection.keys
    row_of = {key: row for row, key in enumerate(keys)}
    # Routes stay where they were drawn until it is known which rank needs which rows.
    mine = {key: sample.rollout for key, sample in samples.items() if sample.rollout is not None}
    wanted = {key for part in own for key in part}
    shortest = min(mine, key=lambda key: (mine[key].num_tokens, key), default=None)
    offered = [without_routes(rollout) for key, rollout in mine.items() if key in wanted or key == shortest]
    found = {(rollout.group, rollout.sample): rollout for rollout in distributed.gather_rollouts(offered)}
    found |= {key: mine[key] for key in found if key in mine}
    nothing = None if found else RolloutError("this rank's model copy drew no complete response to hold its place")
    distributed.fail_together(nothing, "sampling")
    filler = found[min(found, key=lambda key: (found[key].num_tokens, key))]
    dealt: Dealt = []
    for part in own:
        size = distributed.largest(max(len(part), 1), dist.group.WORLD)
        places = [(found[key], row_of.get(key, len(keys))) if key in found else (filler, len(keys)) for key in part]
        dealt.append(places + [(filler, len(keys))] * (size - len(part)))
    return dealt


def _steps(sample: Sample) -> Steps:
    """A response that was judged as a whole is one step."""
    assert sample.rollout is not None
    assert sample.reward is not None
    return sample.steps or ((sample.rollout.num_tokens - 1, sample.reward),)


def rank_coordinates() -> RankCoordinates:
    """This rank among those that sample."""
    copy = distributed.model_group()
    return RankCoordinates(distributed.dp_rank(), distributed.dp_size(), copy.rank(), copy.size())


def _counted(rollout: Rollout, counts: bool) -> Rollout:
    """A response without a reward, or not selected, stays in its place but trains nothing, in no denominator."""
    return rollout if counts else replace(rollout, loss_mask=np.zeros_like(rollout.loss_mask))


def _rollout_metrics(rollouts: Sequence[Rollout], trainer_version: int) -> dict[str, Stat]:
    if not rollouts:  # nothing that this model copy drew was selected
        return {}
    return {
        **provenance_metrics(rollouts, trainer_version),
        "rollout/tokens": Stat.total(float(sum(len(r.tokens) for r in rollouts))),
    }
