"""Draws the samples that a sampling rule asks for, and reports their rewards to it, until it has enough."""

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
"""(prompt, sample) -> the request to the engine, and the problem."""


class Asker(Protocol):
    """Decides what to draw next; ``megarl.core.sampling.collector.Collector`` is one."""

    def start(self) -> Sequence[Ask]:
        """Returns the first samples to draw."""

    def add(self, prompt: int, sample: int, reward: float | None) -> Sequence[Ask]:
        """Takes a sample that has arrived; returns what to draw after it."""

    @property
    def done(self) -> bool:
        """Whether it has enough: samples in flight are not needed."""


class Draw:
    """One rank's samples of a step; ``engine.converse(draw.begin, params)`` returns when they are complete."""

    def __init__(self, asker: Asker, request_of: RequestOf, player: Player) -> None:
        self.samples: dict[tuple[int, int], Sample] = {}
        """By (prompt, sample), as they arrive."""
        self.dropped = 0
        """Samples in flight when the rule had enough."""
        self._asker, self._request_of, self._player = asker, request_of, player
        self._in_flight: set[asyncio.Task[None]] = set()

    def begin(self, session: Session) -> None:
        """Start the first episodes; each one starts those that its reward calls for."""
        self._start(session, self._asker.start())

    def _start(self, session: Session, asks: Sequence[Ask]) -> None:
        for ask in asks:
            for sample in ask.samples:
                task = session.start(self._play(session, ask.prompt, sample))
                self._in_flight.add(task)
                task.add_done_callback(self._in_flight.discard)

    async def _play(self, session: Session, prompt: int, sample: int) -> None:
        drawn = await self._player.play(session, *self._request_of(prompt, sample))
        if self._asker.done:
            return  # another sample was enough in the meantime
        self.samples[prompt, sample] = drawn
        self._start(session, self._asker.add(prompt, sample, drawn.reward))
        if self._asker.done:
            # Finished but unprocessed samples count as in flight; tasks that have ended may not be discarded yet.
            others = {task for task in self._in_flight if not task.done()} - {asyncio.current_task()}
            self.dropped = len(others)
            for task in others:
                task.cancel()
