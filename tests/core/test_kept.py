"""Kept sets in rollouts and in batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.core.packing import check_kept, pack, pack_kept, select
from megarl.core.types import Rollout
from megarl.errors import RolloutError


def kept(sample: int, tokens: list[int], sets: list[list[int]] | None) -> Rollout:
    """Of a prompt of one token, and one set for each other token."""
    mask = np.arange(len(tokens)) > 0
    return Rollout(
        group=3,
        sample=sample,
        tokens=np.array(tokens, np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        routed_experts=None,
        routed_mask=None,
        weight_versions=np.zeros(len(tokens), np.int32),
        finish_reason="stop",
        kept_counts=None if sets is None else np.array([0, *map(len, sets)], np.int32),
        kept_ids=None if sets is None else np.concatenate(sets).astype(np.int32),
    )


FIRST = kept(0, [4, 5, 6], [[5, 9], [0, 2, 6]])
SECOND = kept(1, [7, 8], [[8]])


def test_sets_follow_their_tokens_through_packing_and_selection() -> None:
    batch = pack([FIRST, SECOND], [1.0, 2.0])
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


def test_ids_may_come_in_any_order_and_be_those_of_another_token() -> None:
    check_kept(kept(0, [4, 5, 6], [[9, 5, 6], [6, 9, 0]]))


def test_without_sets_there_are_none_and_what_has_no_loss_needs_none() -> None:
    bare = kept(2, [1, 2], None)
    assert pack_kept([bare, bare]) == (None, None)
    silent = replace(bare, loss_mask=np.zeros(2, bool))
    ids, offsets = pack_kept([silent, FIRST, silent])
    assert ids is not None
    assert offsets is not None
    assert (ids.tolist(), offsets.tolist()) == ([5, 9, 0, 2, 6], [0, 0, 0, 0, 2, 5, 5, 5])
    with pytest.raises(RolloutError, match="group 3 sample 2 has no kept sets, but others of the batch do"):
        pack_kept([FIRST, bare])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kept_ids": None}, r"kept_counts and kept_ids are \[3\] and None, expected \[3\] counts"),
        ({"kept_ids": np.array([5, 9, 0, 6, 0], np.int32)}, "an id is twice in the set of a token"),
        ({"kept_counts": None}, r"kept_counts and kept_ids are None and \[5\]"),
        ({"kept_counts": np.array([0, 2], np.int32)}, r"are \[2\] and \[5\]"),
        ({"kept_counts": np.array([0, 2, 2], np.int32)}, r"are \[3\] and \[5\]"),
        ({"kept_counts": np.array([-1, 3, 3], np.int32)}, "counts, and as many ids"),
        (
            {"kept_ids": np.array([5, 9, 0, 2, 7])},
            "the 3 ids that token 2 was drawn from hold it 0 times, expected once",
        ),
        ({"kept_ids": np.array([5, 5, 0, 2, 6])}, "the 2 ids that token 1 was drawn from hold it 2 times"),
        ({"kept_counts": np.array([0, 5, 0], np.int32)}, "the 0 ids that token 2 was drawn from hold it 0 times"),
        ({"kept_counts": np.array([2, 3, 0], np.int32)}, "the 2 ids that token 0 was drawn from hold it 0 times"),
    ],
)
def test_sets_that_cannot_be_those_of_the_tokens_are_refused(changes: dict[str, np.ndarray], told: str) -> None:
    check_kept(FIRST)
    wrong = replace(FIRST, **changes)
    with pytest.raises(RolloutError, match=f"group 3 sample 0: .*{told}"):
        check_kept(wrong)
    with pytest.raises(RolloutError, match=told):
        pack([wrong], [1.0])


def test_tokens_that_were_taken_out_of_the_loss_may_have_their_sets() -> None:
    check_kept(replace(FIRST, loss_mask=np.zeros(3, bool)))
