"""Who draws which samples of a step, and who trains on what is selected.

Prompts of a step are numbered 0..B-1 in the order of the data, with refill on beyond that. What all ranks know after
drawing is the reward of every (prompt, sample); from that each of them finds the whole selection by itself.

Where it is known beforehand what is sampled, single sequences are dealt: sequence ``s = prompt * G + sample`` belongs
to mini-batch ``s // (B * G / N)``, in which the data-parallel ranks hold equal, contiguous shares. A rule that looks at
rewards needs whole prompts on one rank: these are dealt, to mini-batches, to model copies, and to a copy's ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from megarl.core.choices.stopping import Allotted, SamplingRule, Uniform
from megarl.core.metrics import merge
from megarl.core.packing import partition_into
from megarl.core.sampling.collector import Ask, Collector, Selection
from megarl.errors import ConfigError
from megarl.rollout.draw import Asker

Key = tuple[int, int]
"""(prompt, sample)."""
Rewards = Mapping[Key, float | None]
"""Of all samples that any rank has drawn; None where there is no reward."""


@dataclass(frozen=True, slots=True)
class Place:
    """This rank among those that sample: ranks of a model copy train on the same, copies on different sequences."""

    copy: int
    copies: int
    rank: int
    """In the copy."""
    ranks: int
    """Of each copy."""


@dataclass(frozen=True, slots=True)
class Refill:
    """DAPO's dynamic sampling; see ``megarl.core.sampling.collector``."""

    max_prompts: int
    """That all ranks together may begin."""
    spare: int
    """Prompts that all ranks together draw ahead."""


class Plan(Protocol):
    """A step's division of work; equal on all ranks but for what is this rank's own."""

    def asker(self) -> Asker:
        """What this rank draws."""
        ...

    def selection(self, rewards: Rewards) -> Selection:
        """What trains."""
        ...

    def own(self, selection: Selection) -> list[list[Key]]:
        """What this model copy trains on, by mini-batch."""
        ...


def owned_sequences(num_sequences: int, mini_batches: int, rank: int, ranks: int) -> list[list[int]]:
    """The sequences of data-parallel rank ``rank`` of ``ranks``, by mini-batch: a partition of 0..num_sequences-1."""
    per_mini, rest = divmod(num_sequences, mini_batches)
    share, uneven = divmod(per_mini, ranks)
    if rest or uneven:
        raise ConfigError(
            f"{num_sequences} responses of a step do not divide into {mini_batches} mini-batches of {ranks} equal parts"
        )
    return [list(range(n * per_mini + rank * share, n * per_mini + (rank + 1) * share)) for n in range(mini_batches)]


class SequencePlan:
    """For a fixed number of samples of each prompt, all of which train."""

    def __init__(self, rule: Uniform, num_prompts: int, mini_batches: int, place: Place) -> None:
        self._rule, self._num_prompts = rule, num_prompts
        owned = owned_sequences(num_prompts * rule.num_samples, mini_batches, place.copy, place.copies)
        self._owned = [[divmod(s, rule.num_samples) for s in part] for part in owned]
        whole = [key for part in self._owned for key in part]
        self._mine = [whole[i] for i in np.array_split(np.arange(len(whole)), place.ranks)[place.rank]]

    def asker(self) -> Asker:
        return Listed(self._mine)

    def selection(self, rewards: Rewards) -> Selection:
        return replayed(Collector(self._rule, self._num_prompts), rewards)

    def own(self, selection: Selection) -> list[list[Key]]:
        """Also sequences that are not selected, their reward having failed: they keep their place."""
        return self._owned


class GroupPlan:
    """For any rule: whole prompts stay on one rank."""

    def __init__(
        self,
        rule: SamplingRule,
        num_prompts: int,
        mini_batches: int,
        place: Place,
        *,
        refill: Refill | None = None,
        seed: int | None = None,
    ) -> None:
        self._rule, self._num_prompts, self._place = rule, num_prompts, place
        self._refill, self._seed = refill, seed
        sizes = list(rule.counts) if isinstance(rule, Allotted) else [1] * num_prompts
        self._bins = deal(sizes, mini_batches, place.copies)

    def asker(self) -> Asker:
        share = self._share(self._place.copy, self._place.rank)
        if share.places:
            return _Renumbered(share)
        return Listed([] if self._places(self._place.copy) or self._place.rank else [self._company()])

    def _company(self) -> Key:
        """What a copy without prompts draws to have something to go through the model with; it trains nothing."""
        assert isinstance(self._rule, Allotted), "other rules have a prompt for each copy"
        prompt, count = max(enumerate(self._rule.counts), key=lambda item: item[1])
        return prompt, count + self._place.copy

    def selection(self, rewards: Rewards) -> Selection:
        if self._refill is None:
            return replayed(Collector(self._rule, self._num_prompts, seed=self._seed), rewards)
        shares = [self._share(copy, rank) for copy in range(self._place.copies) for rank in range(self._place.ranks)]
        return joined([share.selection(rewards) for share in shares if share.places], self._rule)

    def own(self, selection: Selection) -> list[list[Key]]:
        keys = selection.keys
        if self._refill is None:
            chosen = [set(mini[self._place.copy]) for mini in self._bins]
            return [[key for key in keys if key[0] in prompts] for prompts in chosen]
        ranks = range(self._place.ranks)
        mine = {number for rank in ranks for number in self._share(self._place.copy, rank).numbers}
        prompts = [pool.prompt for pool in selection.pools if pool.prompt in mine]
        parts = [set(part.tolist()) for part in np.array_split(np.array(prompts, dtype=np.int64), len(self._bins))]
        return [[key for key in keys if key[0] in part] for part in parts]

    def _share(self, copy: int, rank: int) -> _Share:
        place = self._place
        first = sorted(prompt for mini in self._bins for prompt in mini[copy])[rank :: place.ranks]
        if self._refill is None:
            rule = self._rule
            if isinstance(rule, Allotted):
                rule = replace(rule, counts=tuple(rule.counts[prompt] for prompt in first))
            return _Share(rule, first, len(first))
        # New prompts are dealt in turn to the ranks that have places: none is begun by two of them, none is left out,
        # and no rank has to ask another one.
        in_turn = [(each, i) for each in range(place.copies) for i in range(min(place.ranks, self._places(each)))]
        if not first:
            return _Share(self._rule, [], 0)
        turn, turns = in_turn.index((copy, rank)), len(in_turn)
        more = range(self._num_prompts + turn, self._refill.max_prompts, turns)
        seed = None if self._seed is None else self._seed + turn
        return _Share(self._rule, [*first, *more], len(first), True, -(-self._refill.spare // turns), seed)

    def _places(self, copy: int) -> int:
        """Prompts that a model copy trains on."""
        return sum(len(mini[copy]) for mini in self._bins)


@dataclass(frozen=True, slots=True)
class _Share:
    """The prompts that one rank may begin, in their order."""

    rule: SamplingRule
    numbers: list[int]
    places: int
    """Prompts that train; those after the first so many replace others."""
    refills: bool = False
    spare: int = 0
    seed: int | None = None

    def collector(self) -> Collector:
        limit = len(self.numbers) if self.refills else None
        return Collector(
            self.rule, self.places, refill=self.refills, spare=self.spare, max_prompts=limit, seed=self.seed
        )

    def selection(self, rewards: Rewards) -> Selection:
        """What trains of this share, under the numbers of its prompts."""
        position = {number: index for index, number in enumerate(self.numbers)}
        known = {
            (position[prompt], sample): reward for (prompt, sample), reward in rewards.items() if prompt in position
        }
        found = replayed(self.collector(), known)
        numbers = np.array(self.numbers, dtype=np.int64)
        return replace(
            found,
            prompts=numbers[found.prompts],
            pools=tuple(replace(pool, prompt=self.numbers[pool.prompt]) for pool in found.pools),
            drawn=np.concatenate([numbers[found.drawn[:1]], found.drawn[1:]]),
        )


class Listed:
    """Asks for given samples, whatever comes."""

    done = False

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = keys

    def start(self) -> list[Ask]:
        return [Ask(prompt, range(sample, sample + 1)) for prompt, sample in self._keys]

    def add(self, prompt: int, sample: int, reward: float | None) -> list[Ask]:
        return []


class _Renumbered:
    """A collector of one share, in the numbers of the step."""

    def __init__(self, share: _Share) -> None:
        self._numbers = share.numbers
        self._position = {number: index for index, number in enumerate(share.numbers)}
        self._collector = share.collector()

    def start(self) -> list[Ask]:
        return self._told(self._collector.start())

    def add(self, prompt: int, sample: int, reward: float | None) -> list[Ask]:
        return self._told(self._collector.add(self._position[prompt], sample, reward))

    @property
    def done(self) -> bool:
        return self._collector.done

    def _told(self, asks: Sequence[Ask]) -> list[Ask]:
        return [Ask(self._numbers[ask.prompt], ask.samples) for ask in asks]


def deal(sizes: Sequence[int], mini_batches: int, copies: int) -> list[list[list[int]]]:
    """Prompts by mini-batch and model copy, with nearly as many samples in each; prompts of size 0 in none.

    Equal sizes give contiguous blocks, so that a mini-batch holds the same prompts whatever the number of copies. Parts
    are empty where there are fewer prompts with samples, but mini-batches only where there are fewer than those.
    """
    some = [prompt for prompt, size in enumerate(sizes) if size]
    if len({sizes[prompt] for prompt in some}) == 1 and len(some) >= mini_batches * copies:
        blocks = [np.array_split(mini, copies) for mini in np.array_split(np.array(some), mini_batches)]
        return [[part.tolist() for part in block] for block in blocks]
    parts = partition_into([sizes[prompt] for prompt in some], min(mini_batches * copies, len(some)))
    dealt = [[some[index] for index in part] for part in parts]
    dealt += [[] for _ in range(mini_batches * copies - len(dealt))]
    if not dealt[-1]:
        return [dealt[n::mini_batches] for n in range(mini_batches)]
    return [dealt[n * copies : (n + 1) * copies] for n in range(mini_batches)]


def replayed(collector: Collector, rewards: Rewards) -> Selection:
    """What a collector selects from samples that were drawn as it, or its likes on other ranks, asked for them."""
    asks = deque(collector.start())
    while asks and not collector.done:
        ask = asks.popleft()
        for sample in ask.samples:
            if (ask.prompt, sample) in rewards:
                asks.extend(collector.add(ask.prompt, sample, rewards[ask.prompt, sample]))
    return collector.select()


def joined(selections: Sequence[Selection], rule: SamplingRule) -> Selection:
    """Selections of different prompts as one, in the order of (prompt, sample)."""
    prompts, samples, rewards = (
        np.concatenate([getattr(selection, name) for selection in selections])
        for name in ("prompts", "samples", "rewards")
    )
    order = np.lexsort((samples, prompts))
    pools = sorted((pool for selection in selections for pool in selection.pools), key=lambda pool: pool.prompt)
    return Selection(
        prompts=prompts[order],
        samples=samples[order],
        rewards=rewards[order],
        pools=tuple(pools),
        rule=rule,
        drawn=np.concatenate([selection.drawn for selection in selections], axis=1),
        metrics=merge(selection.metrics for selection in selections),
    )
