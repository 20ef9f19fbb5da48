"""Sampling in a thread of its own, while the trainer's thread trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from megarl.rollout.player import Sample
from megarl.run.progress import Advance
from megarl.train.sampling.assignment import Key


class BackgroundSampling:
    """Starts at once. ``result`` raises what ``sample`` raises."""

    def __init__(self, sample: Callable[[Advance], dict[Key, Sample]]) -> None:
        """``sample(on_finish)`` must make no collective call: those belong to the trainer's thread."""
        self._lock = threading.Lock()
        self._num_finished = 0
        self._on_finish: Advance | None = None
        self._future: Future[dict[Key, Sample]] = Future()
        # A daemon thread: a trainer that ends with an error does not wait for responses that nobody wants.
        threading.Thread(target=self._run, args=(sample,), name="sampling", daemon=True).start()

    def result(self, on_finish: Advance | None = None) -> dict[Key, Sample]:
        """Wait for the result. ``on_finish`` is called with what is complete now, then for every further response."""
        with self._lock:
            self._on_finish = on_finish
            if on_finish is not None and self._num_finished:
                on_finish(self._num_finished)
        return self._future.result()

    def _run(self, sample: Callable[[Advance], dict[Key, Sample]]) -> None:
        try:
            self._future.set_result(sample(self._count))
        except BaseException as error:
            self._future.set_exception(error)

    def _count(self, number: int) -> None:
        with self._lock:
            self._num_finished += number
            if self._on_finish is not None:
                self._on_finish(number)
