"""From the samples of a step to the training data of a rank: a row of numbers per sample, rollouts, and advantages.

All ranks get the rows, and compute all advantages based on rewards alone for the whole step. Rollouts are exchanged
within a model copy and without their routes: ranks need different rows of the routes, and routes stay on the drawing
rank until the step is split into micro-batches.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter
from typing import Any, Self

import numpy as np

from megarl.config import Config
from megarl.core.choices.parts import TOKEN_ADVANTAGES
from megarl.core.measures import effective_prompt_ratio
from megarl.core.metrics import Stat
from megarl.core.objectives import Objective, advantages_of, select_responses, step_advantages
from megarl.core.sampling.collector import Selection, find_rows
from megarl.core.sampling.credit_assignment import assign, weigh
from megarl.core.types import Rollout
from megarl.engines.player import Failure, Sample
from megarl.engines.protocol import Engine
from megarl.errors import RewardError, RolloutError, refusal
from megarl.megatron import distributed
from megarl.trainer.mini_batch import Judged
from megarl.trainer.sampling.assignment import Assignment, Key

_COLUMNS = (
    *("prompt", "sample", "reward", "judged", "turns", "cut", "episode_failed", "late_reward"),
    *("tokens", "appended", "generated", "dropped"),
)

COUNTED = "wrong_answers", "refused_requests", "retractions", "retracted_answers", "lost_parts"
"""Those of ``Engine.answer_counts`` that are metrics."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleTable:
    """The samples of all ranks, in the order of (prompt, sample)."""

    rows: np.ndarray
    """float64 [S, C + M]: the columns above, and M rewards by name."""
    components: tuple[str, ...] = ()
    """Names of the M rewards; empty for a single reward."""
    failure: Failure | None = None
    """The first failure of any rank; failures of the user's code come before passing failures."""
    failed: Key | None = None
    """The sample of ``failure``."""

    @classmethod
    def gather(cls, samples: Mapping[Key, Sample], components: tuple[str, ...] = ()) -> Self:
        """Exchange the rows of all ranks; a collective call.

        samples: this rank's; components: names of several rewards, empty to leave the components out.
        """
        facts = [_facts(key, sample, len(components)) for key, sample in samples.items()]
        rows = distributed.gather_rows(np.array(facts, np.float64).reshape(len(facts), len(_COLUMNS) + len(components)))
        table = cls(rows[np.lexsort((rows[:, 1], rows[:, 0]))], components)
        if table.is_judged.all():
            return table
        failures = [(sample.failure.may_pass, key, sample.failure) for key, sample in samples.items() if sample.failure]
        of_ranks = distributed.gather_objects(min(failures, key=itemgetter(0, 1), default=None))
        _, failed, failure = min(filter(None, of_ranks), key=itemgetter(0, 1))
        return replace(table, failure=failure, failed=failed)

    def column(self, name: str) -> np.ndarray:
        """float64 [S]."""
        return self.rows[:, _COLUMNS.index(name)]

    def of(self, selection: Selection) -> Self:
        """Return the rows of the selected samples, in order."""
        prompts, samples = self._numbers()
        return replace(self, rows=self.rows[find_rows(prompts, samples, selection.prompts, selection.samples)])

    def rewards(self) -> dict[Key, float | None]:
        """Return the rewards by (prompt, sample), None for a failed sample."""
        prompts, samples = self._numbers()
        columns = prompts.tolist(), samples.tolist(), self.column("reward").tolist(), self.is_judged.tolist()
        return {(p, s): reward if judged else None for p, s, reward, judged in zip(*columns, strict=True)}

    def _numbers(self) -> tuple[np.ndarray, np.ndarray]:
        return self.column("prompt").astype(np.int64), self.column("sample").astype(np.int64)

    @property
    def is_judged(self) -> np.ndarray:
        """bool [S]: True with a reward."""
        return self.column("judged") > 0

    @property
    def error_type(self) -> type[RolloutError]:
        """For a lack of rewards: RewardError, or RolloutError for a passing failure."""
        return RolloutError if self.failure is None or self.failure.may_pass else RewardError

    def require_rewards(self, subject: str) -> None:
        """Raise ``error_type`` if no sample has a reward."""
        if not self.is_judged.any():
            raise self.error_type(f"{subject}: no response has a reward; first: {self.failure}")

    def describe_unjudged(self) -> str | None:
        """Count the samples with a reward, and name the first failure; None if all samples have a reward."""
        judged = int(self.is_judged.sum())
        return None if self.failure is None else f"{judged} of {len(self.rows)} judged; first failure: {self.failure}"

    def metrics(self, environment: bool, threshold: float) -> dict[str, Stat]:
        """Return means over all samples, equal on every rank, so that merging ranks changes no mean.

        environment: include the metrics of episodes. threshold: a larger reward passes; a sample without a reward
        fails.
        """
        judged, drawn = self.is_judged, len(self.rows)
        passes = judged & (self.column("reward") > threshold)
        failed = ~judged & (self.column("episode_failed") == 0)
        names = (*_COLUMNS, *(f"reward/component/{name}" for name in self.components))
        sums = dict(zip(names, self.rows.sum(axis=0).tolist(), strict=True))  # without a reward, the column holds 0
        means = {
            "reward/mean": (sums["reward"], sums["judged"]),
            "reward/pass_rate": (np.count_nonzero(passes), drawn),
            "reward/judged": (sums["judged"], 1),
            "reward/responses": (drawn, 1),
            "reward/error_fraction": (np.count_nonzero(failed), drawn),
            "reward/late_fraction": (sums["late_reward"], drawn),
            "response/length_mean": (sums["generated"], drawn),
            "response/truncated_fraction": (sums["cut"], drawn),
            **{name: (sums[name], sums["judged"]) for name in names[len(_COLUMNS) :]},
        }
        if environment:
            means |= {
                "episode/turns_mean": (sums["turns"], drawn),
                "episode/environment_tokens_mean": (sums["appended"], drawn),
                "episode/dropped_tokens_mean": (sums["dropped"], drawn),
                "episode/failed_fraction": (sums["episode_failed"], drawn),
            }
        return Stat.means_of(means) | {"response/length_max": Stat.max(self.column("generated"))}


def _facts(key: Key, sample: Sample, num_components: int) -> tuple[float, ...]:
    """The row of a sample."""
    is_cut, lengths = False, (0, 0, 0)
    if (rollout := sample.rollout) is not None:
        generated = int(np.count_nonzero(rollout.loss_mask))
        is_cut = rollout.finish_reason == "length"
        lengths = rollout.num_tokens, rollout.num_tokens - rollout.prompt_length - generated, generated
    judged = (sample.reward or 0.0, sample.reward is not None)
    failed = sample.failure is not None and sample.failure.of_episode
    # A response without components failed, or was stopped and is wrong: all rewards are 0.
    components = sample.components or (0.0,) * num_components
    facts = (sample.turns, is_cut, failed, sample.late_reward, *lengths, sample.num_dropped)
    return (*key, *judged, *facts, *components[:num_components])


def select(assignment: Assignment, table: SampleTable, step: int) -> Selection:
    """Return the training samples; RolloutError, or RewardError, if no sample trains."""
    table.require_rewards(f"step {step + 1}")
    selection = assignment.select(table.rewards())
    if not len(selection.prompts):
        unjudged = f"; {told}" if (told := table.describe_unjudged()) else ""
        num = selection.drawn.shape[1]
        raise table.error_type(refusal("rewards_equal", step=step + 1, num=num, unjudged=unjudged))
    return selection


def sampling_metrics(config: Config, table: SampleTable, selection: Selection) -> dict[str, Stat]:
    """Return the metrics of all samples and of the training samples, over all ranks."""
    metrics = table.metrics(config.environment.function is not None, config.reward.threshold)
    metrics["prompts/effective_ratio"] = effective_prompt_ratio(selection.rewards, selection.prompts)
    if distributed.dp_rank() == 0:  # sums, equal on all ranks: count once
        metrics |= selection.metrics | {"sampling/tokens": Stat.total(float(table.column("tokens").sum()))}
    return metrics


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """The training data of a data-parallel rank in a global step."""

    mini_batches: list[list[Rollout]]
    """Rollouts by mini-batch, in the order of the sequences; equally many on all ranks."""
    advantages: list[np.ndarray] | list[list[np.ndarray]]
    """By mini-batch, float64: a number per rollout, or for process rewards per token of a rollout. All 0 where the
    objective computes advantages from log-probabilities."""
    judged: Judged
    """The rewards for objectives that compute advantages."""
    metrics: dict[str, Stat]
    """Rewards cover the whole step and are equal on all ranks; further metrics cover this rank's rollouts."""
    unjudged: str | None
    """Number of responses with a reward, and the first failure; None if all responses have a reward."""
    places: np.ndarray
    """int64 [B], the place of each of the step's prompts in the run's order."""
    trained: np.ndarray
    """int64 [n, 2], all training samples of all ranks: (place of the prompt in the run's order, sample). No sample
    appears in two steps."""
    excerpts: dict[Key, dict[str, Any]] = field(default_factory=dict)
    """The texts to store (``megarl.trainer.sampling.excerpts``), of samples drawn by this rank."""


@dataclass(frozen=True, slots=True)
class CopyShare:
    """The rollouts of a model copy, by mini-batch; equally many in all copies."""

    rollouts: list[list[Rollout]]
    rows: list[list[int]]
    """Row of each rollout in the selection; the number of rows for dummies and unselected samples."""

    def mask_unless(self, trains: np.ndarray) -> list[list[Rollout]]:
        """Return the rollouts, with an empty loss mask for untrained rollouts. ``trains``: bool [rows].

        Masked rollouts keep their place in the batch, but count in no denominator.
        """
        masks = np.append(trains, False)
        return [
            [r if masks[row] else replace(r, loss_mask=r.loss_mask & False) for r, row in zip(*mini, strict=True)]
            for mini in zip(self.rollouts, self.rows, strict=True)
        ]

    def without_dummies(self, keys: list[list[Key]]) -> list[Rollout]:
        """Return every rollout of ``keys`` once."""
        pairs = chain.from_iterable(map(zip, keys, self.rollouts))  # dummies come last, or have a different key
        return [rollout for key, rollout in pairs if key == (rollout.group, rollout.sample)]


def exchange_rollouts(keys: list[list[Key]], selection: Selection, samples: Mapping[Key, Sample]) -> CopyShare:
    """Exchange rollouts between the ranks of a model copy, and fill up to equally many rollouts in all copies.

    A collective call. keys: by mini-batch, equal on the ranks of a model copy; samples: this rank's. RolloutError, on
    all ranks, if a model copy has no complete response.
    """
    local = {key: sample.rollout for key, sample in samples.items() if sample.rollout is not None}
    in_batch = set(chain.from_iterable(keys))
    # Ranks also offer their shortest rollout: the copy may need a dummy.
    _, shortest = min(((rollout.num_tokens, key) for key, rollout in local.items()), default=(0, None))
    offered = [rollout for key, rollout in local.items() if key in in_batch or key == shortest]
    of_copy = *distributed.gather_rollouts(offered), *offered  # local rollouts come last: they have routes
    rollouts = {(rollout.group, rollout.sample): rollout for rollout in of_copy}
    failure = None if rollouts else RolloutError("this rank's model copy drew no complete response to hold its place")
    distributed.fail_together(failure, "sampling")
    _, dummy = min((rollout.num_tokens, key) for key, rollout in rollouts.items())
    share = CopyShare([], [])
    for mini in keys:
        size = distributed.largest(max(len(mini), 1))
        present = [key if key in rollouts else None for key in mini] + [None] * (size - len(mini))
        share.rollouts.append([rollouts[key or dummy] for key in present])
        prompts, numbers = np.array([key or (-1, 0) for key in present]).T
        share.rows.append(find_rows(selection.prompts, selection.samples, prompts, numbers).tolist())
    return share


def response_advantages(
    config: Config, objective: Objective, selection: Selection, table: SampleTable
) -> tuple[np.ndarray, np.ndarray]:
    """Return the advantages of the selected responses, float64 [N], and the training mask, bool [N].

    Statistics are over the step's selected responses on all ranks; responses without a reward, for example aborted
    responses, are not selected. Advantages are 0 where the objective has advantages per token. ConfigError if a reward
    is negative where credit divides by pass rates.
    """
    rewards, groups, threshold = selection.rewards, selection.prompts, config.reward.threshold
    selected = table.of(selection)
    facts: dict[str, Any] = {"lengths": selected.column("generated")}
    if weights := config.reward.weights:
        facts["components"] = selected.rows[:, len(_COLUMNS) :], list(weights.values())
    trains = select_responses(objective, rewards, groups, threshold, **facts).numpy()
    if config.sampling.uses_credit:
        values, factors = assign(config.credit_record, selection, trains)
        return values * factors, trains
    if objective.advantage in TOKEN_ADVANTAGES:
        return np.zeros(len(rewards)), trains
    # The objective brings the advantages; credit assignment gives only the weights of the prompts.
    factors = weigh(config.credit_record, selection, trains)
    return advantages_of(objective, rewards, groups, threshold, **facts).double().numpy() * factors, trains


def count_answers(engine: Engine) -> dict[str, Stat]:
    """Return and clear the ``answer_counts`` of all ranks, and the idle share of slots; a collective call."""
    names = *COUNTED, "slot_ms", "busy_slot_ms"
    counts = getattr(engine, "answer_counts", {})  # an engine of the user's own need not count
    totals = distributed.gather_rows(np.array([[float(counts.get(name, 0)) for name in names]])).sum(0)
    if isinstance(counts, MutableMapping):
        counts.clear()
    is_first = distributed.dp_rank() == 0
    *numbers, slots, busy = totals
    counted = {f"rollout/{name}": Stat.total(float(n) * is_first) for name, n in zip(COUNTED, numbers, strict=True)}
    return counted | (Stat.means_of({"rollout/idle_fraction": (slots - busy, slots)}) if slots else {})


def process_advantages(
    objective: Objective, share: CopyShare, selection: Selection, samples: Mapping[Key, Sample]
) -> list[list[np.ndarray]] | None:
    """Return the advantages of process rewards, float64 [T] of each rollout of the share; a collective call.

    None for other objectives. ``samples``: this rank's.
    """
    if objective.advantage != "process":
        return None
    local = {
        # A response judged as a whole is a single step.
        key: sample.steps or ((sample.rollout.num_tokens - 1, sample.reward),)
        for key, sample in samples.items()
        if sample.reward is not None and sample.rollout is not None
    }
    steps = {key: rewards for of_rank in distributed.gather_objects(local) for key, rewards in of_rank.items()}
    minis = [list(zip(*mini, strict=True)) for mini in zip(share.rollouts, share.rows, strict=True)]
    length_of = {row: rollout.num_tokens for mini in minis for rollout, row in mini}
    lengths = [length_of.get(row, 0) for row in range(len(selection.keys))]  # 0: of a different copy
    values = step_advantages(objective, [steps[key] for key in selection.keys], selection.prompts, lengths)
    return [[values[row] if row < len(values) else np.zeros(r.num_tokens) for r, row in mini] for mini in minis]
