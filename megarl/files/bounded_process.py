"""Calls functions in a forked process, each call within limits on processor time and memory.

For code that a model's folder brings, as a chat template: a sandbox keeps it from files and attributes, and nothing in
the language keeps it from ``9 ** 9 ** 9``, from loops in loops or from a text of 10 GB. The kernel does: it ends the
process. One process serves all calls, so that a call costs a tenth of a millisecond.
"""

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
"""Seconds of processor time for one call; a chat template takes a thousandth of one."""
_MEMORY_BYTES = 1 << 30
"""Beyond what the process has when it begins."""
_ANSWER_S = 900.0
"""A process that neither answers nor computes for so long is stuck."""


class BoundedProcess:
    """Calls of ``functions``, by name, in one forked process, which is started again if a limit has ended it."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        self._functions = functions
        self._end: Callable[[], Any] = lambda: None
        self._process: Any = None

    def call(self, name: str, *arguments: Any) -> Any:
        """What the function returns. DataError, in one line, for what it raises, and beyond a limit."""
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
        except BaseException:  # of a signal: the next call would get the answer to this one
            self._end()
            self._process = None
            raise
        if not is_right:
            raise DataError(result)
        return result

    def _start(self) -> None:
        context = mp.get_context("fork")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._functions), daemon=True)
        is_collecting = gc.isenabled()
        gc.disable()  # until the process has put aside what is garbage now
        try:
            self._process.start()
        finally:
            if is_collecting:
                gc.enable()
        theirs.close()
        self._end = weakref.finalize(self, _stop, self._process, self._connection)


def _stop(process: Any, connection: Connection) -> None:
    connection.close()
    process.kill()
    process.join()


def _serve(connection: Connection, functions: dict[str, Callable[..., Any]]) -> None:
    gc.freeze()  # what the parent would finalize is not this process's to end
    gc.enable()
    number = connection.fileno()
    # Locks and other processes' pipes would live as long as this process. The limit of descriptors may be 1e9.
    for descriptor in set(map(int, os.listdir("/proc/self/fd"))) - {0, 1, 2, number}:
        with suppress(OSError):
            os.close(descriptor)
    for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU):
        signal.signal(each, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the parent too, which ends this process
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
    """Let this process have so many bytes of address space beyond those that it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    lower_limit(resource.RLIMIT_AS, pages * resource.getpagesize() + num_bytes)


def lower_limit(limit: int, value: int) -> None:
    """Set a soft limit of this process, at most the hard one."""
    most = resource.getrlimit(limit)[1]
    resource.setrlimit(limit, (value if most == resource.RLIM_INFINITY else min(value, most), most))
