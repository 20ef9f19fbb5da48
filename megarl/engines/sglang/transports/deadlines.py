"""Time limits of the steps of a weight update, and when a server counts as late.

- **Deadline.** A server without an answer by the deadline hangs.
- **Late.** Half of the servers have done a step, and as much time again has passed, at least ``LATE_S``: the update
  continues without the rest. A late server gets twice as long from then on, up to ``MOST_LENIENT`` times: a slow
  machine is left out once and not for ever.
- **Stop on purpose.** A server after SIGTERM keeps connections open and may never answer, but the health check says 503
  at once, or refuses connections. The check runs while a step takes longer than ``NOTICE_S``.
"""

import math
import time
from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from megarl.errors import WeightSyncError

CONTROL_S = 15.0
"""Deadline of a step without weights: pause, session, flush, name, resume. A scheduler answers between two forward
passes, of which the longest, a chunk of prompts, takes a few seconds."""
JOIN_S = 0.25
"""Additional time per rank that joins a process group."""
BYTES_PER_S = 50e6
"""Slowest way of weights to a server: base64 in JSON through one Python process, or half of a gigabit network."""
WHOLE_S = 120.0
"""Deadline of a step over the GPU's whole memory: the end of a session, checksums, memory to allocate."""
SCORE_S = 60.0
"""Deadline of the log-probabilities of a short prompt, whose kernels may have to be compiled."""
LATE_S = 5.0
MOST_LENIENT = 4
NOTICE_S = 1.0
HEALTH_S = 1.0
"""Time limit of the health check during a step longer than ``NOTICE_S``."""


def deadline(num_bytes: int = 0) -> float:
    """Seconds for a step that moves ``num_bytes`` to a server: CONTROL_S + num_bytes / BYTES_PER_S."""
    return CONTROL_S + num_bytes / BYTES_PER_S


class HangError(WeightSyncError):
    """The server has not answered by its deadline, or not joined in a group."""


class GoneError(WeightSyncError):
    """The server refuses or loses connections, or reports its stop."""


class Patience:
    """Patience with a step of several servers."""

    def __init__(self, leniency: int = 1) -> None:
        """leniency: factor on the time for the servers of this step."""
        self._began, self._until, self._leniency = time.monotonic(), math.inf, leniency

    def is_over(self, num_done: int, num_running: int) -> bool:
        """Whether the running servers are late; failed servers are in neither number."""
        now = time.monotonic()
        if num_done and num_done >= num_running:
            self._until = min(self._until, now + self._leniency * max(LATE_S, now - self._began))
        return now > self._until


def await_most(steps: Collection[Future[Any]], leniency: int = 1) -> None:
    """Return when all steps have ended, with or without an error, or the rest is late."""
    patience, running = Patience(leniency), {*steps}
    while running and not patience.is_over(sum(step.done() and not step.exception() for step in steps), len(running)):
        running = wait(running, timeout=0.05, return_when=FIRST_COMPLETED).not_done
