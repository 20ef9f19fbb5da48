"""Who draws and trains what: each prompt once, each selected sample once, the same on all ranks, in any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.choices.stopping import Allotted, SamplingRule, Sequential, Uniform, ada_seq_balance, ada_seq_pos
from megarl.core.metrics import finalize
from megarl.core.sampling.collector import Collector, FixedSamples, Key, Selection
from megarl.errors import ConfigError
from megarl.trainer.sampling.assignment import (
    Assignment,
    PromptAssignment,
    RankCoordinates,
    SequenceAssignment,
    exchange_prompts,
    split_prompts,
    split_sequences,
)

Reward = Callable[[int, int], float | None]
RULES: list[SamplingRule] = [
    ada_seq_balance(round_size=3, max_samples=9),
    ada_seq_pos(2, round_size=2, max_samples=6),
    Uniform(5, 2),
    Uniform(3),
    Sequential(1, 1, 1, 7, train_size=None),
]


def rewards_of(seed: int, rate: float, failing: float = 0.0, prompts: int = 128) -> Reward:
    """0 or 1 by (prompt, sample), drawn beforehand; None where it fails."""
    rng = np.random.default_rng(seed)
    good, fails = rng.random((prompts, 16)) < rate, rng.random((prompts, 16)) < failing
    return lambda prompt, sample: None if fails[prompt, sample] else float(good[prompt, sample])


@dataclass
class Ranks:
    """All ranks of a layout: their assignments, by copy and rank."""

    assignments: list[list[Assignment]]

    @classmethod
    def of(cls, make: Callable[[RankCoordinates], Assignment], copies: int, ranks: int) -> Ranks:
        return cls(
            [[make(RankCoordinates(copy, copies, rank, ranks)) for rank in range(ranks)] for copy in range(copies)]
        )

    def draw(self, reward: Reward, seed: int) -> list[list[dict[Key, float | None]]]:
        """What each rank has when its asker is content; samples arrive in a random order."""
        rng = np.random.default_rng(seed)
        return [[_drawn(assignment, reward, rng) for assignment in copy] for copy in self.assignments]

    def agreed(self, drawn: list[list[dict[Key, float | None]]]) -> tuple[Selection, list[list[list[Key]]]]:
        """The selection, and what each copy trains on by mini-batch; all ranks must find the same."""
        known = {key: reward for copy in drawn for rank in copy for key, reward in rank.items()}
        found = [[assignment.select(known) for assignment in copy] for copy in self.assignments]
        for each in (selection for copy in found for selection in copy):
            same(each, found[0][0])
        owned = [[assignment.keys_of(found[0][0]) for assignment in copy] for copy in self.assignments]
        for of_copy in owned:
            assert all(own == of_copy[0] for own in of_copy)
        return found[0][0], [of_copy[0] for of_copy in owned]


def _drawn(assignment: Assignment, reward: Reward, rng: np.random.Generator) -> dict[Key, float | None]:
    asker, got, waiting = assignment.asker(), {}, []

    def ask(asks: Any) -> None:
        waiting.extend((each.prompt, sample) for each in asks for sample in each.samples)

    ask(asker.start())
    while waiting and not asker.done:
        prompt, sample = waiting.pop(int(rng.integers(len(waiting))))
        assert (prompt, sample) not in got
        got[prompt, sample] = reward(prompt, sample)
        ask(asker.add(prompt, sample, got[prompt, sample]))
    return got


def same(first: Selection, second: Selection) -> None:
    for name in ("prompts", "samples", "rewards", "drawn"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert [(pool.prompt, pool.rewards, pool.asked) for pool in first.pools] == [
        (pool.prompt, pool.rewards, pool.asked) for pool in second.pools
    ]


def keys_of(selection: Selection) -> list[Key]:
    return list(zip(selection.prompts.tolist(), selection.samples.tolist(), strict=True))


def driven(collector: Collector, reward: Reward) -> Selection:
    """What one collector selects of all of it, first asked first."""
    waiting = [(ask.prompt, sample) for ask in collector.start() for sample in ask.samples]
    while not collector.done:
        prompt, sample = waiting.pop(0)
        asks = collector.add(prompt, sample, reward(prompt, sample))
        waiting += [(ask.prompt, i) for ask in asks for i in ask.samples]
    return collector.select()


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4))
def test_owned_sequences_are_a_partition_of_equal_contiguous_shares(mini_batches: int, ranks: int, share: int) -> None:
    total = mini_batches * ranks * share
    parts = [split_sequences(total, mini_batches, rank, ranks) for rank in range(ranks)]
    per_mini = total // mini_batches
    for n in range(mini_batches):
        joined = [s for rank in range(ranks) for s in parts[rank][n]]
        assert joined == list(range(n * per_mini, (n + 1) * per_mini))
        assert {len(parts[rank][n]) for rank in range(ranks)} == {share}
    if mini_batches * ranks > 1:
        with pytest.raises(ConfigError, match="do not divide"):
            split_sequences(total + 1, mini_batches, 0, ranks)


class TestSplitPrompts:
    @given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 6), st.integers(0, 20))
    def test_equal_sizes_make_mini_batches_that_no_layout_changes(
        self, mini_batches: int, copies: int, size: int, more: int
    ) -> None:
        prompts = mini_batches * copies + more
        alone = split_prompts([size] * prompts, mini_batches, 1)
        dealt = split_prompts([size] * prompts, mini_batches, copies)
        assert [list(chain(*mini)) for mini in dealt] == [mini[0] for mini in alone]
        assert list(chain(*(mini[0] for mini in alone))) == list(range(prompts))
        sizes = [len(part) for mini in dealt for part in mini]
        assert max(sizes) - min(sizes) <= 2

    @settings(deadline=None)
    @given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 3), st.integers(1, 3))
    def test_allotted_counts_are_balanced_and_prompts_without_samples_left_out(
        self, sizes: list[int], mini_batches: int, copies: int
    ) -> None:
        some = [prompt for prompt, size in enumerate(sizes) if size]
        if not some:
            return
        dealt = split_prompts(sizes, mini_batches, copies)
        assert len(dealt) == mini_batches
        assert {len(mini) for mini in dealt} == {copies}
        parts = [part for mini in dealt for part in mini]
        assert sorted(chain(*parts)) == some
        assert sum(map(bool, parts)) == min(len(some), len(parts))
        # A mini-batch without any prompt would be an update by nothing: only where there are fewer prompts than those.
        assert sum(any(mini) for mini in dealt) == min(len(some), mini_batches)
        if len(some) < len(parts):
            return
        loads = [sum(sizes[prompt] for prompt in part) for part in parts]
        assert max(loads) - min(loads) <= max(sizes)


class TestSequencePlan:
    @settings(max_examples=40, deadline=None)
    @given(
        prompts=st.integers(1, 6),
        size=st.integers(1, 4),
        mini_batches=st.integers(1, 4),
        copies=st.integers(1, 3),
        ranks=st.integers(1, 3),
        seed=st.integers(0, 99),
    )
    def test_every_sequence_is_drawn_once_and_trained_once(
        self, prompts: int, size: int, mini_batches: int, copies: int, ranks: int, seed: int
    ) -> None:
        prompts *= mini_batches * copies
        rule = Uniform(size)
        layout = Ranks.of(lambda at: SequenceAssignment(rule, prompts, mini_batches, at), copies, ranks)
        reward = rewards_of(seed, 0.5, failing=0.2)
        drawn = layout.draw(reward, seed)
        everything = [(prompt, sample) for prompt in range(prompts) for sample in range(size)]
        assert sorted(key for copy in drawn for rank in copy for key in rank) == everything
        selection, owned = layout.agreed(drawn)
        same(selection, driven(Collector(rule, prompts), reward))
        # Those without a reward keep their places, so the mini-batches are those of the sequences.
        assert [[key for own in owned for key in own[n]] for n in range(mini_batches)] == [
            everything[n * len(everything) // mini_batches : (n + 1) * len(everything) // mini_batches]
            for n in range(mini_batches)
        ]
        for copy, own in zip(drawn, owned, strict=True):
            assert {key for rank in copy for key in rank} == {key for part in own for key in part}
            assert max(map(len, copy)) - min(map(len, copy)) <= 1


class TestGroupPlan:
    @settings(max_examples=80, deadline=None)
    @given(
        rule=st.one_of(st.sampled_from(RULES), st.lists(st.integers(0, 7), min_size=16, max_size=16)),
        mini_batches=st.integers(1, 3),
        copies=st.integers(1, 3),
        ranks=st.integers(1, 3),
        more=st.integers(0, 7),
        seed=st.integers(0, 10**6),
        chosen_by=st.sampled_from([None, 5]),
        failing=st.sampled_from([0.0, 0.3, 1.0]),
    )
    def test_without_refill_ranks_together_are_one_collector(
        self,
        rule: SamplingRule | list[int],
        mini_batches: int,
        copies: int,
        ranks: int,
        more: int,
        seed: int,
        chosen_by: int | None,
        failing: float,
    ) -> None:
        """A list is of counts that are allotted, at least one prompt for each part."""
        prompts = mini_batches * copies + more
        counts = [1] * (mini_batches * copies) + rule[:more] if isinstance(rule, list) else None
        rule = rule if counts is None else Allotted(tuple(counts))
        reward = rewards_of(seed, 0.4, failing)
        layout = Ranks.of(lambda at: PromptAssignment(rule, prompts, mini_batches, at, seed=chosen_by), copies, ranks)
        drawn = layout.draw(reward, seed)
        selection, owned = layout.agreed(drawn)
        same(selection, driven(Collector(rule, prompts, seed=chosen_by), reward))
        _drawn_by_one_rank_and_trained_by_one_copy(drawn, selection, owned)
        if counts is not None:
            samples = [prompt for copy in drawn for rank in copy for prompt, _ in rank]
            assert selection.drawn[1].tolist() == np.bincount(samples, minlength=prompts).tolist() == counts
            return
        alone = Ranks.of(lambda at: PromptAssignment(rule, prompts, mini_batches, at, seed=chosen_by), 1, 1)
        _, (whole,) = alone.agreed(alone.draw(reward, seed + 1))
        assert [sorted(key for own in owned for key in own[n]) for n in range(mini_batches)] == whole

    @settings(max_examples=60, deadline=None)
    @given(
        mini_batches=st.integers(1, 4),
        copies=st.integers(1, 3),
        places=st.integers(1, 6),
        rate=st.sampled_from([0.1, 0.4, 0.9]),
        refill=st.sampled_from([None, dict(max_prompts=128, spare=0)]),
        seed=st.integers(0, 10**6),
    )
    def test_mini_batches_are_balanced_by_samples_and_not_by_prompts(
        self, mini_batches: int, copies: int, places: int, rate: float, refill: dict[str, int] | None, seed: int
    ) -> None:
        rule, prompts = Sequential(1, 1, 2, 16, train_size=None), mini_batches * copies * places
        layout = Ranks.of(lambda at: PromptAssignment(rule, prompts, mini_batches, at, **(refill or {})), copies, 1)
        selection, owned = layout.agreed(layout.draw(rewards_of(seed, rate), seed))
        sizes = np.bincount(selection.prompts)
        loads = [sum(len(own[n]) for own in owned) for n in range(mini_batches)]
        placed = [len({key[0] for own in owned for key in own[n]}) for n in range(mini_batches)]
        assert sum(loads) == len(selection.prompts)
        if refill is None:
            assert set(placed) == {places * copies}
            assert max(loads) - min(loads) <= sizes.max() - sizes[sizes > 0].min()

    def test_unequal_numbers_that_came_out_as_28_and_50(self) -> None:
        sizes = [2, 2, 4, 2, 16, 2, 8, 2, 8, 8, 8, 16]
        assert sum(sizes[:6]) == 28
        (parts,) = exchange_prompts([[range(6), range(6, 12)]], sizes)
        assert [sum(sizes[prompt] for prompt in part) for part in parts] == [40, 38]
        assert sorted(chain(*parts)) == list(range(12))
        assert exchange_prompts([[[0, 1], [3, 5]]], sizes) == [[[0, 1], [3, 5]]]  # equal ones stay

    def test_more_ranks_in_a_copy_than_prompts_leave_some_idle(self) -> None:
        for refill in (None, dict(max_prompts=12, spare=2)):
            layout = Ranks.of(lambda at, refill=refill: PromptAssignment(Uniform(2), 2, 1, at, **(refill or {})), 1, 3)
            drawn = layout.draw(rewards_of(0, 0.5), 0)
            if refill is not None:  # and leave no prompt to them
                flat = layout.draw(lambda prompt, sample: 1.0, 0)
                assert sorted({prompt for rank in flat[0] for prompt, _ in rank}) == list(range(12))
            assert [bool(rank) for rank in drawn[0]] == [True, True, False]
            assert isinstance(layout.assignments[0][2].asker(), FixedSamples)
            selection, (own,) = layout.agreed(drawn)
            assert len(np.unique(selection.prompts)) == 2
            assert own == [keys_of(selection)]

    def test_a_copy_without_prompts_draws_a_sample_for_company_that_nobody_trains_on(self) -> None:
        rule = Allotted((0, 6, 0))
        busy, idle = (PromptAssignment(rule, 3, 2, RankCoordinates(copy, 2, 0, 1)) for copy in (0, 1))
        assert [(ask.prompt, ask.samples) for ask in busy.asker().start()] == [(1, range(6))]
        assert [(ask.prompt, ask.samples) for ask in idle.asker().start()] == [(1, range(7, 8))]
        rewards: dict[Key, float | None] = {(1, sample): float(sample % 2) for sample in (*range(6), 7)}
        for assignment in (busy, idle):
            selection = assignment.select(rewards)
            assert keys_of(selection) == [(1, sample) for sample in range(6)]
        assert [len(part) for part in busy.keys_of(selection)] == [6, 0]
        assert idle.keys_of(selection) == [[], []]
        other = PromptAssignment(rule, 3, 2, RankCoordinates(1, 2, 1, 2))  # one rank of a copy is enough
        assert not list(other.asker().start())


def _drawn_by_one_rank_and_trained_by_one_copy(
    drawn: list[list[dict[Key, float | None]]], selection: Selection, owned: list[list[list[Key]]]
) -> None:
    by_rank = [{prompt for prompt, _ in rank} for copy in drawn for rank in copy]
    assert sum(map(len, by_rank)) == len(set().union(*by_rank))
    assert sorted(key for own in owned for part in own for key in part) == keys_of(selection)
    parts = [{prompt for prompt, _ in part} for own in owned for part in own]
    assert sum(map(len, parts)) == len(set().union(*parts))
    for copy, own in zip(drawn, owned, strict=True):
        assert {key for part in own for key in part} <= {key for rank in copy for key in rank}
        assert all(part == sorted(part) for part in own)


class TestRefill:
    @settings(max_examples=120, deadline=None)
    @given(
        rule=st.sampled_from(RULES),
        mini_batches=st.integers(1, 3),
        copies=st.integers(1, 3),
        ranks=st.integers(1, 3),
        more=st.integers(0, 5),
        spare=st.integers(0, 5),
        limit=st.integers(0, 60),
        rate=st.sampled_from([0.05, 0.3, 0.9, 1.0]),
        seed=st.integers(0, 10**6),
        chosen_by=st.sampled_from([None, 5]),
    )
    def test_what_trains_depends_neither_on_the_order_of_arrival_nor_on_what_was_cut_short(
        self,
        rule: SamplingRule,
        mini_batches: int,
        copies: int,
        ranks: int,
        more: int,
        spare: int,
        limit: int,
        rate: float,
        seed: int,
        chosen_by: int | None,
    ) -> None:
        prompts = mini_batches * copies + more
        refill = dict(max_prompts=prompts + limit, spare=spare)
        reward = rewards_of(seed, rate, failing=0.1)
        layout = Ranks.of(
            lambda at: PromptAssignment(rule, prompts, mini_batches, at, **refill, seed=chosen_by), copies, ranks
        )
        found = []
        for order in (seed, seed + 1):
            drawn = layout.draw(reward, order)
            selection, owned = layout.agreed(drawn)
            _drawn_by_one_rank_and_trained_by_one_copy(drawn, selection, owned)
            assert max(key[0] for copy in drawn for rank in copy for key in rank) < refill["max_prompts"]
            places = _places_of_ranks(prompts, mini_batches, copies, ranks)
            turns = sum(place > 0 for place in chain(*places))
            turn = 0
            for rank, place in zip(chain(*drawn), chain(*places), strict=True):
                begun = {prompt for prompt, _ in rank}
                mine = [prompt for prompt in np.unique(selection.prompts).tolist() if prompt in begun]
                assert mine == _first_with_contrast(rule, rank, reward)[:place]
                # A place stays empty only if the rank has tried all that it may.
                may_begin = place + len(range(prompts + turn, refill["max_prompts"], turns)) if place else 0
                assert len(mine) == place or len(begun) == may_begin
                turn += place > 0
            found.append((keys_of(selection), owned))
            for own in owned:
                sizes = [len({prompt for prompt, _ in part}) for part in own]
                assert max(sizes) - min(sizes) <= 1
        assert found[0] == found[1]

    def test_no_contrast_at_all_draws_up_to_the_limit_and_selects_nothing(self) -> None:
        layout = Ranks.of(lambda at: PromptAssignment(Uniform(2), 4, 2, at, max_prompts=11), 2, 1)
        drawn = layout.draw(lambda prompt, sample: 1.0, 0)
        assert sorted({prompt for copy in drawn for rank in copy for prompt, _ in rank}) == list(range(11))
        selection, owned = layout.agreed(drawn)
        assert len(selection.prompts) == 0
        assert owned == [[[], []], [[], []]]
        assert selection.drawn.shape == (4, 11)
        values = finalize(selection.metrics)
        assert (values["sampling/replaced_prompts"], values["sampling/missing_prompts"]) == (11, 4)

    def test_samples_of_a_class_are_chosen_at_random_per_rank_and_alike_everywhere(self) -> None:
        def chosen(seed: int | None) -> list[Key]:
            layout = Ranks.of(lambda at: PromptAssignment(Uniform(8, 2), 6, 1, at, max_prompts=24, seed=seed), 2, 1)
            return keys_of(layout.agreed(layout.draw(rewards_of(1, 0.5), 0))[0])

        assert chosen(3) == chosen(3)
        assert chosen(3) != chosen(4)
        assert chosen(None) != chosen(3)
        assert {sample for _, sample in chosen(None)} == {0, 1}


def _places_of_ranks(prompts: int, mini_batches: int, copies: int, ranks: int) -> list[list[int]]:
    dealt = split_prompts([1] * prompts, mini_batches, copies)
    sizes = [sum(len(mini[copy]) for mini in dealt) for copy in range(copies)]
    return [[len(range(size)[rank::ranks]) for rank in range(ranks)] for size in sizes]


def _first_with_contrast(rule: SamplingRule, rank: dict[Key, float | None], reward: Reward) -> list[int]:
    """Prompts of a rank whose whole pool has contrast, ascending; found from the rewards alone."""
    found = []
    for prompt in sorted({prompt for prompt, _ in rank}):
        asked = 0
        while True:
            values = [reward(prompt, sample) for sample in range(asked)]
            positives = sum(value is not None and value > 0.7 for value in values)
            negatives = sum(value is not None and value <= 0.7 for value in values)
            more = rule.next_samples(prompt, asked, positives, negatives)
            if not more:
                break
            asked += more
        if positives and negatives:
            found.append(prompt)
    return found


def test_listed_keys_are_asked_for_whatever_comes() -> None:
    listed = FixedSamples([(3, 1), (0, 0), (0, 1), (0, 3), (1, 4)])
    asked = [(ask.prompt, list(ask.samples)) for ask in listed.start()]
    assert asked == [(3, [1]), (0, [0]), (0, [1]), (0, [3]), (1, [4])]
    assert FixedSamples([]).start() == []
    assert listed.add(3, 1, 0.0) == []
    assert not listed.done
