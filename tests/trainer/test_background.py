"""Responses that are drawn in the background: all of them, their count, and what went wrong."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from megarl.core.types import Rollout
from megarl.errors import RolloutError, StopError
from megarl.trainer.sampling.requests import BackgroundSampling


def rollout(sample: int) -> Rollout:
    return Rollout(
        group=0,
        sample=sample,
        tokens=np.array([3, 4], np.int32),
        loss_mask=np.array([False, True]),
        rollout_logprobs=np.zeros(2, np.float32),
        routed_experts=None,
        routed_mask=None,
        weight_versions=np.zeros(2, np.int32),
        finish_reason="stop",
    )


def test_it_begins_at_once_and_every_response_is_counted_once():
    first_done, go_on = threading.Event(), threading.Event()

    def draw(on_finish):
        on_finish(2)
        first_done.set()
        assert go_on.wait(60.0)
        on_finish(1)
        return [rollout(sample) for sample in range(3)]

    sampling = BackgroundSampling(draw)
    assert first_done.wait(60.0)  # nobody has asked for it yet
    seen: list[int] = []

    def count(number: int) -> None:
        seen.append(number)
        go_on.set()

    assert [r.sample for r in sampling.result(count)] == [0, 1, 2]
    assert sum(seen) == 3
    assert len(sampling.result()) == 3  # and again


def test_an_error_is_raised_where_the_result_is_asked_for():
    def draw(on_finish):
        raise RolloutError("all servers are down")

    sampling = BackgroundSampling(draw)
    for _ in range(2):
        with pytest.raises(RolloutError, match="all servers are down"):
            sampling.result()


def test_a_request_to_stop_ends_the_wait_where_no_response_is_there():
    def stop(count: int) -> None:
        raise StopError(f"asked to stop after {count}")

    go_on = threading.Event()
    sampling = BackgroundSampling(lambda on_finish: {} if go_on.wait(60.0) else None)
    for on_finish in (stop, None):
        with pytest.raises(StopError, match="asked to stop after 0"):
            sampling.result(on_finish)
    go_on.set()
