"""A request to stop the run, which saves itself first.

SIGUSR1, SIGTERM, SIGINT (Ctrl-C), SIGHUP (the terminal is gone) and ``megarl launch`` make such a request. torchrun
forwards SIGTERM and the first SIGINT to its ranks, a second SIGINT as SIGTERM, and kills remaining ranks after 30 s.
(When sampling stops is decided in ``megarl.core.choices.stopping``.)
"""

import os
import signal
import threading
import time
from types import FrameType
from typing import Any, Self

from megarl.errors import StopError
from megarl.megatron.distributed import largest
from megarl.run.signals import take_stop_signals

_ONE_KEY_S = 1.0
"""A Ctrl-C may arrive twice within so many seconds: from the terminal, and from a launcher that forwards the signal."""


class StopRequest:
    """Set by a signal, or by ``ask``; a context manager that restores the old signal handlers.

    A second Ctrl-C raises KeyboardInterrupt, which ends the run at once, without a save. Ranks learn of a request at
    different times, so all ranks decide together: ``agree``.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()
        self._interrupted_at: float | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = take_stop_signals(self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def ask(self, name: str) -> None:
        """Request a stop in the name of ``who``; from any thread."""
        self.reason = self.reason or name

    def check(self, _: int = 0) -> None:
        """StopError if this rank was asked to stop. Call only where the work can be repeated."""
        if self.reason is not None:
            raise StopError(f"asked to stop by {self.reason}")

    def agree(self) -> bool:
        """Return whether any rank was asked to stop; a collective call."""
        return bool(largest(int(self.reason is not None)))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and os.getpid() == self._process:  # not in forked writers
            self._on_ctrl_c()
        self.reason = self.reason or signal.Signals(number).name

    def _on_ctrl_c(self) -> None:
        now = time.monotonic()
        if self._interrupted_at is None:
            self._interrupted_at = now
            if os.environ.get("RANK", "0") == "0":  # not print, which is not safe in a signal handler
                is_launched = "TORCHELASTIC_RUN_ID" in os.environ
                then = "torchrun waits 30 s for that" if is_launched else "a second Ctrl-C ends at once"
                os.write(2, f"\nmegarl: stopping; finished steps are saved first, {then}\n".encode())
        elif now - self._interrupted_at > _ONE_KEY_S:
            raise KeyboardInterrupt
