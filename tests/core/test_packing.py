from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import reference

from megarl.core import packing
from megarl.core.packing import TOKEN_COLUMNS, drop_routes, has_routes, pack, partition, partition_into, select, spread
from megarl.core.types import Rollout, TrainBatch
from megarl.errors import NumericsError, RolloutError, TraceError

sizes = st.lists(st.integers(1, 20), min_size=1, max_size=7)


def rollout(sample: int, length: int, routes: bool = True) -> Rollout:
    generator = np.random.default_rng(sample)
    mask = np.arange(length) > 0
    return Rollout(
        group=3,
        sample=sample,
        tokens=generator.integers(0, 50, length, dtype=np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -generator.random(length), 0).astype(np.float32),
        routed_experts=generator.integers(0, 200, (length, 2, 1)).astype(np.uint8) if routes else None,
        routed_mask=np.arange(length) < length - 1 if routes else None,
        weight_versions=np.full(length, sample, np.int32),
        finish_reason="stop",
    )


class TestPartition:
    def test_hand_computed(self):
        assert partition([5, 3, 4, 2], max_tokens=7) == [[0, 3], [1, 2]]
        assert partition([5, 3, 4, 2], max_tokens=100) == [[0, 1, 2, 3]]
        assert partition([5, 3, 4, 2], max_tokens=100, min_bins=2) == [[0, 3], [1, 2]]
        assert partition([], max_tokens=5) == []
        assert partition_into([1, 1, 10, 1], 2) == [[0, 1, 3], [2]]

    def test_where_longest_first_placement_misses_the_split(self):
        """Both bins can be full to 12, but the emptiest-bin rule puts 5 and 4 with 4 and fails; first-fit finds it."""
        lengths = [6, 6, 4, 4, 4]
        bins = partition(lengths, max_tokens=12)
        assert len(bins) == 2
        assert sorted(sum(lengths[i] for i in part) for part in bins) == [12, 12]

    def test_where_one_bin_more_makes_longest_first_placement_fail(self):
        """Six full bins of 20 exist, but placement into seven overflows: a full bin is divided instead."""
        lengths = [6, 8, 6, 12, 8, 10, 5, 5, 10, 5, 5, 12, 8, 12, 8]
        assert len(partition(lengths, max_tokens=20)) == 6
        assert max(sum(lengths[i] for i in part) for part in partition_into(lengths, 7)) > 20
        bins = partition(lengths, max_tokens=20, min_bins=7)
        assert len(bins) == 7
        assert max(sum(lengths[i] for i in part) for part in bins) == 20
        assert sorted(i for part in bins for i in part) == list(range(15))

    def test_balance_comes_before_first_fit(self):
        assert partition([4, 3, 3], max_tokens=7) == [[0], [1, 2]], "first-fit gives 7 and 3"
        assert partition([7, 7, 7], max_tokens=14) == [[0, 2], [1]], "a bin may be full to the last token"

    def test_the_fullest_bin_that_can_be_halved_is(self):
        assert packing._divide([[0, 1, 2], [3, 4]], [5, 4, 1, 3, 3], 3) == [[0], [1, 2], [3, 4]]
        assert packing._divide([[0], [1, 2]], [9, 2, 2], 3) == [[0], [1], [2]]
        assert packing._divide([[0, 1, 2, 3]], [9, 2, 2, 2], 3) == [[0], [1, 3], [2]], "one sequence is not halved"
        two = [[0, 1, 2, 3], [4, 5]]
        assert packing._divide(two, [6, 6, 6, 6, 5, 5], 4) == [[0], [1, 3], [2], [4, 5]], "halves are compared too"
        assert packing._divide(two, [6, 6, 6, 6, 5, 5], 5) == [[0], [1], [2], [3], [4, 5]]

    @settings(max_examples=80, deadline=None)
    @given(lengths=sizes, room=st.integers(0, 30), min_bins=st.integers(1, 4))
    def test_every_sequence_once_within_the_limit(self, lengths, room, min_bins):
        max_tokens = max(lengths) + room
        min_bins = min(min_bins, len(lengths))
        bins = partition(lengths, max_tokens, min_bins)
        assert sorted(i for part in bins for i in part) == list(range(len(lengths)))
        assert all(part == sorted(part) and part for part in bins)
        assert bins == sorted(bins)
        assert all(sum(lengths[i] for i in part) <= max_tokens for part in bins)
        unforced = partition(lengths, max_tokens)
        assert len(bins) == max(len(unforced), min_bins)
        # First-fit-decreasing needs at most 11/9 of the optimum plus 6/9.
        best = reference.fewest_bins(lengths, max_tokens)
        assert best <= len(unforced) <= math.floor(11 * best / 9 + 6 / 9)

    @settings(max_examples=150, deadline=None)
    @given(
        lengths=st.lists(st.integers(1, 60), min_size=1, max_size=60),
        room=st.integers(0, 60),
        min_bins=st.integers(1, 60),
    )
    def test_bins_are_those_of_a_slow_search(self, lengths, room, min_bins):
        max_tokens, min_bins = max(lengths) + room, min(min_bins, len(lengths))
        slow = _slow_partition(lengths, max_tokens)
        bins = partition(lengths, max_tokens)
        assert bins == slow
        assert spread(bins, lengths, max_tokens, min_bins) == partition(lengths, max_tokens, min_bins)
        assert partition_into(lengths, min_bins) == _slow_placement(lengths, min_bins)

    def test_as_many_bins_as_first_fit_needs_are_balanced(self):
        assert partition([5, 7, 2, 5, 3], max_tokens=11) == [[0, 4], [1], [2, 3]], "first-fit gives 10, 10 and 2"

    @settings(max_examples=60, deadline=None)
    @given(lengths=sizes, num_bins=st.integers(1, 7))
    def test_exact_number_of_bins_is_balanced(self, lengths, num_bins):
        num_bins = min(num_bins, len(lengths))
        bins = partition_into(lengths, num_bins)
        assert len(bins) == num_bins
        assert all(bins)
        assert sorted(i for part in bins for i in part) == list(range(len(lengths)))
        loads = [sum(lengths[i] for i in part) for part in bins]
        assert max(loads) - min(loads) <= max(lengths)
        assert partition_into(list(lengths), num_bins) == bins

    def test_advantages_of_tokens_stay_with_their_tokens(self):
        columns = [np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0])]
        batch = pack([rollout(0, 3), rollout(1, 2)], columns)
        assert batch.advantages.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
        assert batch.advantages.dtype == torch.float32
        with pytest.raises(ValueError, match=r"group 3 sample 1: advantages are \[3\], expected one per token"):
            pack([rollout(0, 3), rollout(1, 2)], [columns[0], columns[0]])
        with pytest.raises(NumericsError, match="group 3 sample 0: the advantage is"):
            pack([rollout(0, 2)], [np.array([1.0, np.nan])])
        with pytest.raises(NumericsError, match="group 3 sample 1: the advantage is inf"):
            pack([rollout(0, 3), rollout(1, 2)], [columns[0], np.array([np.inf, 5.0])])

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: partition([3, 9], 8), "sequence 1 has 9 tokens, more than the 8"),
            (lambda: partition([3, 0], 8), "sequence 1 has 0 tokens"),
            (lambda: partition([3, 1], 8, min_bins=3), "2 sequences do not fill 3"),
            (lambda: partition_into([3, 1], 3), "2 sequences do not fill 3"),
            (lambda: partition_into([3, 1], 0), "0 micro-batches"),
        ],
    )
    def test_refusals(self, call, message):
        with pytest.raises(ValueError, match=message):
            call()


def _slow_placement(lengths: list[int], num_bins: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for sequence in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        min(bins, key=lambda part: sum(lengths[i] for i in part)).append(sequence)
    return sorted(sorted(part) for part in bins)


def _slow_partition(lengths: list[int], max_tokens: int) -> list[list[int]]:
    first_fit: list[list[int]] = []
    for sequence in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        room = (part for part in first_fit if sum(lengths[i] for i in part) + lengths[sequence] <= max_tokens)
        if (part := next(room, None)) is None:
            first_fit.append(part := [])
        part.append(sequence)
    bins = _slow_placement(lengths, len(first_fit))
    fits = all(sum(lengths[i] for i in part) <= max_tokens for part in bins)
    return bins if fits else sorted(sorted(part) for part in first_fit)


class TestPack:
    def test_columns_stand_back_to_back(self):
        rollouts = [rollout(0, 3), rollout(1, 5), rollout(2, 2)]
        batch = pack(rollouts, [0.5, -1.0, 2.0])
        assert batch.cu_seqlens.tolist() == [0, 3, 8, 10]
        assert batch.tokens.dtype == torch.int64
        for name in ("tokens", "loss_mask", "rollout_logprobs", "routed_mask", "weight_versions"):
            expected = np.concatenate([getattr(r, name) for r in rollouts])
            np.testing.assert_array_equal(getattr(batch, name), expected)
        assert batch.advantages.tolist() == [0.5] * 3 + [-1.0] * 5 + [2.0] * 2

    def test_the_mask_of_routes(self):
        unmasked = dataclasses.replace(rollout(0, 3), routed_mask=None)
        assert pack([unmasked], [1.0]).routed_mask.tolist() == [True] * 3
        mixed = [rollout(0, 3), rollout(1, 2, routes=False)]
        assert pack(mixed, [1.0, 1.0]).routed_mask is None

    def test_does_not_share_memory_with_a_rollout(self):
        one = rollout(0, 3)
        batch = pack([one], [1.0])
        batch.rollout_logprobs[:] = 7.0
        assert (one.rollout_logprobs != 7.0).all()

    @pytest.mark.parametrize(
        ("rollouts", "advantages", "error", "message"),
        [
            ([], [], ValueError, "no rollouts"),
            ([rollout(0, 3)], [1.0, 2.0], ValueError, r"expected \[1\]"),
            ([rollout(4, 3)], [math.nan], NumericsError, "group 3 sample 4: the advantage is nan"),
            (
                [dataclasses.replace(rollout(0, 3), rollout_logprobs=np.zeros(2, np.float32))],
                [0.0],
                RolloutError,
                r"rollout_logprobs is \[2\], expected \[3\]",
            ),
            (
                [
                    dataclasses.replace(
                        rollout(0, 3),
                        loss_mask=np.array([False, True, True]),
                        rollout_logprobs=np.array([9.0, 1e-6, 4.5], np.float32),
                    )
                ],
                [0.0],
                NumericsError,
                r"group 3 sample 0: rollout_logprobs is 4\.5 at token 2.*raw logits",
            ),
            (
                [dataclasses.replace(rollout(0, 3), loss_mask=np.ones(3, bool))],
                [0.0],
                RolloutError,
                "first token is marked as generated",
            ),
            (
                [rollout(0, 3), dataclasses.replace(rollout(1, 2), loss_mask=np.ones(2, bool))],
                [0.0, 0.0],
                RolloutError,
                "sample 1: its first token is marked as generated",
            ),
            (
                [dataclasses.replace(rollout(0, 3), routed_experts=np.zeros((2, 2, 1), np.uint8))],
                [0.0],
                TraceError,
                r"routes are \[2, 2, 1\]",
            ),
        ],
    )
    def test_refusals(self, rollouts, advantages, error, message):
        with pytest.raises(error, match=message):
            pack(rollouts, advantages)

    def test_a_log_probability_may_be_0_but_for_rounding(self):
        edge = rollout(0, 3)
        edge.rollout_logprobs[1] = 1e-3
        pack([edge], [1.0])

    def test_dropped_routes_leave_their_mask(self):
        bare = rollout(0, 3, routes=False)
        assert drop_routes(bare).routed_mask is None
        full = dataclasses.replace(rollout(0, 3), routed_mask=None)
        assert drop_routes(full).routed_mask.tolist() == [True] * 3
        holes = rollout(0, 3)
        assert drop_routes(holes).routed_mask.tolist() == [True, True, False]
        assert drop_routes(holes).routed_experts is None
        assert [has_routes(each) for each in (bare, full, holes, drop_routes(holes))] == [False, True, True, True]


class TestSelect:
    @settings(max_examples=40, deadline=None)
    @given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5), data=st.data())
    def test_is_packing_the_selected_rollouts(self, lengths, data):
        chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=6))
        rollouts = [rollout(n, length) for n, length in enumerate(lengths)]
        advantages = [float(n) for n in range(len(lengths))]
        whole = pack(rollouts, advantages)
        part = select(whole, chosen)
        if not chosen:
            assert (part.num_tokens, part.num_sequences) == (0, 0)
            return
        expected = pack([rollouts[n] for n in chosen], [advantages[n] for n in chosen])
        assert torch.equal(part.cu_seqlens, expected.cu_seqlens)
        for name in TOKEN_COLUMNS:
            left, right = getattr(part, name), getattr(expected, name)
            assert (left is None and right is None) or torch.equal(left, right), name

    def test_unknown_sequence(self):
        with pytest.raises(IndexError, match=r"\[1\] of a batch of 1"):
            select(pack([rollout(0, 3)], [1.0]), [1])

    def test_every_token_column_is_selected(self):
        assert {field.name for field in dataclasses.fields(TrainBatch)} == {
            *(*TOKEN_COLUMNS, "cu_seqlens", "kept_ids", "kept_offsets")
        }
