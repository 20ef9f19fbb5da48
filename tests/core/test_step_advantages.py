from __future__ import annotations

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.objectives import (
    OBJECTIVES,
    advantages_of,
    select_responses,
    step_advantages,
    token_advantages,
)
from megarl.errors import ConfigError, NumericsError

PROCESS = replace(OBJECTIVES["grpo"], advantage="process", std_ddof=0, std_eps=1e-4)

Response = tuple[int, int, list[tuple[int, float]]]
"""Group, tokens, and per step its last token in the response and its reward."""


@st.composite
def responses(draw: st.DrawFn) -> Response:
    length = draw(st.integers(0, 6))
    step = st.tuples(st.integers(0, max(length - 1, 0)), st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0]))
    return draw(st.integers(-1, 1)), length, draw(st.lists(step, max_size=4 if length else 0))


batches = st.lists(responses(), min_size=1, max_size=7)


def token_advantages_of(batch: list[Response], ddof: int = 1, eps: float = 1e-6) -> np.ndarray:
    """float64 [T], those of all responses back to back."""
    objective = replace(OBJECTIVES["grpo"], advantage="process", std_ddof=ddof, std_eps=eps)
    steps = [sorted(row, key=lambda step: step[0]) for _, _, row in batch]
    found = step_advantages(objective, steps, [group for group, _, _ in batch], [length for _, length, _ in batch])
    return np.concatenate(found)


def slow(batch: list[Response], ddof: int, eps: float) -> list[float]:
    """Every token looks at every step of its response, every step at every step of its group."""
    advantages = []
    for group, length, steps in batch:
        everything = [reward for g, _, row in batch if g == group for _, reward in row]
        for token in range(length):
            total = 0.0
            for at, reward in steps:
                if at < token or len(set(everything)) == 1:
                    continue
                deviation = statistics.stdev(everything) if ddof else statistics.pstdev(everything)
                total += (reward - math.fsum(everything) / len(everything)) / (deviation + eps)
            advantages.append(total)
    return advantages


def close(actual: np.ndarray, expected: object) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-9)


def test_hand_computed():
    """Steps 1 and 0 in one response, 1 in the other: mean 2/3, population's deviation sqrt(2)/3, the third has none."""
    batch: list[Response] = [(4, 4, [(1, 1.0), (2, 0.0)]), (4, 2, [(1, 1.0)]), (4, 2, []), (5, 1, [(0, 7.0)])]
    good, bad = 1 / math.sqrt(2), -math.sqrt(2)
    close(token_advantages_of(batch, ddof=0, eps=0.0), [good + bad, good + bad, bad, 0, good, good, 0, 0, 0])
    # The unbiased deviation of 1, 0, 1 is 1 / sqrt(3).
    close(token_advantages_of(batch, eps=0.0)[4:6], [math.sqrt(3) / 3] * 2)


@settings(max_examples=150, deadline=None)
@given(batch=batches, ddof=st.sampled_from([0, 1]))
def test_against_reference(batch, ddof):
    close(token_advantages_of(batch, ddof, 1e-2), slow(batch, ddof, 1e-2))


@settings(max_examples=30, deadline=None)
@given(reward=st.floats(-1e3, 1e3))
def test_no_contrast_is_exactly_zero(reward):
    batch: list[Response] = [(0, 3, [(0, reward), (2, reward)]), (0, 2, [(1, reward)]), (1, 1, [(0, reward)])]
    assert token_advantages_of(batch).tolist() == [0.0] * 6
    assert token_advantages_of([(0, 4, [])]).tolist() == [0.0] * 4


def test_only_the_tokens_that_are_wanted():
    """A response of length 0 only enters the statistics."""
    steps = [[(0, 1.0), (2, 0.0)], [(1, 1.0)]]
    both = step_advantages(PROCESS, steps, [0, 0], [3, 2])
    first, second = step_advantages(PROCESS, steps, [0, 0], [0, 2])
    assert len(first) == 0
    np.testing.assert_array_equal(second, both[1])


def test_refusals():
    with pytest.raises(NumericsError, match="nan, expected a finite number"):
        token_advantages_of([(0, 2, [(0, 1.0), (1, math.nan)])])
    with pytest.raises(ValueError, match="shorter"):
        step_advantages(PROCESS, [[(0, 1.0)], [(1, 0.0)]], [0, 0], [2])
    with pytest.raises(ConfigError, match="step_advantages"):
        advantages_of(PROCESS, [1.0, 0.0], [0, 0])
    assert select_responses(PROCESS, [1.0, 0.0], [0, 0]).all()
    with pytest.raises(ConfigError, match="one advantage per response, but those of 'process' differ"):
        replace(PROCESS, selection="positive")


def test_advantages_of_responses_do_not_read_a_reference():
    """A batch may hold ref_logprobs for a KL penalty; the advantages of minirl are those without them."""
    column, cu_seqlens = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([0, 1, 3])
    found = token_advantages(
        OBJECTIVES["minirl"],
        [1.0, 0.0],
        [0, 0],
        logprobs=column,
        ref_logprobs=column - 1,
        loss_mask=torch.ones(3, dtype=torch.bool),
        cu_seqlens=cu_seqlens,
    )
    assert found.tolist() == [0.5, -0.5, -0.5]
