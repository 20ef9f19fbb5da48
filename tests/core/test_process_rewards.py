from __future__ import annotations

import math
import statistics
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.advantages import group_mean, grpo
from megarl.core.objectives.process_rewards import process_advantages
from megarl.errors import NumericsError

Response = tuple[int, int, list[tuple[int, float]]]
"""Group, tokens, and per step its last token in the response and its reward."""


@st.composite
def responses(draw: st.DrawFn) -> Response:
    length = draw(st.integers(0, 6))
    step = st.tuples(st.integers(0, max(length - 1, 0)), st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0]))
    return draw(st.integers(-1, 1)), length, draw(st.lists(step, max_size=4 if length else 0))


batches = st.lists(responses(), min_size=1, max_size=7)


def packed(batch: list[Response], shift: float = 0.0) -> dict[str, object]:
    cu_seqlens = torch.tensor([0, *(length for _, length, _ in batch)]).cumsum(0)
    starts = cu_seqlens.tolist()
    steps = [(start + at, reward) for start, (_, _, row) in zip(starts, batch, strict=False) for at, reward in row]
    return {
        "step_rewards": torch.tensor([reward + shift for _, reward in steps], dtype=torch.float64),
        "step_tokens": torch.tensor([at for at, _ in steps], dtype=torch.int64),
        "groups": [group for group, _, _ in batch],
        "loss_mask": torch.ones(starts[-1], dtype=torch.bool),
        "cu_seqlens": cu_seqlens,
    }


def slow(batch: list[Response], scale: str, ddof: int, eps: float) -> list[float]:
    """Every token looks at every step of its response, every step at every step of its group."""
    advantages = []
    for group, length, steps in batch:
        everything = [reward for g, _, row in batch if g == group for _, reward in row]
        for token in range(length):
            total = 0.0
            for at, reward in steps:
                if at < token or len(set(everything)) == 1:
                    continue
                z = reward - math.fsum(everything) / len(everything)
                if scale == "std":
                    deviation = statistics.stdev(everything) if ddof else statistics.pstdev(everything)
                    z /= deviation + eps
                total += z
            advantages.append(total)
    return advantages


def close(actual: torch.Tensor, expected: object) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-9)


def test_hand_computed():
    """Steps 1 and 0 in one response, 1 in the other: mean 2/3, population's deviation sqrt(2)/3, the third has none."""
    batch: list[Response] = [(4, 4, [(1, 1.0), (2, 0.0)]), (4, 2, [(1, 1.0)]), (4, 2, []), (5, 1, [(0, 7.0)])]
    good, bad = 1 / math.sqrt(2), -math.sqrt(2)
    expected = [good + bad, good + bad, bad, 0, good, good, 0, 0, 0]
    close(process_advantages(**packed(batch), ddof=0, eps=0.0), expected)
    third = 1 / 3
    plain = [-third, -third, -2 * third, 0, third, third, 0, 0, 0]
    close(process_advantages(**packed(batch), scale="none"), plain)
    # The unbiased deviation of 1, 0, 1 is 1 / sqrt(3).
    close(process_advantages(**packed(batch), eps=0.0)[4:6], [math.sqrt(3) / 3] * 2)


@settings(max_examples=150, deadline=None)
@given(batch=batches, scale=st.sampled_from(["std", "none"]), ddof=st.sampled_from([0, 1]))
def test_against_reference(batch, scale, ddof):
    fast = process_advantages(**packed(batch), scale=scale, ddof=ddof, eps=1e-2)
    close(fast, slow(batch, scale, ddof, 1e-2))


@settings(max_examples=60, deadline=None)
@given(batch=batches, shift=st.floats(-10, 10), scale=st.sampled_from(["std", "none"]))
def test_a_shift_of_all_step_rewards_changes_nothing(batch, shift, scale):
    own = process_advantages(**packed(batch), scale=scale, eps=1e-2)
    np.testing.assert_allclose(process_advantages(**packed(batch, shift), scale=scale, eps=1e-2), own, atol=1e-8)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(-1, 1), st.integers(1, 5), st.floats(-3, 3)), min_size=1, max_size=8),
    ddof=st.sampled_from([0, 1]),
)
def test_one_step_at_the_end_is_the_advantage_of_the_response(rows, ddof):
    batch: list[Response] = [(group, length, [(length - 1, reward)]) for group, length, reward in rows]
    rewards, groups = [r for _, _, r in rows], [g for g, _, _ in rows]
    lengths = torch.tensor([length for _, length, _ in rows])
    close(process_advantages(**packed(batch), ddof=ddof), grpo(rewards, groups, ddof).repeat_interleave(lengths))
    close(process_advantages(**packed(batch), scale="none"), group_mean(rewards, groups).repeat_interleave(lengths))


@settings(max_examples=60, deadline=None)
@given(batch=batches, data=st.data())
def test_order_of_responses_and_steps_does_not_matter(batch, data):
    order = data.draw(st.permutations(range(len(batch))))
    columns = packed(batch)
    own = process_advantages(**columns)
    bounds = list(pairwise(columns["cu_seqlens"].tolist()))
    moved = process_advantages(**packed([batch[n] for n in order]))
    close(moved, torch.cat([own[slice(*bounds[n])] for n in order]))
    columns["step_rewards"], columns["step_tokens"] = columns["step_rewards"].flip(0), columns["step_tokens"].flip(0)
    close(process_advantages(**columns), own)


def test_only_loss_tokens_get_an_advantage():
    """A step may end on a token of the environment; the tokens before it are rewarded all the same."""
    columns = packed([(0, 4, [(1, 1.0), (3, 0.0)])])
    columns["loss_mask"] = torch.tensor([True, False, True, True])
    close(process_advantages(**columns, scale="none"), [0, 0, -0.5, -0.5])
    assert process_advantages(**columns, scale="none")[1] == 0


@settings(max_examples=30, deadline=None)
@given(reward=st.floats(-1e3, 1e3), scale=st.sampled_from(["std", "none"]))
def test_no_contrast_is_exactly_zero(reward, scale):
    batch: list[Response] = [(0, 3, [(0, reward), (2, reward)]), (0, 2, [(1, reward)]), (1, 1, [(0, reward)])]
    assert process_advantages(**packed(batch), scale=scale).tolist() == [0.0] * 6


def test_dtypes_and_refusals():
    columns = packed([(0, 2, [(1, 1.0)]), (0, 2, [(1, 0.0)])])
    assert process_advantages(**columns).dtype == torch.float64
    assert process_advantages(**{**columns, "step_rewards": torch.tensor([1.0, 0.0])}).dtype == torch.float32
    assert process_advantages(**{**columns, "step_rewards": [1, 0], "step_tokens": np.array([1, 3])})[0] > 0
    empty = process_advantages(**{**columns, "step_rewards": [], "step_tokens": np.zeros(0, dtype=np.int64)})
    assert empty.tolist() == [0, 0, 0, 0]
    for wrong, told in (
        ({"step_tokens": [1, 4]}, "step 1 ends at token 4, but the batch holds 4"),
        ({"step_tokens": [-1, 1]}, "step 0 ends at token -1"),
        ({"step_tokens": [1]}, r"must both be \[S\]"),
        ({"groups": [0]}, "one for each of 2 sequences"),
        ({"scale": "rate"}, "scale 'rate'"),
        ({"ddof": 2}, "ddof"),
        ({"loss_mask": torch.ones(4)}, "expected bool"),
    ):
        with pytest.raises(ValueError, match=told):
            process_advantages(**{**columns, **wrong})
    with pytest.raises(NumericsError, match="the reward of step 1 is nan"):
        process_advantages(**{**columns, "step_rewards": [1.0, math.nan]})
