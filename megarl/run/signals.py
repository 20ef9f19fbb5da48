"""The last words of a command that a signal ends, and outputs without a reader."""

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from megarl.errors import MegarlError
from megarl.run.status import write_failure

STOPPING = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ENDING = (
    *(signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),
    *(signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO, signal.SIGPWR),
)
"""Signals that end a process silently. Not the signals of a crash, and not SIGINT, which Python raises."""


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """A thread ends the process at once, also where the main thread waits in C for another rank."""


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


@contextmanager
def say_what_ends(command: str, kept: str) -> Iterator[None]:
    """Inside, a signal of ENDING ends the process with a line on stderr and with exit code 128 + its number.

    ``kept``: what remains of the work. Signals that are ignored (nohup) or handled keep their handlers. In the main
    thread only; a forked process gets the defaults back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    silent = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]

    def end() -> None:
        while number := os.read(reader, 1):
            if signal.getsignal(number[0]) is _do_nothing:
                _end(signal.Signals(number[0]), command, kept)
        os.close(reader)

    def give_back() -> None:
        signal.set_wakeup_fd(wakeup_before)
        for number in silent:
            if signal.getsignal(number) is _do_nothing:
                signal.signal(number, signal.SIG_DFL)

    is_closed = False
    os.register_at_fork(after_in_child=lambda: None if is_closed else give_back())
    threading.Thread(target=end, name="signals", daemon=True).start()
    wakeup_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in silent:
        signal.signal(number, _do_nothing)
    try:
        yield
    finally:
        give_back()
        is_closed = True
        os.close(writer)  # which ends the thread


def _end(number: signal.Signals, command: str, kept: str) -> None:
    if number == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ:
        os._exit(128 + number)  # torchrun sent it and says why: another rank has failed, or torchrun was told to stop
    rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
    message = f"megarl {command}{rank} was ended by {number.name}: {kept}"
    with suppress(OSError):
        write_failure(MegarlError(message))
        os.write(sys.stderr.fileno(), f"megarl: error: {message}\n".encode())
    os._exit(128 + number)


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
