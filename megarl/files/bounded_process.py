"""Call functions in a forked process, with limits on processor time and memory of each call.

Foreign code, such as the chat template of a model's folder, may compute ``9 ** 9 ** 9``, nest loops, or build a text of
10 GB. A language sandbox does not prevent that; the kernel ends the process. A single process serves all calls, so that
a call takes a tenth of a millisecond.
"""

import ctypes
import gc
import multiprocessing as mp
import os
import resource
import signal
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megarl.errors import DataError, describe

CPU_S = 5
"""Seconds of processor time for a call; a chat template takes a thousandth."""
_MEMORY_BYTES = 1 << 30
"""Beyond the memory of the process at its start."""
_ANSWER_S = 900.0
"""After this time without an answer, a process counts as stuck."""
_PR_SET_PDEATHSIG = 1


class BoundedProcess:
    """Calls ``functions`` by name in a forked process, and starts the process again after a limit ended it."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        self._functions = functions
        self._end: Callable[[], Any] = lambda: None
        self._process: Any = None

    def call(self, name: str, *arguments: Any) -> Any:
        """Return the function's result. DataError, in a line, for an exception of the function, and beyond a limit."""
        if self._process is None:
            self._start()
        try:
            self._connection.send((name, arguments))
            if not self._connection.poll(_ANSWER_S):
                raise EOFError
            is_right, result = self._connection.recv()
        except (EOFError, OSError) as error:
            self._end()
            process: Any = self._process
            code, self._process = process.exitcode, None
            limit = f"it took more than {CPU_S} s of processor time" if code == -signal.SIGXCPU else f"exit code {code}"
            raise DataError(f"{limit}; its process has ended") from error
        except BaseException:  # of a signal: the next call would get the answer to this call
            self._end()
            self._process = None
            raise
        if not is_right:
            raise DataError(result)
        return result

    def _start(self) -> None:
        context = mp.get_context("fork")
        self._connection, child_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(child_end, self._functions), daemon=True)
        is_collecting = gc.isenabled()
        gc.disable()  # until the child has frozen its garbage
        try:
            self._process.start()
        finally:
            if is_collecting:
                gc.enable()
        child_end.close()
        self._end = weakref.finalize(self, _stop, self._process, self._connection)


def _stop(process: Any, connection: Connection) -> None:
    connection.close()
    process.kill()
    process.join()


def _serve(connection: Connection, functions: dict[str, Callable[..., Any]]) -> None:
    gc.freeze()  # the parent's objects are not to be finalized in this process
    gc.enable()
    # Inherited locks and pipes would live as long as this process. The limit of descriptors may be 1e9.
    for descriptor in set(map(int, os.listdir("/proc/self/fd"))) - {0, 1, 2, connection.fileno()}:
        with suppress(OSError):
            os.close(descriptor)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal signals the parent too, and the parent ends this process
    limit_memory(_MEMORY_BYTES)
    lower_limit(resource.RLIMIT_CORE, 0)
    while True:
        try:
            name, arguments = connection.recv()
        except (EOFError, OSError):  # the parent is gone
            return
        lower_limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + CPU_S)
        try:
            answer = True, functions[name](*arguments)
        except MemoryError:
            answer = False, f"it took more than {_MEMORY_BYTES >> 20} MiB of memory"
        except Exception as error:  # foreign code may raise anything
            answer = False, describe(error)
        connection.send(answer)


def limit_memory(num_bytes: int) -> None:
    """Limit the address space of this process to the present size plus ``num_bytes``."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    lower_limit(resource.RLIMIT_AS, pages * resource.getpagesize() + num_bytes)


def lower_limit(limit: int, value: int) -> None:
    """Set a soft limit of this process, at most the hard limit."""
    hard = resource.getrlimit(limit)[1]
    resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def signal_after_parent(number: int) -> None:
    """Have the kernel send this process a signal when the parent's thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
