"""Which rank draws which samples of a step, and which rank trains on those that are selected.

The prompts of a step are numbered 0..B-1 in the order of the data; refill continues with B, B+1, ... After sampling,
all ranks know the reward of every (prompt, sample). Each rank computes the whole selection from these.

- ``SequenceAssignment``, for a fixed number of samples per prompt, assigns single sequences. Sequence
  ``s = prompt * G + sample`` belongs to mini-batch ``s // (B * G / N)``, of which each data-parallel rank has an equal,
  contiguous share.
- ``PromptAssignment``, for rules that look at rewards, assigns whole prompts: to mini-batches, to model copies, and to
  the ranks of a copy.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.core.choices.stopping import Allotted, SamplingRule, Uniform
from megarl.core.metrics import merge
from megarl.core.packing import partition_into
from megarl.core.sampling.collector import Ask, Collector, Selection
from megarl.errors import ConfigError
from megarl.rollout.player import Asker

Key = tuple[int, int]
"""(prompt, sample)."""
Rewards = Mapping[Key, float | None]
"""The reward of each sample that any rank has drawn; None if it failed."""


@dataclass(frozen=True, slots=True)
class RankCoordinates:
    """Where a rank is. The ranks of one model copy train on the same sequences, different copies on different ones."""

    copy: int
    copies: int
    rank: int
    """In the copy."""
    ranks: int
    """Of each copy."""


@dataclass(frozen=True, slots=True)
class Refill:
    """DAPO's dynamic sampling; see ``megarl.core.sampling.collector``. Both numbers are over all ranks."""

    max_prompts: int
    """Prompts that may be begun."""
    spare: int
    """Prompts that are drawn ahead."""


class SequenceAssignment:
    """Assigns single sequences. All of them train, and all prompts have the same number of samples.

    Every rank has an assignment for a step, for its own coordinates.
    """

    def __init__(self, rule: Uniform, num_prompts: int, mini_batches: int, at: RankCoordinates) -> None:
        self._rule, self._num_prompts = rule, num_prompts
        shares = split_sequences(num_prompts * rule.num_samples, mini_batches, at.copy, at.copies)
        self._own = [[divmod(sequence, rule.num_samples) for sequence in share] for share in shares]
        keys = [key for share in self._own for key in share]
        self._mine = [keys[i] for i in np.array_split(np.arange(len(keys)), at.ranks)[at.rank]]

    def asker(self) -> Asker:
        """Return what asks for the samples that this rank draws."""
        return FixedSamples(self._mine)

    def select(self, rewards: Rewards) -> Selection:
        """Return the samples that train, equal on all ranks."""
        return select_samples(Collector(self._rule, self._num_prompts), rewards)

    def own_keys(self, selection: Selection) -> list[list[Key]]:
        """Return the samples that this model copy trains on, by mini-batch.

        Sequences without a reward are included: they keep their place, but do not train.
        """
        return self._own


class PromptAssignment:
    """Assigns whole prompts, for any rule; its methods are those of ``SequenceAssignment``."""

    def __init__(
        self,
        rule: SamplingRule,
        num_prompts: int,
        mini_batches: int,
        at: RankCoordinates,
        *,
        refill: Refill | None = None,
        seed: int | None = None,
    ) -> None:
        """``seed``: see ``Collector``."""
        self._rule, self._num_prompts, self._at = rule, num_prompts, at
        self._refill, self._seed = refill, seed
        sizes = [1] * num_prompts
        if isinstance(rule, Allotted):
            sizes = [min(count, rule.train_size or count) for count in rule.counts]
        self._bins = split_prompts(sizes, mini_batches, at.copies)

    def asker(self) -> Asker:
        share = self._share(self._at.copy, self._at.rank)
        if share is not None:
            return share
        if self._num_places(self._at.copy) or self._at.rank:
            return FixedSamples([])
        # A copy without prompts needs something to run the model on: a sample that does not train.
        assert isinstance(self._rule, Allotted), "other rules have a prompt for each copy"
        prompt, count = max(enumerate(self._rule.counts), key=lambda item: item[1])
        count += max(self._rule.more[prompt]) if self._rule.more else 0
        return FixedSamples([(prompt, count + self._at.copy)])

    def select(self, rewards: Rewards) -> Selection:
        if self._refill is None:
            return select_samples(Collector(self._rule, self._num_prompts, seed=self._seed), rewards)
        shares = [self._share(copy, rank) for copy in range(self._at.copies) for rank in range(self._at.ranks)]
        return join_selections([select_samples(share, rewards) for share in shares if share is not None], self._rule)

    def own_keys(self, selection: Selection) -> list[list[Key]]:
        if self._refill is None:
            parts = [set(mini[self._at.copy]) for mini in self._bins]
        else:
            # The prompts that found a place are known only now: split this copy's evenly over the mini-batches.
            shares = [self._share(self._at.copy, rank) for rank in range(self._at.ranks)]
            mine = np.concatenate([[], *(share.numbers for share in shares if share is not None)])
            prompts = np.intersect1d([pool.prompt for pool in selection.pools], mine).astype(np.int64)
            parts = [set(part.tolist()) for part in np.array_split(prompts, len(self._bins))]
        keys = selection.keys
        return [[key for key in keys if key[0] in part] for part in parts]

    def _share(self, copy: int, rank: int) -> Collector | None:
        """Return the collector of the prompts that a rank may begin; None if it has no prompts."""
        ranks = self._at.ranks
        first = sorted(prompt for mini in self._bins for prompt in mini[copy])[rank::ranks]
        if not first:
            return None
        if self._refill is None:
            return Collector(self._rule, len(first), numbers=first)
        # New prompts go in turn to the ranks that have places. So no two ranks begin the same prompt, none is left
        # out, and ranks need not communicate.
        in_turn = [(c, r) for c in range(self._at.copies) for r in range(min(ranks, self._num_places(c)))]
        turn, turns = in_turn.index((copy, rank)), len(in_turn)
        numbers = [*first, *range(self._num_prompts + turn, self._refill.max_prompts, turns)]
        seed = None if self._seed is None else self._seed + turn
        spare = -(-self._refill.spare // turns)
        options = {"refill": True, "spare": spare, "max_prompts": len(numbers), "seed": seed, "numbers": numbers}
        return Collector(self._rule, len(first), **options)

    def _num_places(self, copy: int) -> int:
        """The number of prompts that a model copy trains on."""
        return sum(len(mini[copy]) for mini in self._bins)


Assignment = SequenceAssignment | PromptAssignment


class FixedSamples:
    """Asks for given samples, whatever their rewards are."""

    done = False

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = keys

    def start(self) -> list[Ask]:
        return [Ask(prompt, range(sample, sample + 1)) for prompt, sample in self._keys]

    def add(self, prompt: int, sample: int, reward: float | None) -> list[Ask]:
        return []


def split_sequences(num_sequences: int, mini_batches: int, rank: int, ranks: int) -> list[list[int]]:
    """Return the sequences of data-parallel rank ``rank`` of ``ranks``, by mini-batch; ConfigError if uneven."""
    per_mini, rest = divmod(num_sequences, mini_batches)
    share, uneven = divmod(per_mini, ranks)
    if rest or uneven:
        raise ConfigError(
            f"{num_sequences} responses of a step do not divide into {mini_batches} mini-batches of {ranks} equal parts"
        )
    return [list(range(n * per_mini + rank * share, n * per_mini + (rank + 1) * share)) for n in range(mini_batches)]


def split_prompts(sizes: Sequence[int], mini_batches: int, copies: int) -> list[list[list[int]]]:
    """Return the prompts of each mini-batch and model copy, with nearly equal numbers of samples.

    Prompts of size 0 are left out. Equal sizes give contiguous blocks, so that a mini-batch holds the same prompts for
    any number of copies. With fewer prompts than parts, some parts are empty. A whole mini-batch is empty only if there
    are fewer prompts than mini-batches.
    """
    some = [prompt for prompt, size in enumerate(sizes) if size]
    if len({sizes[prompt] for prompt in some}) == 1 and len(some) >= mini_batches * copies:
        blocks = [np.array_split(mini, copies) for mini in np.array_split(np.array(some), mini_batches)]
        return [[part.tolist() for part in block] for block in blocks]
    indices = partition_into([sizes[prompt] for prompt in some], min(mini_batches * copies, len(some)))
    parts = [[some[index] for index in part] for part in indices]
    parts += [[] for _ in range(mini_batches * copies - len(parts))]
    if not parts[-1]:
        return [parts[n::mini_batches] for n in range(mini_batches)]
    return [parts[n * copies : (n + 1) * copies] for n in range(mini_batches)]


def select_samples(collector: Collector, rewards: Rewards) -> Selection:
    """Return what a collector selects if it is given the rewards of samples that were drawn earlier."""
    asks = deque(collector.start())
    while asks and not collector.done:
        ask = asks.popleft()
        for sample in ask.samples:
            if (ask.prompt, sample) in rewards:
                asks.extend(collector.add(ask.prompt, sample, rewards[ask.prompt, sample]))
    return collector.select()


def join_selections(selections: Sequence[Selection], rule: SamplingRule) -> Selection:
    """Return selections of different prompts as one, in the order of (prompt, sample)."""
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
