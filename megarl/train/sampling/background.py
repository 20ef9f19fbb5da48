"""What the engine samples in a thread of its own, while the trainer's goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from megarl.run.progress import Advance

T = TypeVar("T")


class Drawing(Generic[T]):
    """Starts at once. What ``draw`` raises is raised by ``result``."""

    def __init__(self, draw: Callable[[Advance], T]) -> None:
        """``draw(on_finish)`` samples; nothing in it may be a collective call, those belong to the trainer's thread."""
        self._lock = threading.Lock()
        self._finished = 0
        self._shown: Advance | None = None
        self._future: Future[T] = Future()
        # A daemon: a trainer that ends with an error must not wait for responses that nobody wants.
        threading.Thread(target=self._run, args=(draw,), name="drawing", daemon=True).start()

    def result(self, on_finish: Advance | None = None) -> T:
        """Wait for all; ``on_finish`` hears of those that are complete by now, and then of the others one by one."""
        with self._lock:
            self._shown = on_finish
            if on_finish is not None and self._finished:
                on_finish(self._finished)
        return self._future.result()

    def _run(self, draw: Callable[[Advance], T]) -> None:
        try:
            self._future.set_result(draw(self._count))
        except BaseException as error:
            self._future.set_exception(error)

    def _count(self, number: int) -> None:
        with self._lock:
            self._finished += number
            if self._shown is not None:
                self._shown(number)
