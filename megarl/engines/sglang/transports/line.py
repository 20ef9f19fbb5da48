"""A thread that sends one bucket while the next one is made."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Line:
    """Runs one step at a time in a thread, while its caller prepares the next."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "weight-sending")
        self._running: Future[None] | None = None
        self.busy_s = 0.0
        """Seconds that the steps took."""
        self.awaited_s = 0.0
        """Those of them that the caller waited."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def put(self, step: Callable[[], None]) -> None:
        """Start a step when the one before has ended; raises the error of that one."""
        self.wait()
        self._running = self._thread.submit(self._measure, step)

    def wait(self) -> None:
        """Wait for the step that runs, if one does; raises its error."""
        running, self._running = self._running, None
        if running is not None:
            started = time.perf_counter()
            try:
                running.result()
            finally:
                self.awaited_s += time.perf_counter() - started

    def _measure(self, step: Callable[[], None]) -> None:
        started = time.perf_counter()
        try:
            step()
        finally:
            self.busy_s += time.perf_counter() - started
