"""A session for an engine that computes whole batches: it samples when every episode waits for it.

What is in a batch then depends on the episodes and not on their timing, and so does every float of the results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from megarl.core.types import Rollout, SampleRequest
from megarl.rollout.engine import Session
from megarl.rollout.sessions import SessionBase, run_session


class BatchSession(SessionBase):
    """Implements ``megarl.rollout.engine.Session``."""

    def __init__(self, sample: Callable[[Sequence[SampleRequest]], list[Rollout]]) -> None:
        """``sample`` gets all that is waited for, in the order of (group, sample), and blocks the event loop."""
        super().__init__()
        self._sample = sample
        self._waiting: dict[asyncio.Future[Rollout], SampleRequest] = {}

    def run(self, begin: Callable[[Session], None]) -> None:
        """Run all episodes; the first error of one of them, or of ``begin``, is raised."""
        run_session(self.run_episodes(begin))

    async def sample(self, request: SampleRequest) -> Rollout:
        """See ``Session.sample``."""
        answer: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
        self._waiting[answer] = request
        self._look()
        try:
            return await answer
        finally:
            self._waiting.pop(answer, None)

    def _after_an_episode(self) -> None:
        self._look()

    def _look(self) -> None:
        if self._waiting and len(self._waiting) >= len(self._episodes):
            asyncio.get_running_loop().call_soon(self._answer)

    def _answer(self) -> None:
        """Sample for everyone, unless one has gone on or ended since: then this is called again."""
        if not self._waiting or len(self._waiting) < len(self._episodes):
            return
        waiting = sorted(self._waiting.items(), key=lambda item: (item[1].group, item[1].sample))
        self._waiting.clear()
        try:
            rollouts = self._sample([request for _, request in waiting])
        except Exception as error:  # whatever it is, those who wait must hear of it: it ends the session
            for answer, _ in waiting:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (answer, _), rollout in zip(waiting, rollouts, strict=True):
            if not answer.done():  # done: its episode was cancelled
                answer.set_result(rollout)
