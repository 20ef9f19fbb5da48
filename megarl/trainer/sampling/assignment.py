"""Assigns the samples of a step to the ranks that draw and train them.

The prompts of a step are numbered 0..B-1 in the order of the data; refill continues with B, B+1, ... After sampling,
all ranks know the reward of every (prompt, sample). Each rank computes the whole selection from the rewards.

- ``SequenceAssignment``, for a fixed number of samples per prompt, assigns single sequences. Sequence ``s = prompt * G
  + sample`` belongs to mini-batch ``s // (B * G / N)``, and each data-parallel rank has an equal, contiguous share.
- ``PromptAssignment``, for rules based on rewards, assigns whole prompts: to mini-batches, to model copies, and to the
  ranks of a copy.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from megarl.core.choices.stopping import Allotted, SamplingRule, Uniform
from megarl.core.metrics import merge
from megarl.core.packing import partition_into
from megarl.core.sampling.collector import Collector, FixedSamples, Key, Selection
from megarl.engines.player import Asker
from megarl.errors import ConfigError, refusal


@dataclass(frozen=True, slots=True)
class RankCoordinates:
    """Where a rank is. The ranks of a model copy train on equal sequences, different copies on different sequences."""

    copy: int
    copies: int
    rank: int
    """In the copy."""
    ranks: int
    """Of each copy."""


class SequenceAssignment:
    """Assigns single sequences. All sequences train, and all prompts have equally many samples.

    Every rank has an assignment for a step, for its own coordinates.
    """

    def __init__(self, rule: Uniform, num_prompts: int, mini_batches: int, coordinates: RankCoordinates) -> None:
        self._rule, self._num_prompts = rule, num_prompts
        shares = split_sequences(num_prompts * rule.num_samples, mini_batches, coordinates.copy, coordinates.copies)
        self._keys = [[divmod(sequence, rule.num_samples) for sequence in share] for share in shares]
        keys = list(chain(*self._keys))
        indices = np.array_split(np.arange(len(keys)), coordinates.ranks)[coordinates.rank]
        self._drawn = [keys[index] for index in indices.tolist()]
        prompts = np.array(sorted({prompt for prompt, _ in keys}))
        self.prompts: list[int] = np.array_split(prompts, coordinates.ranks)[coordinates.rank].tolist()
        """The rank's prompts, if whole prompts are assigned to ranks (``rollout.max_staleness``)."""

    def asker(self) -> Asker:
        """Return the asker for this rank's samples."""
        return FixedSamples(self._drawn)

    def select(self, rewards: Mapping[Key, float | None]) -> Selection:
        """Return the training samples, equal on all ranks. ``rewards``: of all samples drawn by any rank."""
        return Collector(self._rule, self._num_prompts).replay(rewards)

    def keys_of(self, selection: Selection) -> list[list[Key]]:
        """Return this model copy's training samples, by mini-batch.

        Sequences without a reward keep their place, but do not train.
        """
        return self._keys


class PromptAssignment:
    """Assigns whole prompts, for any rule; methods as in ``SequenceAssignment``."""

    def __init__(
        self, rule: SamplingRule, num_prompts: int, mini_batches: int, coordinates: RankCoordinates, *,
        max_prompts: int | None = None, spare: int = 0, seed: int | None = None,
    ) -> None:  # fmt: skip
        """``max_prompts`` and ``spare``, over all ranks, of DAPO's dynamic sampling, and ``seed``: see ``Collector``.

        max_prompts: None without dynamic sampling.
        """
        self._rule, self._num_prompts, self._at = rule, num_prompts, coordinates
        self._max_prompts, self._spare, self._seed = max_prompts, spare, seed
        sizes = [1] * num_prompts
        if isinstance(rule, Allotted):
            sizes = [min(count, rule.train_size or count) for count in rule.counts]
        self._bins = split_prompts(sizes, mini_batches, coordinates.copies)
        self._places = [sorted(chain(*(mini[copy] for mini in self._bins))) for copy in range(coordinates.copies)]
        """The training prompts of each model copy, or prompts that hold a place."""
        # Ranks with places take turns at new prompts. No prompt is begun twice or left out, and
        # ranks need not communicate.
        num_ranks = [min(coordinates.ranks, len(places)) for places in self._places]
        ranks = ((copy, rank) for copy, number in enumerate(num_ranks) for rank in range(number))
        self._turns = {place: turn for turn, place in enumerate(ranks)}

    def asker(self) -> Asker:
        if (self._at.copy, self._at.rank) in self._turns:
            return self._share(self._at.copy, self._at.rank)
        if self._places[self._at.copy] or self._at.rank:
            return FixedSamples([])
        # A copy without prompts needs a sample to run the model on, without training.
        assert isinstance(self._rule, Allotted), "other rules have a prompt for each copy"
        prompt, count = max(enumerate(self._rule.counts), key=lambda item: item[1])
        return FixedSamples([(prompt, count + self._at.copy)])

    def select(self, rewards: Mapping[Key, float | None]) -> Selection:
        if self._max_prompts is None:
            return Collector(self._rule, self._num_prompts, seed=self._seed).replay(rewards)
        return join_selections([self._share(*place).replay(rewards) for place in self._turns], self._rule)

    def keys_of(self, selection: Selection) -> list[list[Key]]:
        if self._max_prompts is None:
            groups = [[sorted(chain(*mini)) for mini in self._bins]]
        else:
            # Prompts with a place are known only now: split the prompts of each copy evenly over the mini-batches.
            pools = {pool.prompt for pool in selection.pools}
            begun = [
                [n for place in self._turns if place[0] == copy for n in self._numbers(*place)]
                for copy in range(self._at.copies)
            ]
            shares = [np.array_split(np.array(sorted(pools.intersection(n)), int), len(self._bins)) for n in begun]
            groups = [[mini.tolist() for mini in share] for share in shares]
        if not isinstance(self._rule, Allotted):  # otherwise the numbers were known beforehand
            groups = exchange_prompts(groups, Counter(selection.prompts.tolist()))
        places = set(self._places[self._at.copy])
        minis = groups[self._at.copy] if self._max_prompts else [[n for n in mini if n in places] for mini in groups[0]]
        mini_of = {prompt: index for index, mini in enumerate(minis) for prompt in mini}
        keys: list[list[Key]] = [[] for _ in minis]
        for prompt, sample in selection.keys:
            if (index := mini_of.get(prompt)) is not None:
                keys[index].append((prompt, sample))
        return keys

    def _share(self, copy: int, rank: int) -> Collector:
        """Return the collector of the prompts that a rank may begin."""
        numbers, places = self._numbers(copy, rank), len(self._places[copy][rank :: self._at.ranks])
        if self._max_prompts is None:
            return Collector(self._rule, places, numbers=numbers)
        seed = None if self._seed is None else self._seed + self._turns[copy, rank]
        spare = -(-self._spare // len(self._turns))
        options = {"refill": True, "spare": spare, "max_prompts": len(numbers), "seed": seed, "numbers": numbers}
        return Collector(self._rule, places, **options)

    def _numbers(self, copy: int, rank: int) -> list[int]:
        """The prompts that a rank may begin, in order."""
        first = self._places[copy][rank :: self._at.ranks]
        if self._max_prompts is None:
            return first
        return [*first, *range(self._num_prompts + self._turns[copy, rank], self._max_prompts, len(self._turns))]


Assignment = SequenceAssignment | PromptAssignment


def split_sequences(num_sequences: int, mini_batches: int, rank: int, ranks: int) -> list[list[int]]:
    """Return the sequences of data-parallel rank ``rank`` of ``ranks``, by mini-batch; ConfigError if uneven."""
    per_mini, remainder = divmod(num_sequences, mini_batches)
    share, uneven = divmod(per_mini, ranks)
    if remainder or uneven:
        raise ConfigError(refusal("responses_of_step", num=num_sequences, mini_batches=mini_batches, ranks=ranks))
    return [list(range(n * per_mini + rank * share, n * per_mini + (rank + 1) * share)) for n in range(mini_batches)]


def split_prompts(sizes: Sequence[int], mini_batches: int, copies: int) -> list[list[list[int]]]:
    """Return the prompts of each mini-batch and model copy, with nearly equal numbers of samples.

    Prompts of size 0 are left out. Equal sizes give contiguous blocks: a mini-batch holds equal prompts for any number
    of copies. With fewer prompts than bins, bins stay empty. A whole mini-batch is empty only with fewer prompts than
    mini-batches.
    """
    prompts, num_bins = [prompt for prompt, size in enumerate(sizes) if size], mini_batches * copies
    if len({sizes[prompt] for prompt in prompts}) == 1 and len(prompts) >= num_bins:
        blocks = [np.array_split(mini, copies) for mini in np.array_split(np.array(prompts), mini_batches)]
        return [[share.tolist() for share in block] for block in blocks]
    indices = partition_into([sizes[prompt] for prompt in prompts], min(num_bins, len(prompts)))
    bins = [[prompts[index] for index in of_bin] for of_bin in indices]
    bins += [[] for _ in range(num_bins - len(bins))]
    if not bins[-1]:
        return [bins[n::mini_batches] for n in range(mini_batches)]
    return [bins[n * copies : (n + 1) * copies] for n in range(mini_batches)]


def exchange_prompts(
    groups: Sequence[Sequence[Sequence[int]]], sizes: Mapping[int, int] | Sequence[int]
) -> list[list[list[int]]]:
    """Return the prompts of each group and mini-batch with nearly equal numbers of samples in the mini-batches.

    sizes: number of samples by prompt. Prompts change places only with prompts at equal positions, the largest into the
    mini-batch with the fewest samples to date. Each mini-batch keeps its number of prompts. Mini-batches of a group
    with equal lengths differ by at most as many samples as two prompts. Prompts of equal sizes stay.
    """
    exchanged = [[list(mini) for mini in group] for group in groups]
    loads = [0] * len(exchanged[0])
    rows: list[tuple[bool, int, list[tuple[list[int], int, int]]]] = []
    for group in exchanged:
        for place in range(max(map(len, group))):
            row = [(mini, place, index) for index, mini in enumerate(group) if place < len(mini)]
            row_sizes = [sizes[mini[place]] for mini, *_ in row]
            rows.append((len(row) == len(group), min(row_sizes) - max(row_sizes), row))
    # Begin with places that not all mini-batches have, and with large differences: later places level them.
    for _, difference, row in sorted(rows, key=lambda item: item[:2]):
        prompts = [mini[place] for mini, place, _ in row]
        if difference:
            prompts.sort(key=lambda prompt: -sizes[prompt])
            row.sort(key=lambda item: loads[item[2]])
        for (mini, place, index), prompt in zip(row, prompts, strict=True):
            mini[place] = prompt
            loads[index] += sizes[prompt]
    return exchanged


def join_selections(selections: Sequence[Selection], rule: SamplingRule) -> Selection:
    """Join selections of different prompts, in the order of (prompt, sample)."""
    columns = ([getattr(selection, name) for selection in selections] for name in ("prompts", "samples", "rewards"))
    prompts, samples, rewards = map(np.concatenate, columns)
    order = np.lexsort((samples, prompts))
    pools = sorted(chain(*(selection.pools for selection in selections)), key=lambda pool: pool.prompt)
    drawn = np.concatenate([selection.drawn for selection in selections], axis=1)
    metrics = merge(selection.metrics for selection in selections)
    return Selection(prompts[order], samples[order], rewards[order], tuple(pools), rule, drawn, metrics)
