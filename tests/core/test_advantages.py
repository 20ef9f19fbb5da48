from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core import reference
from megarl.core.advantages import ADVANTAGES, group_mean, grpo, uniform_groups
from megarl.errors import NumericsError

batches = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.3, 1.0, -2.5]), st.integers(-3, 3)), min_size=1, max_size=12)


def close(actual: torch.Tensor, expected: list[float]) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-9)


def test_hand_computed():
    rewards, groups = [1.0, 0, 0, 0], [7, 7, 7, 7]
    close(group_mean(rewards, groups), [0.75, -0.25, -0.25, -0.25])
    close(grpo(rewards, groups), [1.499997000006] + [-0.499999000002] * 3)
    close(grpo(rewards, groups, ddof=0), [1.732046807578115] + [-0.5773489358593717] * 3)


@settings(max_examples=60, deadline=None)
@given(batch=batches, ddof=st.sampled_from([0, 1]))
def test_against_reference(batch, ddof):
    rewards, groups = [r for r, _ in batch], [g for _, g in batch]
    close(group_mean(rewards, groups), reference.group_mean(rewards, groups))
    close(grpo(rewards, groups, ddof=ddof), reference.grpo(rewards, groups, ddof=ddof))


@settings(max_examples=60, deadline=None)
@given(reward=st.floats(-1e3, 1e3), size=st.integers(1, 9), name=st.sampled_from(sorted(ADVANTAGES)))
def test_no_contrast_is_exactly_zero(reward, size, name):
    """The mean of equal floats is rarely the float itself; the advantage must be 0 all the same."""
    rewards = [reward] * size + [0.0, 1.0]
    groups = [4] * size + [9, 9]
    values = ADVANTAGES[name](rewards, groups)
    assert values[:size].tolist() == [0.0] * size
    assert values[-1] > 0
    assert uniform_groups(rewards, groups).tolist() == [True, False]


@settings(max_examples=40, deadline=None)
@given(batch=batches, data=st.data())
def test_order_of_responses_does_not_matter(batch, data):
    order = list(data.draw(st.permutations(range(len(batch)))))
    rewards = torch.tensor([r for r, _ in batch], dtype=torch.float64)
    groups = torch.tensor([g for _, g in batch])
    close(grpo(rewards[order], groups[order]), grpo(rewards, groups)[order].tolist())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_names_its_response(value):
    with pytest.raises(NumericsError, match=r"response 2 \(group 5\)"):
        group_mean([0.0, 1.0, value], [3, 3, 5])


def test_dtypes_and_shapes():
    groups = torch.tensor([0, 0])
    assert group_mean(torch.tensor([1, 0]), groups).dtype == torch.float64
    assert group_mean(torch.tensor([1.0, 0.0]), groups).dtype == torch.float32
    assert group_mean(np.array([1.0, 0.0]), np.array([0, 0])).dtype == torch.float64
    assert group_mean(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)
    with pytest.raises(ValueError, match=r"must both be \[N\]"):
        group_mean([1.0, 0.0], [0])
    with pytest.raises(ValueError, match="ddof"):
        grpo([1.0, 0.0], [0, 0], ddof=2)
