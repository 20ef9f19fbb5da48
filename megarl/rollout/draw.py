"""Draws what a sampling rule asks for, and tells the rule what came of it, until it has enough."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from megarl.core.sampling.collector import Ask
from megarl.core.types import SampleRequest
from megarl.data.prompts import Prompt
from megarl.rollout.engine import Session
from megarl.rollout.player import Player, Sample

RequestOf = Callable[[int, int], tuple[SampleRequest, Prompt]]
"""(prompt, sample) -> what the engine is asked for, and the problem."""


class Asker(Protocol):
    """What to draw next; ``megarl.core.sampling.collector.Collector`` is one."""

    def start(self) -> Sequence[Ask]:
        """The first samples."""
        ...

    def add(self, prompt: int, sample: int, reward: float | None) -> Sequence[Ask]:
        """More, because of a sample that has arrived."""
        ...

    @property
    def done(self) -> bool:
        """Whether nothing that is under way is needed any more."""
        ...


class Draw:
    """One rank's samples of a step. ``engine.converse(draw.begin, params)`` returns when they are there."""

    def __init__(self, asker: Asker, request_of: RequestOf, player: Player) -> None:
        self.samples: dict[tuple[int, int], Sample] = {}
        """By (prompt, sample), as they arrive."""
        self.dropped = 0
        """Samples that were under way when nothing more was needed."""
        self._asker, self._request_of, self._player = asker, request_of, player
        self._under_way: set[asyncio.Task[None]] = set()

    def begin(self, session: Session) -> None:
        """Start the first episodes; each one starts those that follow from it."""
        self._start(session, self._asker.start())

    def _start(self, session: Session, asks: Sequence[Ask]) -> None:
        for ask in asks:
            for sample in ask.samples:
                task = session.start(self._one(session, ask.prompt, sample))
                self._under_way.add(task)
                task.add_done_callback(self._under_way.discard)

    async def _one(self, session: Session, prompt: int, sample: int) -> None:
        drawn = await self._player.play(session, *self._request_of(prompt, sample))
        if self._asker.done:
            return  # it came in the moment that another one was enough
        self.samples[prompt, sample] = drawn
        self._start(session, self._asker.add(prompt, sample, drawn.reward))
        if self._asker.done:
            # Also those count as under way that have an answer and were not heard; one that has ended may be here yet.
            others = {task for task in self._under_way if not task.done()} - {asyncio.current_task()}
            self.dropped = len(others)
            for task in others:
                task.cancel()
