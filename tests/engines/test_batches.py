"""When an engine that computes in batches samples, and for whom."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from megarl.core.types import Rollout, SampleRequest
from megarl.engines.local.engine import BatchSession
from megarl.engines.protocol import run_session
from megarl.errors import RolloutError


def request(group: int, sample: int = 0) -> SampleRequest:
    return SampleRequest(np.array([3], np.int32), group, sample, 0)


class Echo:
    """Remembers the groups of each batch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __call__(self, requests: Sequence[SampleRequest]) -> list[Rollout]:
        self.batches.append([each.group for each in requests])
        zeros = np.zeros(2, np.int32)
        return [
            Rollout(r.group, r.sample, zeros, zeros > 0, np.zeros(2, np.float32), None, None, zeros, "stop")
            for r in requests
        ]


def test_a_batch_waits_for_whoever_is_between_two_samples_and_is_in_order() -> None:
    """Who ends or begins between changes the next batch alone, and the cancelled are left out."""
    echo = Echo()

    def begin(session: Any) -> None:
        async def two_turns(group: int, pause: float) -> None:
            first = await session.sample(request(group))
            assert first.group == group
            await asyncio.sleep(pause)
            if group == 0:
                session.start(once(5))
            await session.sample(request(group))

        async def once(group: int) -> None:
            await session.sample(request(group))

        async def cancels() -> None:
            await asyncio.sleep(0.01)
            doomed.cancel()
            await asyncio.sleep(0.01)

        for group, pause in ((2, 0.05), (0, 0.0), (1, 0.02)):
            session.start(two_turns(group, pause))
        session.start(once(3))
        doomed = session.start(once(4))
        session.start(cancels())

    run_session(BatchSession(echo).run_episodes(begin))
    assert echo.batches == [[0, 1, 2, 3], [0, 1, 2, 5]]


@pytest.mark.parametrize("where", ["engine", "episode"])
def test_an_error_is_raised_once_and_ends_all(where: str) -> None:
    def broken(_: Sequence[SampleRequest]) -> list[Rollout]:
        raise RolloutError("no token")

    def begin(session: Any) -> None:
        async def once(group: int) -> None:
            if where == "episode" and group == 1:
                raise RolloutError("no token")
            await session.sample(request(group))

        for group in range(3):
            session.start(once(group))

    with pytest.raises(RolloutError, match="no token"):
        run_session(BatchSession(broken if where == "engine" else Echo()).run_episodes(begin))
