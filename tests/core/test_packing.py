"""Micro-batches, and rollouts packed into the columns that train, with their kept sets."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.packing import (
    TOKEN_COLUMNS,
    check_kept,
    drop_routes,
    has_routes,
    pack,
    pack_kept,
    partition,
    partition_into,
    select,
    spread,
)
from megarl.core.types import Rollout
from megarl.errors import NumericsError, RolloutError, TraceError


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


@pytest.mark.parametrize(("mask", "length"), [("", 0), ("1", 0), ("01", 1), ("000", 3), ("0010010", 2)])
def test_the_prompt_ends_before_the_first_generated_token(mask: str, length: int) -> None:
    twice = np.repeat(np.array([letter == "1" for letter in mask], bool), 2)
    for loss_mask in (twice[::2], twice[::2].astype(np.int64), twice[::2].astype(np.uint8) * 255):
        one = replace(rollout(0, len(mask), routes=False), loss_mask=loss_mask)
        assert one.prompt_length == length
        assert one.response_tokens.tolist() == one.tokens[length:].tolist()


class TestPartition:
    @pytest.mark.parametrize(
        ("lengths", "max_tokens", "min_bins", "expected"),
        [
            ([5, 3, 4, 2], 7, 1, [[0, 3], [1, 2]]),
            ([5, 3, 4, 2], 100, 1, [[0, 1, 2, 3]]),
            ([5, 3, 4, 2], 100, 2, [[0, 3], [1, 2]]),
            ([], 5, 1, []),
            ([4, 3, 3], 7, 1, [[0], [1, 2]]),  # balanced: first-fit gives 7 and 3
            ([5, 7, 2, 5, 3], 11, 1, [[0, 4], [1], [2, 3]]),  # first-fit gives 10, 10 and 2
            ([7, 7, 7], 14, 1, [[0, 2], [1]]),  # full to the last token
            ([6, 6, 4, 4, 4], 12, 1, [[0, 1], [2, 3, 4]]),  # the emptiest bin would take 5 and 4 to 14: first-fit
        ],
    )
    def test_by_hand(self, lengths, max_tokens, min_bins, expected):
        assert partition(lengths, max_tokens, min_bins) == expected

    def test_where_one_bin_more_makes_longest_first_placement_fail(self):
        """Six full bins of 20 exist, but placement into seven overflows: a full bin is divided instead."""
        lengths = [6, 8, 6, 12, 8, 10, 5, 5, 10, 5, 5, 12, 8, 12, 8]
        assert len(partition(lengths, max_tokens=20)) == 6
        assert max(sum(lengths[i] for i in part) for part in partition_into(lengths, 7)) > 20
        bins = partition(lengths, max_tokens=20, min_bins=7)
        assert len(bins) == 7
        assert max(sum(lengths[i] for i in part) for part in bins) == 20
        assert sorted(i for part in bins for i in part) == list(range(15))

    def test_the_fullest_bin_that_can_be_halved_is(self):
        """With a limit that placement cannot keep."""
        assert spread([[0, 1, 2], [3, 4]], [5, 4, 1, 3, 3], 0, 3) == [[0], [1, 2], [3, 4]]
        assert spread([[0, 1, 2, 3]], [9, 2, 2, 2], 0, 3) == [[0], [1, 3], [2]], "one sequence is not halved"
        two = [[0, 1, 2, 3], [4, 5]]
        assert spread(two, [6, 6, 6, 6, 5, 5], 0, 4) == [[0], [1, 3], [2], [4, 5]], "halves are compared too"
        assert spread(two, [6, 6, 6, 6, 5, 5], 0, 5) == [[0], [1], [2], [3], [4, 5]]

    @settings(max_examples=150, deadline=None)
    @given(
        lengths=st.lists(st.integers(1, 60), min_size=1, max_size=60),
        room=st.integers(0, 60),
        min_bins=st.integers(1, 60),
    )
    def test_bins_are_those_of_a_slow_search(self, lengths, room, min_bins):
        max_tokens, min_bins = max(lengths) + room, min(min_bins, len(lengths))
        bins = partition(lengths, max_tokens)
        assert bins == _slow_partition(lengths, max_tokens)
        forced = partition(lengths, max_tokens, min_bins)
        assert spread(bins, lengths, max_tokens, min_bins) == forced
        assert len(forced) == max(len(bins), min_bins)
        assert all(sum(lengths[i] for i in part) <= max_tokens for part in forced)
        assert partition_into(lengths, min_bins) == _slow_placement(lengths, min_bins)

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: partition([3, 9], 8), "sequence 1 has 9 tokens, more than the 8"),
            (lambda: partition([3, 0], 8), "sequence 1 has 0 tokens"),
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


ROUTES, LOGPROBS = np.zeros((2, 2, 1), np.uint8), np.array([9.0, 1e-6, 4.5], np.float32)


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
        batch.rollout_logprobs[:] = 7.0
        assert all((one.rollout_logprobs != 7.0).all() for one in rollouts), "they share no memory"

    def test_the_mask_of_routes(self):
        bare, full, holes = rollout(1, 3, routes=False), replace(rollout(0, 3), routed_mask=None), rollout(0, 3)
        assert pack([full], [1.0]).routed_mask.tolist() == [True] * 3
        assert pack([holes, bare], [1.0, 1.0]).routed_mask is None
        assert drop_routes(bare).routed_mask is None
        assert drop_routes(full).routed_mask.tolist() == [True] * 3
        assert drop_routes(holes).routed_mask.tolist() == [True, True, False]
        assert drop_routes(holes).routed_experts is None
        assert [has_routes(each) for each in (bare, full, holes, drop_routes(holes))] == [False, True, True, True]

    def test_advantages_of_tokens_stay_with_their_tokens(self):
        batch = pack([rollout(0, 3), rollout(1, 2)], [np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0])])
        assert batch.advantages.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
        assert batch.advantages.dtype == torch.float32

    @pytest.mark.parametrize(
        ("rollouts", "advantages", "error", "message"),
        [
            ([], [], ValueError, "no rollouts"),
            ([rollout(0, 3)], [1.0, 2.0], ValueError, r"expected \[1\]"),
            ([rollout(4, 3)], [math.nan], NumericsError, "group 3 sample 4: the advantage is nan"),
            (
                [rollout(0, 3), rollout(1, 2)],
                [np.ones(3), np.ones(3)],
                ValueError,
                r"group 3 sample 1: advantages are \[3\], expected one per token",
            ),
            (
                [rollout(0, 3), rollout(1, 2)],
                [np.ones(3), np.array([np.inf, 5.0])],
                NumericsError,
                "group 3 sample 1: the advantage is inf",
            ),
            (
                [rollout(0, 3), replace(rollout(1, 2), loss_mask=np.ones(2, bool))],
                [0.0, 0.0],
                RolloutError,
                "sample 1: its first token is marked as generated",
            ),
        ],
    )
    def test_refusals(self, rollouts, advantages, error, message):
        with pytest.raises(error, match=message):
            pack(rollouts, advantages)

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"rollout_logprobs": LOGPROBS[:2]}, RolloutError, r"rollout_logprobs is \[2\], expected \[3\]"),
            (
                {"rollout_logprobs": LOGPROBS},
                NumericsError,
                r"group 3 sample 0: rollout_logprobs is 4\.5 at token 2.*raw logits",
            ),
            ({"loss_mask": np.ones(3, bool)}, RolloutError, "first token is marked as generated"),
            ({"routed_experts": ROUTES}, TraceError, r"routes are \[2, 2, 1\]"),
        ],
    )
    def test_columns_that_do_not_fit(self, changes, error, message):
        with pytest.raises(error, match=message):
            pack([replace(rollout(0, 3), **changes)], [0.0])

    def test_a_log_probability_may_be_above_0_by_rounding(self):
        edge = rollout(0, 3)
        edge.rollout_logprobs[1] = 1e-3
        pack([edge], [1.0])


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5), data=st.data())
def test_selecting_is_packing_the_selected_rollouts(lengths, data):
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=6))
    rollouts = [rollout(n, length) for n, length in enumerate(lengths)]
    advantages = [float(n) for n in range(len(lengths))]
    whole = pack(rollouts, advantages)
    part = select(whole, chosen)
    with pytest.raises(IndexError, match=rf"\[{len(lengths)}\] of a batch of {len(lengths)}"):
        select(whole, [len(lengths)])
    if not chosen:
        assert (part.num_tokens, part.num_sequences) == (0, 0)
        return
    expected = pack([rollouts[n] for n in chosen], [advantages[n] for n in chosen])
    assert torch.equal(part.cu_seqlens, expected.cu_seqlens)
    for name in TOKEN_COLUMNS:
        left, right = getattr(part, name), getattr(expected, name)
        assert (left is None and right is None) or torch.equal(left, right), name


def kept(sample: int, tokens: list[int], sets: list[list[int]]) -> Rollout:
    """Of a prompt of one token, and one set for each other token."""
    return replace(
        rollout(sample, len(tokens), routes=False),
        tokens=np.array(tokens, np.int32),
        kept_counts=np.array([0, *map(len, sets)], np.int32),
        kept_ids=np.concatenate(sets).astype(np.int32),
    )


FIRST = kept(0, [4, 5, 6], [[5, 9], [0, 2, 6]])


class TestKeptSets:
    def test_sets_follow_their_tokens_through_packing_and_selection(self) -> None:
        batch = pack([FIRST, kept(1, [7, 8], [[8]])], [1.0, 2.0])
        assert batch.kept_ids is not None
        assert batch.kept_offsets is not None
        assert (batch.kept_ids.dtype, batch.kept_offsets.dtype) == (torch.int32, torch.int64)
        assert batch.kept_ids.tolist() == [5, 9, 0, 2, 6, 8]
        assert batch.kept_offsets.tolist() == [0, 0, 2, 5, 5, 6]
        turned = select(batch, [1, 0, 1])
        assert turned.kept_ids is not None
        assert turned.kept_offsets is not None
        assert turned.kept_ids.tolist() == [8, 5, 9, 0, 2, 6, 8]
        assert turned.kept_offsets.tolist() == [0, 0, 1, 1, 3, 6, 6, 7]

    def test_without_sets_there_are_none_and_what_has_no_loss_needs_none(self) -> None:
        bare = rollout(2, 2, routes=False)
        assert pack_kept([bare, bare]) == (None, None)
        silent = replace(bare, loss_mask=np.zeros(2, bool))
        ids, offsets = pack_kept([silent, FIRST, silent])
        assert ids is not None
        assert offsets is not None
        assert (ids.tolist(), offsets.tolist()) == ([5, 9, 0, 2, 6], [0, 0, 0, 0, 2, 5, 5, 5])
        with pytest.raises(RolloutError, match="group 3 sample 2 has no kept sets, but others of the batch do"):
            pack_kept([FIRST, bare])

    @pytest.mark.parametrize(
        ("counts", "ids", "told"),
        [
            ([0, 2, 3], None, r"kept_counts and kept_ids are \[3\] and None, expected \[3\] counts"),
            (None, [5, 9, 0, 2, 6], r"kept_counts and kept_ids are None and \[5\]"),
            ([0, 2], [5, 9, 0, 2, 6], r"are \[2\] and \[5\]"),
            ([0, 2, 2], [5, 9, 0, 2, 6], r"are \[3\] and \[5\]"),
            ([-1, 3, 3], [5, 9, 0, 2, 6], "counts, and as many ids"),
            ([0, 2, 3], [5, 9, 0, 0, 6], "an id is twice in the set of a token"),
            ([0, 2, 3], [5, 9, 0, 2, 7], "the 3 ids that token 2 was drawn from hold it 0 times, expected once"),
            ([0, 2, 3], [5, 5, 0, 2, 6], "the 2 ids that token 1 was drawn from hold it 2 times"),
            ([0, 5, 0], [5, 9, 0, 2, 6], "the 0 ids that token 2 was drawn from hold it 0 times"),
            ([2, 3, 0], [5, 9, 0, 2, 6], "the 2 ids that token 0 was drawn from hold it 0 times"),
        ],
    )
    def test_sets_that_cannot_be_those_of_the_tokens_are_refused(self, counts: Any, ids: Any, told: str) -> None:
        columns = {"kept_counts": counts, "kept_ids": ids}
        wrong = replace(FIRST, **{name: None if c is None else np.array(c, np.int32) for name, c in columns.items()})
        with pytest.raises(RolloutError, match=f"group 3 sample 0: .*{told}"):
            pack([wrong], [1.0])

    def test_ids_in_any_order_and_tokens_that_were_taken_out_of_the_loss_are_allowed(self) -> None:
        check_kept(kept(0, [4, 5, 6], [[9, 5, 6], [6, 9, 0]]))
        for one in (FIRST, kept(1, [7, 8], [[8]])):
            check_kept(replace(one, loss_mask=np.zeros(one.num_tokens, bool)))
