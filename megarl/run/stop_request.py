"""A request to stop: SIGUSR1, SIGTERM, SIGINT (Ctrl-C), or ``megarl launch``. The run saves itself first.

torchrun passes SIGTERM and the first SIGINT on to its ranks, a second SIGINT as SIGTERM, and kills what is left of them
after 30 s.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from megarl.errors import StopError
from megarl.megatron.distributed import largest
from megarl.run.progress import Advance

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
_ONE_KEY_S = 1.0
"""One Ctrl-C may come twice within this: from the terminal, and from a launcher that passes it on."""


class StopRequest:
    """Set by a signal of this process, or by ``ask``; a context manager that puts the old handlers back.

    A second Ctrl-C is a KeyboardInterrupt: who cannot wait for the save ends the run at once.
    Ranks hear of a request at different times, so what follows from it is decided together: ``agreed``.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()
        self._interrupted_at: float | None = None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._heard) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def ask(self, who: str) -> None:
        """Stop because ``who`` wants it; from any thread."""
        self.reason = self.reason or who

    def check(self) -> None:
        """Raise StopError if this rank was asked to stop; for the middle of what can be drawn again."""
        if self.reason is not None:
            raise StopError(f"asked to stop by {self.reason}")

    def checking(self, advance: Callable[[int], None]) -> Advance:
        """``advance`` that checks too."""

        def checked(count: int) -> None:
            advance(count)
            self.check()

        return checked

    def agreed(self) -> bool:
        """Whether any rank was asked to stop; a collective call."""
        return bool(largest(int(self.reason is not None), dist.group.WORLD))

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and os.getpid() == self._process:  # forked writers end with the process they serve
            self._interrupted()
        self.reason = self.reason or signal.Signals(number).name

    def _interrupted(self) -> None:
        now = time.monotonic()
        if self._interrupted_at is None:
            self._interrupted_at = now
            if os.environ.get("RANK", "0") == "0":  # not print: a signal may come in the middle of one
                under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
                then = "torchrun waits 30 s for that" if under_torchrun else "a second Ctrl-C ends at once"
                os.write(2, f"\nmegarl: stopping; finished steps are saved first, {then}\n".encode())
        elif now - self._interrupted_at > _ONE_KEY_S:
            raise KeyboardInterrupt
