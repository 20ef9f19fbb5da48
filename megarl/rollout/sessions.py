"""What the sessions of all engines share: episodes run as tasks, and the first error ends the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Self


class SessionBase:
    """Base of the implementations of ``megarl.rollout.engine.Session``."""

    def __init__(self) -> None:
        self._episodes: set[asyncio.Task[None]] = set()
        self._tasks = asyncio.TaskGroup()

    async def run_episodes(self, begin: Callable[[Self], None]) -> None:
        """Run the episodes that ``begin`` starts, until all have ended."""
        async with self._tasks:
            begin(self)

    def start(self, episode: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """See ``Session.start``."""
        task = self._tasks.create_task(episode)
        self._episodes.add(task)
        task.add_done_callback(self._end_episode)
        return task

    def _end_episode(self, task: asyncio.Task[None]) -> None:
        self._episodes.discard(task)
        self._after_episode()

    def _after_episode(self) -> None:
        """Called whenever an episode has ended."""
        raise NotImplementedError


def run_session(session: Coroutine[Any, Any, None]) -> None:
    """Run it in an event loop of its own; of several errors the first is raised, which ended the others."""
    try:
        asyncio.run(session)
    except ExceptionGroup as several:
        raise several.exceptions[0] from None
