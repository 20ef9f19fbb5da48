"""Signals that ask a run to stop, and outputs without a reader."""

import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

STOPPING = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def take_stop_signals(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    """Let ``handler`` handle the signals of STOPPING, but not an ignored SIGHUP (nohup).

    Returns the handlers before it.
    """
    numbers = [number for number in STOPPING if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN)]

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            drop_lost_outputs()  # printing about the stop must not end it
        handler(number, frame)

    return {number: signal.signal(number, handle) for number in numbers}


def drop_lost_outputs() -> bool:
    """Redirect standard output and error to the null device where their reader is gone; return whether one was.

    A reader ends as in ``megarl doctor | head``, or with its terminal: every later write would raise an error.
    """
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # no stream, or a stream without a file
            poll.register(stream.fileno(), 0)
    lost = [number for number, event in poll.poll(0) if event & (select.POLLERR | select.POLLHUP)]
    for number in lost:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)
    return bool(lost)
