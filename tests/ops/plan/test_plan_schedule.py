"""The arithmetic of batches, by hand and against the code that divides them."""

from __future__ import annotations

import pytest
from plan_worlds import config

from megarl.config import Layout
from megarl.core.packing import partition
from megarl.errors import ConfigError
from megarl.ops.plan.layout import divide_step
from megarl.ops.plan.trainer_memory import in_flight


def divided(ranks: int = 1, **overrides: object) -> int:
    settings = config("unused", **overrides)
    return divide_step(settings, settings.check_world_size(ranks))


@pytest.mark.parametrize("limit", [32, 63, 64, 512])
def test_the_most_micro_batches_are_those_of_the_longest_sequences(limit: int) -> None:
    assert divided(train__micro_batch_tokens=limit) == len(partition([32] * 16, limit))


def test_steps_by_hand() -> None:
    """16 responses, N = 2, dp = 2: 4 sequences of up to 32 tokens a rank, two in 64 tokens."""
    assert divided(2, train__mini_batches=2) == 2
    assert divided(2, parallel__cp=2) == 4  # 2 ranks of 64 tokens take 4 sequences of 32 together
    # Interleaving takes micro-batches by the number of stages.
    assert divided(2, parallel__pp=2, parallel__vpp=2, train__micro_batch_tokens=512) == 2
    overrides = {"parallel__pp": 4, "parallel__vpp": 2, "train__mini_batches": 8}
    with pytest.raises(ConfigError, match=r"takes 4 micro-batches at a time .* gives a rank 2 sequences"):
        divided(4, **overrides)


def layout(pp: int, vpp: int | None = None) -> Layout:
    return Layout(1, pp, vpp, 1, 1, 1, 1, 1, 16)


def test_micro_batches_that_wait_for_their_backward_pass() -> None:
    assert [in_flight(layout(4), stage, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight(layout(4), stage, 2) for stage in range(4)] == [2, 2, 2, 1]
    assert [in_flight(layout(2, 2), stage, 8) for stage in range(2)] == [5, 3]
    assert in_flight(layout(1), 0, 8) == 1
