"""What is sampled, and what of it trains: the collector, whatever the order of arrival, and subsamples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sampling_driver import drive, table

from megarl.core.choices.stopping import Allotted, Sequential, Uniform, ada_seq_balance, ada_seq_pos
from megarl.core.metrics import finalize
from megarl.core.sampling.collector import Ask, Collector, find_rows
from megarl.core.sampling.subsampling import subsample
from megarl.errors import ConfigError, NumericsError

RULES = [
    ada_seq_balance(),
    ada_seq_pos(),
    Uniform(6, 4, "balance"),
    Sequential(2, 1, 3, 13, train_size=3, fallback="any"),
]


def same(first, second):
    for name in ("prompts", "samples", "rewards", "drawn"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def metrics(selection):
    return finalize(selection.metrics)


def test_a_prompt_begins_its_next_round_without_waiting_for_another():
    collector = Collector(Sequential(1, 1, round_size=2, max_samples=4, train_size=2), num_prompts=2)
    assert collector.start() == [Ask(0, range(2)), Ask(1, range(2))]
    assert collector.add(1, 1, 0.0) == []
    assert collector.add(1, 0, 0.0) == [Ask(1, range(2, 4))]
    assert collector.add(1, 3, 1.0) == []
    assert collector.add(0, 0, 1.0) == []
    assert collector.add(1, 2, 0.0) == []
    assert not collector.done
    assert collector.outstanding() == [(0, 1)]
    with pytest.raises(ValueError, match="1 samples are still to arrive"):
        collector.select()
    assert collector.add(0, 1, 0.0) == []
    assert collector.done
    found = collector.select()
    assert found.prompts.tolist() == [0, 0, 1, 1]
    assert found.samples.tolist() == [0, 1, 0, 3]
    assert found.rewards.tolist() == [1, 0, 0, 1]
    assert found.drawn.tolist() == [[0, 1], [2, 4], [2, 4], [1, 1]]


@settings(max_examples=60, deadline=None)
@given(
    rule=st.sampled_from(RULES),
    seed=st.integers(0, 10**6),
    chosen_by=st.sampled_from([None, 5]),
    refill=st.booleans(),
    rate=st.sampled_from([0.05, 0.3, 0.9]),
)
def test_what_trains_does_not_depend_on_the_order_of_arrival(rule, seed, chosen_by, refill, rate):
    rewards = table(rate, 40, 40, seed)
    options = {"refill": True, "max_prompts": 12, "spare": 2} if refill else {}

    def collect(order):
        return drive(
            Collector(rule, 5, seed=chosen_by, **options),
            lambda prompt, sample: float(rewards[prompt, sample]),
            None if order is None else np.random.default_rng(order),
        )

    first = collect(None)
    for order in (seed, seed + 1):
        other = collect(order)
        for name in ("prompts", "samples", "rewards"):
            np.testing.assert_array_equal(getattr(first, name), getattr(other, name))
    pairs = list(zip(first.prompts.tolist(), first.samples.tolist(), strict=True))
    assert pairs == sorted(set(pairs))
    assert first.rewards.tolist() == [rewards[p, s] for p, s in pairs]
    counts = np.bincount(first.prompts, minlength=1)
    assert counts.max(initial=0) <= rule.train_size
    if not refill:
        assert np.unique(first.prompts).tolist() == list(range(5))
        assert counts.tolist() == [rule.train_size] * 5


@pytest.mark.parametrize(
    ("rule", "samples"),
    [
        (ada_seq_pos(positives=5, max_samples=8), [0, 1, 5, 6]),
        (ada_seq_pos(positives=6, max_samples=8), [0, 1, 2, 5]),
        (Sequential(1, 1, 8, 8, train_size=None), [0, 1, 2, 3, 4, 5, 6, 7]),
        (Uniform(8, train_size=2, keep="balance"), [0, 5]),
        (Uniform(8, train_size=2), [0, 1]),
        (Uniform(8), [0, 1, 2, 3, 4, 5, 6, 7]),
        (Allotted((8,)), [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_what_trains(rule, samples):
    """Five positives, then three negatives: balanced after an exit, by the fallback after giving up."""
    assert drive(Collector(rule, 1), lambda p, s: float(s < 5)).samples.tolist() == samples


def test_the_seed_chooses():
    rewards = table(0.5, 20, 8, seed=4)

    def collect(seed):
        return drive(
            Collector(Uniform(8, 4, "balance"), 20, seed=seed), lambda p, s: float(rewards[p, s])
        ).samples.tolist()

    assert collect(1) == collect(1)
    assert collect(1) != collect(2)
    assert collect(None) != collect(1)
    # prompts do not share their choice
    rewards[:] = [0, 1] * 4
    chosen = np.array(collect(1)).reshape(20, 4)
    assert len(np.unique(chosen, axis=0)) > 5


def test_samples_that_failed_count_as_drawn_and_for_nothing_else():
    rewards = {(0, 0): None, (0, 1): 1.0, (0, 2): None, (0, 3): 0.0, (1, 0): None, (1, 1): None}
    collector = Collector(Sequential(1, 1, round_size=2, max_samples=4, train_size=2), num_prompts=2)
    found = drive(collector, lambda p, s: rewards.get((p, s)))
    assert found.prompts.tolist() == [0, 0]
    assert found.samples.tolist() == [1, 3]
    assert found.drawn.tolist() == [[0, 1], [4, 4], [2, 0], [1, 0]]
    values = metrics(found)
    assert values["sampling/failed"] == 6
    assert values["sampling/short_prompts"] == 1
    assert values["sampling/resolved_fraction"] == 0.5


def test_metrics():
    rewards = np.array([[1, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0]], dtype=float)
    found = drive(Collector(Sequential(1, 1, 2, 6, 2), 3), lambda p, s: float(rewards[p, s]))
    values = metrics(found)
    assert values["sampling/samples"] == 2 + 6 + 4
    assert values["sampling/samples_per_prompt"] == 4
    assert values["sampling/rounds"] == 2
    assert values["sampling/trained"] == 6
    assert abs(values["sampling/contrast_fraction"] - 2 / 3) < 1e-12
    assert abs(values["sampling/resolved_fraction"] - 2 / 3) < 1e-12
    assert values["sampling/short_prompts"] == values["sampling/failed"] == values["sampling/missing_prompts"] == 0


def test_a_reward_at_the_threshold_is_no_positive():
    """One positive and one negative are wanted: 1.0 and 0.7 are, 0.7 and 0.7 are not, at a threshold of 0.7."""
    rewards = [[1.0, 0.7, 0.0, 0.0], [0.7, 0.7, 1.0, 1.0]]
    found = drive(Collector(Sequential(1, 1, 2, 4, 2, threshold=0.7), 2), lambda p, s: rewards[p][s])
    assert found.drawn.tolist() == [[0, 1], [2, 4], [2, 4], [1, 2]]


def test_prompts_with_only_positives_are_not_resolved():
    found = drive(Collector(Sequential(1, 1, 2, 4, 2), 2), lambda p, s: float(p == 1 or s == 0))
    assert metrics(found)["sampling/resolved_fraction"] == 0.5


def test_a_prompt_with_one_reward_is_counted_as_lone():
    found = drive(Collector(Uniform(2), 3), lambda p, s: None if (p, s) == (0, 1) else 1.0)
    assert metrics(found)["sampling/lone_prompts"] == 1


class TestRefill:
    def test_prompts_without_contrast_are_replaced_at_once(self):
        rewards = {0: (1, 1), 1: (0, 1), 2: (0, 0), 3: (1, 0)}
        collector = Collector(Uniform(2), 2, refill=True, max_prompts=10)
        assert [ask.prompt for ask in collector.start()] == [0, 1]
        assert collector.add(0, 0, 1.0) == []
        assert collector.add(0, 1, 1.0) == [Ask(2, range(2))]
        collector.add(2, 1, 0.0)
        assert collector.add(2, 0, 0.0) == [Ask(3, range(2))]
        for prompt in (1, 3):
            for sample in (0, 1):
                assert collector.add(prompt, sample, float(rewards[prompt][sample])) == []
        found = collector.select()
        assert found.prompts.tolist() == [1, 1, 3, 3]
        assert [pool.prompt for pool in found.pools] == [1, 3]
        # estimates learn from those that were replaced, too
        assert found.drawn[[0, 3]].tolist() == [[0, 1, 2, 3], [2, 1, 0, 1]]
        assert metrics(found)["sampling/replaced_prompts"] == 2

    @pytest.mark.parametrize("spare", [0, 3])
    def test_the_batch_is_the_first_prompts_with_contrast(self, spare):
        rewards = table(0.15, 80, 4, seed=9)
        mixed = [p for p in range(80) if 0 < rewards[p].sum() < 4]
        for order in range(5):
            collector = Collector(Uniform(4), 8, refill=True, max_prompts=80, spare=spare)
            found = drive(collector, lambda p, s: float(rewards[p, s]), np.random.default_rng(order))
            assert np.unique(found.prompts).tolist() == mixed[:8]
            if not spare:
                # exactly as many as a walk through the prompts in order
                assert found.drawn.shape[1] == mixed[7] + 1
                assert collector.outstanding() == []

    def test_a_limit_leaves_places_empty(self):
        rewards = table([0.0, 0.0, 0.5, 0.0, 1.0, 0.0], 6, 8, seed=1)
        found = drive(Collector(Uniform(8), 3, refill=True, max_prompts=6), lambda p, s: float(rewards[p, s]))
        assert np.unique(found.prompts).tolist() == [2]
        assert metrics(found)["sampling/missing_prompts"] == 2
        assert metrics(found)["sampling/replaced_prompts"] == 5
        none = drive(Collector(Uniform(2), 2, refill=True, max_prompts=3), lambda p, s: 1.0)
        assert none.prompts.size == none.samples.size == none.rewards.size == len(none.pools) == 0

    def test_late_samples_of_prompts_that_are_not_needed_change_nothing(self):
        collector = Collector(Uniform(2), 1, refill=True, max_prompts=5, spare=2)
        collector.start()
        collector.add(0, 0, 1.0)
        collector.add(0, 1, 0.0)
        assert collector.done
        assert len(collector.outstanding()) == 4
        before = collector.select()
        for prompt, sample in collector.outstanding():
            assert collector.add(prompt, sample, 0.0) == []
        same(before, collector.select())


def test_allotted_counts():
    found = drive(Collector(Allotted((2, 0, 3)), 3), lambda p, s: float(p == 2 and s == 1), np.random.default_rng(0))
    assert found.prompts.tolist() == [0, 0, 2, 2, 2]
    assert [pool.num_asked for pool in found.pools] == [2, 0, 3]
    assert metrics(found)["sampling/short_prompts"] == 0
    nothing = Collector(Allotted((0, 0)), 2)
    assert nothing.start() == []
    assert nothing.done
    assert nothing.select().prompts.size == 0


@pytest.mark.parametrize("options", [{}, {"refill": True, "max_prompts": 5, "spare": 1}])
def test_prompts_with_numbers_are_chosen_from_alike(options):
    numbers = [7, 2, 11, 4, 20]
    place = {number: index for index, number in enumerate(numbers)}
    rewards = table(0.5, 5, 6, seed=1)
    rule = Uniform(6, 4, "balance")
    plain = drive(Collector(rule, 3, seed=9, **options), lambda p, s: float(rewards[p, s]))
    named = drive(Collector(rule, 3, seed=9, numbers=numbers, **options), lambda p, s: float(rewards[place[p], s]))
    assert named.prompts.tolist() == [numbers[p] for p in plain.prompts]
    assert [pool.prompt for pool in named.pools] == [numbers[pool.prompt] for pool in plain.pools]
    assert named.drawn[0].tolist() == [numbers[p] for p in plain.drawn[0]]
    np.testing.assert_array_equal(named.samples, plain.samples)
    np.testing.assert_array_equal(named.drawn[1:], plain.drawn[1:])


def test_an_allotted_count_is_that_of_the_number():
    collector = Collector(Allotted((5, 1, 3)), 2, numbers=[2, 1])
    assert collector.start() == [Ask(2, range(3)), Ask(1, range(1))]
    with pytest.raises(ValueError, match="prompt 0 sample 0 was not asked for"):
        collector.add(0, 0, 1.0)


def test_refusals():
    collector = Collector(Uniform(2), 1)
    collector.start()
    for prompt, sample in ((1, 0), (-1, 0), (0, 2), (0, -1)):
        with pytest.raises(ValueError, match="was not asked for"):
            collector.add(prompt, sample, 1.0)
    with pytest.raises(NumericsError, match="prompt 0 sample 1: the reward is nan"):
        collector.add(0, 1, math.nan)
    collector.add(0, 1, 1.0)
    with pytest.raises(ValueError, match="arrived twice"):
        collector.add(0, 1, 1.0)


@example(keys=[(0, 0), (0, 3), (1, 0)], wanted=[(1, 0), (1, 1)])
@example(keys=[(0, 0), (1, 0)], wanted=[(0, 1), (1, 0)])
@given(
    keys=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), unique=True, max_size=20),
    wanted=st.lists(st.tuples(st.integers(-1, 8), st.integers(0, 9)), max_size=20),
)
def test_rows_are_found_by_prompt_and_sample(keys, wanted):
    keys = sorted(keys)
    columns, asked = (np.array(each, np.int64).reshape(-1, 2).T for each in (keys, wanted))
    row_of = {key: row for row, key in enumerate(keys)}
    assert find_rows(*columns, *asked).tolist() == [row_of.get(key, len(keys)) for key in wanted]


@pytest.mark.parametrize("options", [{}, {"refill": True, "max_prompts": 6, "spare": 1}])
def test_a_replay_selects_what_was_selected_as_the_samples_arrived(options):
    rule, rewards = Sequential(1, 1, 2, 6, train_size=2), table(0.3, 6, 6, seed=3)
    drawn = {(prompt, sample): float(rewards[prompt, sample]) for prompt in range(6) for sample in range(6)}
    found = Collector(rule, 3, **options).replay(drawn)
    same(found, drive(Collector(rule, 3, **options), lambda p, s: float(rewards[p, s])))
    assert len(found.prompts) == 6
    with pytest.raises(ValueError, match="2 samples are still to arrive"):
        Collector(rule, 1).replay({})
    with pytest.raises(NumericsError, match="prompt 0 sample 1: the reward is nan"):
        Collector(rule, 1).replay({(0, 0): 1.0, (0, 1): math.nan})


pools = st.lists(st.sampled_from([0.0, 0.2, 0.7, 0.71, 1.0]), max_size=20)


@pytest.mark.parametrize(
    ("rewards", "n", "rule", "chosen"),
    [
        # the first two of each class
        ([0, 1, 0, 0, 1, 1], 4, "balance", [0, 1, 2, 4]),
        # n odd: the larger half is negative
        ([1, 1, 1, 0, 0, 0], 5, "balance", [0, 1, 3, 4, 5]),
        # one class is short, or absent: filled from the other
        ([0, 0, 0, 1, 0, 0], 4, "balance", [0, 1, 2, 3]),
        ([1, 1, 1, 1, 1, 0], 4, "balance", [0, 1, 2, 5]),
        ([0, 0, 0, 0, 0], 4, "balance", [0, 1, 2, 3]),
        ([1, 1, 1, 1, 1], 4, "balance", [0, 1, 2, 3]),
        # fewer than n: all
        ([0, 1, 0], 4, "balance", [0, 1, 2]),
        ([], 4, "balance", []),
        # ceil(4 * 5 / 8) = 3 positives; at least one, and at most all but one
        ([1, 1, 1, 1, 1, 0, 0, 0], 4, "pos", [0, 1, 2, 5]),
        ([0, 0, 0, 0, 0, 0, 0, 1], 4, "pos", [0, 1, 2, 7]),
        ([1, 1, 1, 1, 1, 1, 1, 0], 4, "pos", [0, 1, 2, 7]),
        ([0] * 8, 4, "pos", [0, 1, 2, 3]),
        ([1] * 8, 4, "pos", [0, 1, 2, 3]),
        ([0, 1], 1, "pos", [1]),
        ([0, 0, 1, 0, 1], 2, "any", [0, 1]),
    ],
)
def test_subsamples_by_hand(rewards, n, rule, chosen):
    assert subsample(rewards, n, rule).tolist() == chosen


def test_positive_is_above_the_threshold_whatever_the_rewards():
    rewards = [0.7, 0.71, -3.0, 5.0, 0.69]
    assert subsample(rewards, 2, "balance").tolist() == [0, 1]
    assert subsample(rewards, 2, "balance", threshold=1.0).tolist() == [0, 3]


@settings(max_examples=200, deadline=None)
@given(rewards=pools, n=st.integers(1, 9), rule=st.sampled_from(["balance", "pos", "any"]), seed=st.integers(0, 99))
def test_invariants_of_subsamples(rewards, n, rule, seed):
    for chosen in (subsample(rewards, n, rule), subsample(rewards, n, rule, seed=seed)):
        assert len(chosen) == min(n, len(rewards))
        assert chosen.tolist() == sorted(set(chosen.tolist()))
        assert all(0 <= i < len(rewards) for i in chosen)
        if rule != "any":
            # as the released code counts: first the targets, then filling up from the class that has more
            pos = sum(r > 0.7 for r in rewards)
            neg, take = len(rewards) - pos, min(n, len(rewards))
            share = max(min(math.ceil(n * pos / max(len(rewards), 1)), take - 1), 1)
            good = min(n // 2 if rule == "balance" else share, pos)
            bad = min((n if rule == "balance" else take) - good, neg)
            good += min(pos - good, take - good - bad)
            assert sum(rewards[i] > 0.7 for i in chosen) == good
    np.testing.assert_array_equal(subsample(rewards, n, rule, seed=seed), subsample(rewards, n, rule, seed=seed))


def test_a_seed_gives_every_sample_of_a_class_the_same_chance():
    rewards = [1.0] * 4 + [0.0] * 6
    counts = np.bincount(np.concatenate([subsample(rewards, 4, "balance", seed=s) for s in range(3000)]), minlength=10)
    # Binomial(3000, 1/2) and (3000, 1/3), five standard deviations
    assert abs(counts[:4] - 1500).max() < 5 * 27.4
    assert abs(counts[4:] - 1000).max() < 5 * 25.9


def test_refusals_of_subsamples():
    with pytest.raises(NumericsError, match="reward 1 is NaN"):
        subsample([0.0, math.nan], 2, "balance")
    with pytest.raises(ValueError, match="n of at least 1"):
        subsample([0.0], 0, "balance")
    with pytest.raises(ConfigError, match="'best'"):
        subsample([0.0], 1, "best")
