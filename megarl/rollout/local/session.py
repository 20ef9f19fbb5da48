"""The local engine's session: it samples one batch whenever every episode waits for a response.

What is in a batch then depends on the episodes alone and not on their timing, and so does every float of the results.
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
        """``sample`` gets all waiting requests, in the order of (group, sample), and blocks the event loop."""
        super().__init__()
        self._sample_batch = sample
        self._waiting: dict[asyncio.Future[Rollout], SampleRequest] = {}

    def run(self, begin: Callable[[Session], None]) -> None:
        """Run all episodes; raises the first error of one of them, or of ``begin``."""
        run_session(self.run_episodes(begin))

    async def sample(self, request: SampleRequest) -> Rollout:
        """See ``Session.sample``."""
        answer: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
        self._waiting[answer] = request
        self._after_episode()
        try:
            return await answer
        finally:
            self._waiting.pop(answer, None)

    def _after_episode(self) -> None:
        if self._all_wait():
            asyncio.get_running_loop().call_soon(self._answer_all)

    def _all_wait(self) -> bool:
        return 0 < len(self._waiting) >= len(self._episodes)

    def _answer_all(self) -> None:
        if not self._all_wait():  # an episode has gone on since: this is called again when it waits
            return
        waiting = sorted(self._waiting.items(), key=lambda item: (item[1].group, item[1].sample))
        self._waiting.clear()
        try:
            rollouts = self._sample_batch([request for _, request in waiting])
        except Exception as error:  # any error must reach the waiting episodes, which end the session
            for answer, _ in waiting:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (answer, _), rollout in zip(waiting, rollouts, strict=True):
            if not answer.done():  # done: the episode was cancelled
                answer.set_result(rollout)
