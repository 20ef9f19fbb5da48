"""Advantages of process rewards by response, against those of packed tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.objectives import OBJECTIVES, select_responses, sequence_advantages, step_advantages
from megarl.core.objectives.process_rewards import process_advantages
from megarl.errors import ConfigError

PROCESS = replace(OBJECTIVES["grpo"], advantage="process", std_ddof=0, std_eps=1e-4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 10**6))
def test_as_on_packed_tokens(lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = np.sort(rng.integers(0, 3, len(lengths)))
    steps = []
    for length in lengths:
        ends = np.sort(rng.choice(length, size=rng.integers(0, length + 1), replace=False))
        steps.append([(int(end), float(rng.integers(0, 3))) for end in ends])
    starts = np.cumsum([0, *lengths])
    expected = process_advantages(
        np.array([reward for each in steps for _, reward in each]),
        np.array([start + end for start, each in zip(starts, steps, strict=False) for end, _ in each], dtype=np.int64),
        groups,
        torch.ones(int(starts[-1]), dtype=torch.bool),
        torch.from_numpy(starts),
        ddof=0,
        eps=1e-4,
    )
    found = step_advantages(PROCESS, steps, groups, lengths)
    np.testing.assert_allclose(np.concatenate(found), expected.numpy(), atol=1e-12)
    wanted = [length if index % 2 else 0 for index, length in enumerate(lengths)]
    partly = step_advantages(PROCESS, steps, groups, wanted)  # the others only enter the statistics
    assert [len(each) for each in partly] == wanted
    for index, each in enumerate(partly):
        np.testing.assert_array_equal(each, found[index][: wanted[index]])


def test_a_caller_with_nothing_but_rewards_is_told() -> None:
    with pytest.raises(ConfigError, match="step_advantages"):
        sequence_advantages(PROCESS, [1.0, 0.0], [0, 0])
    assert select_responses(PROCESS, [1.0, 0.0], [0, 0]).all()
    with pytest.raises(ConfigError, match="one advantage per response, but those of 'process' differ"):
        replace(PROCESS, selection="positive")


def test_one_length_per_response() -> None:
    with pytest.raises(ValueError, match="shorter"):
        step_advantages(PROCESS, [[(0, 1.0)], [(1, 0.0)]], [0, 0], [2])
