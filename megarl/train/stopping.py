"""A request to stop: SIGUSR1, SIGTERM (torchrun ends its ranks), or ``megarl launch``. The run saves itself first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from megarl.errors import StopError
from megarl.megatron.distributed import largest
from megarl.train.progress import Advance

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


class StopRequest:
    """Set by a signal of this process, or by ``ask``; a context manager that puts the old handlers back.

    Ranks hear of a request at different times, so what follows from it is decided together: ``agreed``.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._before: dict[signal.Signals, Any] = {}

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
        self.reason = signal.Signals(number).name
