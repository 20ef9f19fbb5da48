"""Collect the samples of one step as they arrive: further samples to request, and the selection that trains.

    collector = Collector(ada_seq_balance(), num_prompts=512, seed=step)
    asks = collector.start()
    while not collector.done:
        ...  # have the engine draw what is asked for; whatever finishes next:
        asks = collector.add(prompt, sample, reward)
    selection = collector.select()
    advantages, weights = assign(Credit(), selection)  # megarl.core.sampling.credit_assignment

Prompts (unless they are given numbers) and samples are numbered in the order in which they are asked for: prompt 3 is
the fourth prompt begun, sample 9 the tenth sample of the prompt. No prompt waits for another. The selection depends on
rewards by (prompt, sample), not on the order of arrival.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from megarl.core.choices.stopping import SamplingRule
from megarl.core.metrics import Stat
from megarl.core.sampling.subsampling import subsample
from megarl.errors import NumericsError, refusal


@dataclass(frozen=True, slots=True)
class Ask:
    """Samples to draw now."""

    prompt: int
    """Index of the prompt; an index larger than all earlier ones begins a new prompt."""
    samples: range
    """Indices of the samples."""


@dataclass(slots=True, eq=False)
class Pool:
    """All samples of a prompt in a step; filled by the collector."""

    prompt: int
    """Number of the prompt."""
    asked: list[int] = field(default_factory=list)
    """Requested samples by round."""
    rewards: dict[int, float | None] = field(default_factory=dict)
    """Reward by index of the sample, counted over all rounds; None for a failed sample."""
    ended: bool = False
    """Whether the rule has ended the prompt."""
    fits: bool = True
    """Whether the prompt may take a place in the batch."""

    @property
    def num_asked(self) -> int:
        """Requested samples of all rounds."""
        return sum(self.asked)

    @property
    def waits(self) -> bool:
        """Whether samples are still to arrive."""
        return len(self.rewards) < self.num_asked

    def classes(self, threshold: float) -> tuple[int, int]:
        """Number of rewards above the threshold, and of the others."""
        arrived = [reward for reward in self.rewards.values() if reward is not None]
        positives = sum(reward > threshold for reward in arrived)
        return positives, len(arrived) - positives

    def has_contrast(self) -> bool:
        """Whether not all rewards are equal."""
        return len({*self.rewards.values()} - {None}) > 1


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The trained samples, in the order of (prompt, sample), and the drawn samples."""

    prompts: np.ndarray
    """int64 [N]."""
    samples: np.ndarray
    """int64 [N]."""
    rewards: np.ndarray
    """float64 [N]."""
    pools: tuple[Pool, ...]
    """The pools of the prompts with a place in the batch, ascending; also of prompts without trained samples."""
    rule: SamplingRule
    """The sampling rule."""
    drawn: np.ndarray
    """int64 [4, A], by ended prompt, also replaced prompts: prompt, samples asked for, samples with a reward, positive
    samples. Estimates of pass rates learn from it."""
    metrics: dict[str, Stat]
    """Costs and outcomes, ``sampling/...``."""

    @property
    def keys(self) -> list[tuple[int, int]]:
        """(prompt, sample) of the trained samples."""
        return list(zip(self.prompts.tolist(), self.samples.tolist(), strict=True))


def find_rows(prompts: np.ndarray, samples: np.ndarray, pools: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return int64 [M]: the rows of (``pools``, ``numbers``) among N sorted (``prompts``, ``samples``); N if absent."""
    width = max(samples.max(initial=0), numbers.max(initial=0)) + 1
    keys, targets = prompts * width + samples, pools * width + numbers
    rows = np.searchsorted(keys, targets)
    return np.where(np.append(keys, -1)[rows] == targets, rows, len(keys))


class Collector:
    """Drives a rule over the prompts of a step.

    - ``refill``: DAPO's dynamic sampling (arXiv 2503.14476), with any rule. A new prompt replaces each prompt without
      contrast at once, until ``num_prompts`` prompts with contrast fill the batch or ``max_prompts`` were begun. The
      batch is the first prompts with contrast, by number. (With a baseline, the replaced prompts have advantages of 0:
      the step changes in scale, not in direction.)
    - ``spare``: prompts drawn ahead, for a shorter wait at the end. The order of arrival changes the number of wasted
      samples, never the selection.
    - ``seed``: random choice of the trained samples; None keeps the first samples.
    - ``numbers``: of the prompts, in the order of beginning; None for 0, 1, ...

    ``max_prompts`` and ``spare`` go with ``refill``, that not with ``Allotted``: the table [sampling] checks it.
    """

    def __init__(
        self, rule: SamplingRule, num_prompts: int, *,
        refill: bool = False, spare: int = 0, max_prompts: int | None = None, seed: int | None = None,
        numbers: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        limit = num_prompts if max_prompts is None else max_prompts
        self.rule, self.seed, self.numbers = rule, seed, range(limit) if numbers is None else numbers
        self._num_prompts, self._refill, self._limit, self._spare = num_prompts, refill, limit, spare
        self._pools: list[Pool] = []
        self._pool_of: dict[int, Pool] = {}  # by number
        self._front = 0  # all prompts below have ended
        self._places = 0  # taken by them

    def start(self) -> list[Ask]:
        """Return the first samples to draw; to be called once."""
        assert not self._pools, "a collector is for one step"
        return self._begin(self._num_prompts + self._spare)

    def add(self, prompt: int, sample: int, reward: float | None) -> list[Ask]:
        """Take in a sample and return the samples to draw next.

        reward: None for a sample that failed; a failed sample only counts as drawn. Raises ValueError if the sample was
        not asked for or is there already, NumericsError if the reward is not finite.
        """
        pool = self._pool_of.get(prompt)
        if pool is None or not 0 <= sample < pool.num_asked:
            raise ValueError(f"prompt {prompt} sample {sample} was not asked for")
        if sample in pool.rewards:
            raise ValueError(f"prompt {prompt} sample {sample} arrived twice")
        return self._take(pool, {sample: reward})

    def replay(self, rewards: Mapping[tuple[int, int], float | None]) -> Selection:
        """Return the selection from rewards of samples drawn earlier, as if the samples arrived on request.

        rewards: by (prompt, sample), None for a sample that failed. Errors as in ``add`` and ``select``.
        """
        asks = deque(self.start())
        while asks and not self.done:
            ask = asks.popleft()
            drawn = {i: rewards[ask.prompt, i] for i in ask.samples if (ask.prompt, i) in rewards}
            asks.extend(self._take(self._pool_of[ask.prompt], drawn))
        return self.select()

    @property
    def done(self) -> bool:
        """Whether the selection is decided."""
        if self._refill and self._places == self._num_prompts:
            return True
        return bool(self._pools) and self._front == len(self._pools)

    def outstanding(self) -> list[tuple[int, int]]:
        """(prompt, sample) of all samples that have not arrived; once ``done``, they are not needed any more."""
        return [(p.prompt, i) for p in self._pools for i in range(p.num_asked) if i not in p.rewards]

    def select(self) -> Selection:
        """Return what trains; ValueError before ``done``.

        With ``refill``, fewer than ``num_prompts`` prompts if ``max_prompts`` held no more with contrast
        (``sampling/missing_prompts``).
        """
        if not self.done:
            raise ValueError(f"{len(self.outstanding())} samples are still to arrive: select once all is done")
        tried = self._pools[: self._front]
        placed_pools = tuple(pool for pool in tried if pool.fits)
        ended = [pool for pool in self._pools if pool.ended]  # the placed ones among them
        rows = PoolRows.of(ended)
        judged = np.diff(rows.bounds)
        positives = np.bincount(rows.pool[rows.value > self.rule.threshold], minlength=len(ended))
        varying = rows.pool[rows.value != rows.value[rows.bounds[rows.pool]]]
        classes = list(zip(positives.tolist(), (judged - positives).tolist(), strict=True))
        index_of = {pool.prompt: index for index, pool in enumerate(ended)}
        places = [index_of[pool.prompt] for pool in placed_pools]
        trained = self._choose(rows, tried, places, classes)
        requested = [pool.num_asked for pool in ended]
        numbers = np.array([pool.prompt for pool in ended], np.int64)
        per_prompt = {
            "samples_per_prompt": sum(requested),
            "rounds": sum(len(pool.asked) for pool in ended),
            "contrast_fraction": len(set(varying.tolist())),
            "resolved_fraction": sum(self.rule.resolved(*of_class) for of_class in classes),
        }
        totals = {
            "samples": sum(pool.num_asked for pool in self._pools),
            "failed": sum([*pool.rewards.values()].count(None) for pool in self._pools),
            "trained": len(trained),
            "lone_prompts": np.count_nonzero(judged[places] == 1),
            "short_prompts": np.count_nonzero(judged[places] < (self.rule.train_size or 0)),
            "replaced_prompts": self._front - len(placed_pools),
            "missing_prompts": self._num_prompts - len(placed_pools),
        }
        means = Stat.means_of({f"sampling/{name}": (total, len(ended)) for name, total in per_prompt.items()})
        metrics = means | {f"sampling/{name}": Stat.total(total) for name, total in totals.items()}
        drawn = np.array([numbers, requested, judged, positives])
        columns = numbers[rows.pool[trained]], rows.sample[trained], rows.value[trained]
        return Selection(*columns, placed_pools, self.rule, drawn, metrics)

    def _take(self, pool: Pool, rewards: Mapping[int, float | None]) -> list[Ask]:
        for sample, reward in rewards.items():
            if reward is not None and not math.isfinite(reward):
                raise NumericsError(refusal("reward_of_sample", pool=pool, sample=sample, reward=reward))
        pool.rewards |= rewards
        return [] if pool.waits else self._after_round(pool)

    def _begin(self, number: int) -> list[Ask]:
        """Begin so many new prompts, or as many as the limit leaves."""
        asks: list[Ask] = []
        for _ in range(min(number, self._limit - len(self._pools))):
            pool = Pool(prompt=self.numbers[len(self._pools)])
            self._pools.append(pool)
            self._pool_of[pool.prompt] = pool
            asks += self._after_round(pool)
        return asks

    def _after_round(self, pool: Pool) -> list[Ask]:
        """Request the next round of a prompt, or end the prompt and perhaps begin a new prompt."""
        if self.done and pool.asked:
            # The batch is complete; a prompt cut short must not count as ended.
            return []
        begin = pool.num_asked
        count = self.rule.next_samples(pool.prompt, begin, *pool.classes(self.rule.threshold))
        if count:
            pool.asked.append(count)
            return [Ask(pool.prompt, range(begin, begin + count))]
        pool.ended = True
        pool.fits = not self._refill or pool.has_contrast()
        while self._front < len(self._pools) and self._pools[self._front].ended and not self.done:
            self._places += self._pools[self._front].fits
            self._front += 1
        enough = pool.fits or (self._refill and self._places == self._num_prompts)
        return [] if enough else self._begin(1)

    def _choose(
        self, rows: "PoolRows", tried: Sequence[Pool], places: Sequence[int], classes: Sequence[tuple[int, int]]
    ) -> np.ndarray:
        """int64 [N]: the rows that train, of the placed pools."""
        size = self.rule.train_size
        if size is None:
            return np.flatnonzero(np.bincount(places, minlength=len(classes))[rows.pool])
        trained = [np.zeros(0, np.int64)]
        begun_as = (index for index, pool in enumerate(tried) if pool.fits)
        for index, place in zip(begun_as, places, strict=True):
            begin, end = rows.bounds[place : place + 2].tolist()
            seed = None if self.seed is None else (self.seed, index)
            keep = self.rule.keeps(*classes[place])
            indices = subsample(rows.value[begin:end], size, keep, threshold=self.rule.threshold, seed=seed)
            trained.append(begin + indices)
        return np.concatenate(trained)


@dataclass(frozen=True, slots=True, eq=False)
class PoolRows:
    """The samples of P pools that have a reward, in the order of (pool, sample)."""

    pool: np.ndarray
    """int64 [R], 0..P-1."""
    sample: np.ndarray
    value: np.ndarray
    bounds: np.ndarray
    """int64 [P + 1]: pool p has the rows bounds[p] .. bounds[p + 1] - 1."""

    @classmethod
    def of(cls, pools: Sequence[Pool]) -> Self:
        samples = ((index, *item) for index, pool in enumerate(pools) for item in sorted(pool.rewards.items()))
        pool, sample, value = np.array([row for row in samples if row[-1] is not None], np.float64).reshape(-1, 3).T
        bounds = np.searchsorted(pool, np.arange(len(pools) + 1))
        return cls(pool.astype(np.int64), sample.astype(np.int64), value, bounds)


Key = tuple[int, int]
"""(prompt, sample)."""


class FixedSamples:
    """Asks for given samples, for any rewards."""

    done = False

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = keys

    def start(self) -> list[Ask]:
        return [Ask(prompt, range(sample, sample + 1)) for prompt, sample in self._keys]

    def add(self, prompt: int, sample: int, reward: float | None) -> list[Ask]:
        return []
