"""What a signal says that ends a command, and outputs that nobody reads any more."""

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
"""Signals that end a process without a word of its own; not those of a crash, and not SIGINT, which Python raises."""


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """A thread ends the process at once, also where the main thread waits in C for another rank."""


def take_stop_signals(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    """Let ``handler`` have the signals that ask a run to stop, but SIGHUP where it is ignored (nohup).

    Returns the handlers before it.
    """
    taken = [number for number in STOPPING if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN)]

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            drop_lost_outputs()  # what is printed about the stop must not end it
        handler(number, frame)

    return {number: signal.signal(number, handle) for number in taken}


@contextmanager
def say_what_ends(command: str, kept: str) -> Iterator[None]:
    """Inside, a signal of ENDING ends the process with a line on stderr and with exit code 128 + its number.

    ``kept``: what is there of the work. Signals that are ignored (nohup), or that have another handler, stay so. In the
    main thread only; a forked process gets the defaults back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    taken = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]

    def end() -> None:
        while number := os.read(read, 1):
            if signal.getsignal(number[0]) is _do_nothing:
                _end(signal.Signals(number[0]), command, kept)
        os.close(read)

    def give_back() -> None:
        signal.set_wakeup_fd(before)
        for number in taken:
            if signal.getsignal(number) is _do_nothing:
                signal.signal(number, signal.SIG_DFL)

    closed = False
    os.register_at_fork(after_in_child=lambda: None if closed else give_back())
    threading.Thread(target=end, name="signals", daemon=True).start()
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in taken:
        signal.signal(number, _do_nothing)
    try:
        yield
    finally:
        give_back()
        closed = True
        os.close(write)  # which ends the thread


def _end(number: signal.Signals, command: str, kept: str) -> None:
    if number == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ:
        os._exit(128 + number)  # of torchrun, which says why: another rank has failed, or it was told to stop
    rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
    said = f"megarl {command}{rank} was ended by {number.name}: {kept}"
    with suppress(OSError):
        write_failure(MegarlError(said))
        os.write(sys.stderr.fileno(), f"megarl: error: {said}\n".encode())
    os._exit(128 + number)


def drop_lost_outputs() -> bool:
    """Let standard output and error lead nowhere where nobody reads them any more; returns whether one was such.

    A reader has gone as in ``megarl doctor | head``, or with its terminal: every later write would raise an error.
    """
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # no stream, or one without a file
            poll.register(stream.fileno(), 0)
    lost = [number for number, event in poll.poll(0) if event & (select.POLLERR | select.POLLHUP)]
    for number in lost:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
    return bool(lost)
