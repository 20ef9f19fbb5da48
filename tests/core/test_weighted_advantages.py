"""OPO, REINFORCE++ and GDPO: a response weighs with its tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import reference

from megarl.core.advantages import gdpo, group_mean, grpo_sum, opo, reinforce_pp, reinforce_pp_baseline, whiten
from megarl.errors import NumericsError

REWARDS, GROUPS, LENGTHS = [1.0, 0, 0, 0], [7, 7, 7, 7], [2, 4, 6, 8]
PAIRS = [[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
BY_LENGTH = [opo, reinforce_pp, reinforce_pp_baseline]

batches = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.3, 1.0, -2.5]), st.integers(-3, 3), st.integers(0, 5)),
    min_size=1,
    max_size=12,
)


def columns(batch: list[tuple[float, int, int]]) -> tuple[list[float], list[int], list[int]]:
    rewards, groups, lengths = zip(*batch, strict=True)
    return list(rewards), list(groups), list(lengths)


def close(actual: torch.Tensor, expected: Any, atol: float = 1e-9) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def test_two_groups_by_hand() -> None:
    """Group 0 has the rewards 1, 0 on 1 and 3 tokens, group 5 the rewards 3, 1 on 2 and 2."""
    rewards, groups, lengths = [1.0, 0, 3, 1], [0, 0, 5, 5], [1, 3, 2, 2]
    close(opo(rewards, groups, lengths), [0.75, -0.25, 1, -1])  # b = 1/4, 2
    # 8 tokens: 1, 0 x3, 3 x2, 1 x2; mean 9/8, squares 21 - 81/8 = 87/8, over 7
    close(reinforce_pp(rewards, groups, lengths), (np.array(rewards) - 9 / 8) / math.sqrt(87 / 56 + 1e-8))
    # R - mean_group: .5, -.5, 1, -1 on the same tokens; mean -1/8, squares 5 - 1/8, over 7
    centered = np.array([0.5, -0.5, 1, -1])
    close(reinforce_pp_baseline(rewards, groups, lengths), (centered + 1 / 8) / math.sqrt(39 / 56 + 1e-8))


def test_gdpo_keeps_apart_what_a_sum_would_join() -> None:
    """Both responses have the sum 1, and a step is worth more than a format: grpo of the sum would give 0."""
    found = grpo_sum([[1.0, 0.0], [0.0, 1.0]], [3.0, 1.0], [0, 0])
    close(found, [2 * 0.7071067811865476, -2 * 0.7071067811865476], atol=1e-5)
    assert grpo_sum([[1.0, 2.0], [1.0, 2.0]], [3.0, 1.0], [0, 0]).tolist() == [0, 0]


@settings(max_examples=80, deadline=None)
@given(batch=batches, ddof=st.sampled_from([0, 1]), data=st.data())
def test_against_reference(batch: list[tuple[float, int, int]], ddof: int, data: st.DataObject) -> None:
    rewards, groups, lengths = columns(batch)
    close(opo(rewards, groups, lengths), reference.opo(rewards, groups, lengths))
    # Where all is nearly equal, 1 / sqrt(1e-8) makes 1e4 of the last digit.
    close(reinforce_pp(rewards, groups, lengths), reference.whiten(rewards, lengths), atol=1e-8)
    centered = group_mean(rewards, groups).tolist()
    close(reinforce_pp_baseline(rewards, groups, lengths), reference.whiten(centered, lengths), atol=1e-8)
    second = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=len(batch), max_size=len(batch)))
    pairs, weights = list(zip(rewards, second, strict=True)), [0.5, -2.0]
    summed = reference.grpo_sum(pairs, weights, groups, ddof, 1e-3)
    close(grpo_sum(pairs, weights, groups, ddof, 1e-3), summed)
    rounded = grpo_sum(pairs, weights, groups, ddof, 1e-3).tolist()
    close(gdpo(pairs, weights, groups, lengths, ddof, 1e-3), reference.whiten(rounded, lengths), atol=1e-8)


@settings(max_examples=40, deadline=None)
@given(reward=st.floats(-1e3, 1e3), lengths=st.lists(st.integers(0, 9), min_size=1, max_size=9))
@pytest.mark.parametrize("function", BY_LENGTH)
def test_no_contrast_is_exactly_zero(function: Any, reward: float, lengths: list[int]) -> None:
    values = function([reward] * len(lengths), [4] * len(lengths), lengths)
    assert values.tolist() == [0.0] * len(lengths)
    if function is opo:  # another group does not matter
        values = opo([*[reward] * len(lengths), 0.0, 1.0], [4] * len(lengths) + [9, 9], [*lengths, 1, 1])
        assert values.tolist() == [0.0] * len(lengths) + [-0.5, 0.5]


def test_a_response_without_tokens_is_in_no_statistics() -> None:
    assert opo([1.0, 0.0, 50.0], [0, 0, 0], [1, 1, 0]).tolist() == [0.5, -0.5, 0]
    assert opo([1.0, 50.0], [0, 0], [3, 0]).tolist() == [0, 0]
    assert opo([1.0], [0], [0]).tolist() == [0]
    close(whiten(torch.tensor([1.0, 0.0, 50.0]), [1, 1, 0]), [0.5**0.5, -(0.5**0.5), 0], atol=1e-6)
    assert whiten(torch.tensor([1.0, 50.0]), [1, 0]).tolist() == [0, 0]  # a single token
    assert whiten(torch.tensor([1.0, 0.0]), [0, 0]).tolist() == [0, 0]


def test_the_eps_is_added_to_the_variance() -> None:
    """Rewards +-1e-4 on one token each: variance 2e-8."""
    close(whiten(torch.tensor([1e-4, -1e-4], dtype=torch.float64), [1, 1]), [1e-4 / 3e-8**0.5, -1e-4 / 3e-8**0.5])


def test_dtypes() -> None:
    groups = torch.tensor([0, 0])
    for function in BY_LENGTH:
        assert function(torch.tensor([1.0, 0.0]), groups, [1, 2]).dtype == torch.float32
        assert function([1.0, 0.0], groups, np.array([1, 2])).dtype == torch.float64
        assert function([], [], []).shape == (0,)


@pytest.mark.parametrize("lengths", [[1], [1, -1], [[1, 1]], [1, math.nan]])
def test_lengths_that_are_none_are_refused(lengths: Any) -> None:
    with pytest.raises(ValueError, match="expected 2 numbers of loss tokens, 0 or more"):
        opo([1.0, 0.0], [0, 0], lengths)
    with pytest.raises(ValueError, match="expected 2 numbers of loss tokens"):
        whiten(torch.tensor([1.0, 0.0]), lengths)


def test_other_refusals() -> None:
    with pytest.raises(NumericsError, match="response 1"):
        reinforce_pp([1.0, math.nan], [0, 0], [1, 1])
    with pytest.raises(NumericsError, match="response 0"):
        grpo_sum([[1.0, math.inf], [0.0, 0.0]], [1.0, 1.0], [0, 0])
    for components, weights in (([1.0, 0.0], [1.0]), ([[1.0], [0.0]], [1.0, 1.0]), ([[], []], [])):
        with pytest.raises(ValueError, match=r"expected \[N, M\] and \[M\] with M >= 1"):
            grpo_sum(components, weights, [0, 0])
    with pytest.raises(ValueError, match="ddof=2"):
        gdpo([[1.0], [0.0]], [1.0], [0, 0], [1, 1], ddof=2)
