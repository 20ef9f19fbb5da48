"""Threads and time limits of a weight update. A server without an answer by the deadline of a step hangs."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from megarl.errors import WeightSyncError

Result = TypeVar("Result")
CONTROL_S = 15.0
"""Deadline of a step without weights: pause, session, flush, name, resume. A scheduler answers between two forward
passes, of which the longest, a chunk of prompts, takes a few seconds."""
JOIN_S = 0.25
"""Additional time per rank that joins a process group."""
BYTES_PER_S = 50e6
"""Slowest way of weights to a server: base64 in JSON through one Python process, or half of a gigabit network."""
WHOLE_S = 120.0
"""Deadline of a step over the GPU's whole memory: the end of a session, checksums, memory to allocate."""


def deadline(num_bytes: int = 0) -> float:
    """Seconds for a step that moves ``num_bytes`` to a server: CONTROL_S + num_bytes / BYTES_PER_S."""
    return CONTROL_S + num_bytes / BYTES_PER_S


class HangError(WeightSyncError):
    """The server has not answered by its deadline, or not joined in a group."""


class GoneError(WeightSyncError):
    """The server refuses or loses connections, or answers with HTTP 5xx."""


class Line:
    """Runs one step at a time in a thread, while the caller prepares the next step."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "weight-sending")
        self._running: Future[None] | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def put(self, step: Callable[[], None]) -> None:
        """Start a step after the previous step has ended; raises the error of the previous step."""
        self.wait()
        self._running = self._thread.submit(step)

    def wait(self) -> None:
        """Wait for the running step, if any; raises the error of the step."""
        running, self._running = self._running, None
        if running is not None:
            running.result()


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
