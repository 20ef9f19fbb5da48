"""Threads of a weight update: a line that sends a bucket during the making of the next bucket, and calls to servers."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


class Line:
    """Runs one step at a time in a thread, while the caller prepares the next step."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "weight-sending")
        self._running: Future[None] | None = None
        self.busy_s = 0.0
        """Seconds that the steps took."""
        self.awaited_s = 0.0
        """Seconds that the caller waited for steps."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def put(self, step: Callable[[], None]) -> None:
        """Start a step after the previous step has ended; raises the error of the previous step."""
        self.wait()
        self._running = self._thread.submit(self._measure, step)

    def wait(self) -> None:
        """Wait for the running step, if any; raises the error of the step."""
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


def in_thread(work: Callable[[], Result], daemon: bool = True) -> Future[Result]:
    """Run ``work`` in a thread of its own. Daemon threads die with the process, which must not happen inside torch."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # from HTTP, gloo, NCCL or the store; the waiting thread raises it
            # Without frames, which would keep store and group alive.
            future.set_exception(error.with_traceback(None))
        else:
            future.set_result(result)

    threading.Thread(target=run, name="weight-sync", daemon=daemon).start()
    return future
