"""Call functions in a forked process, with limits on time and memory.

Foreign code, such as the chat template of a model's folder, may compute ``9 ** 9 ** 9``, nest loops, or build a text of
10 GB. A language sandbox does not prevent that; ending the process does.
"""

import ctypes
import gc
import multiprocessing as mp
import resource
import signal
import weakref
from collections.abc import Callable
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

from megarl.errors import DataError, describe

CALL_S = 30.0
"""Seconds for a call; a chat template takes a thousandth of a second."""
_MEMORY_BYTES = 1 << 30
"""Beyond the memory of the process at its start."""
_PR_SET_PDEATHSIG = 1
_functions: dict[str, Callable[..., Any]] = {}
"""Of this process, if it is bounded."""


class BoundedProcess:
    """Calls ``functions`` by name in a forked process, and starts the process again after a limit ended it."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        self._functions = functions
        self._pool: Pool | None = None

    def call(self, name: str, *arguments: Any) -> Any:
        """Return the function's result. DataError, in a line, for an exception of the function, and beyond a limit."""
        if self._pool is None:
            self._pool = mp.get_context("fork").Pool(1, _begin, (self._functions,))
            weakref.finalize(self, self._pool.terminate)
        try:
            is_right, result = self._pool.apply_async(_call, (name, arguments)).get(CALL_S)
        except BaseException as error:  # also of a signal: the process still works at this call
            self._pool.terminate()
            self._pool = None
            if isinstance(error, mp.TimeoutError):
                raise DataError(f"no answer within {CALL_S:g} s; its process has ended") from error
            raise
        if not is_right:
            raise DataError(result)
        return result


def _begin(functions: dict[str, Callable[..., Any]]) -> None:
    gc.freeze()  # the parent's objects are not to be finalized in this process
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal signals the parent too, and the parent ends this process
    limit_memory(_MEMORY_BYTES)
    lower_limit(resource.RLIMIT_CORE, 0)
    _functions.update(functions)


def _call(name: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, _functions[name](*arguments)
    except MemoryError:
        return False, f"it took more than {_MEMORY_BYTES >> 20} MiB of memory"
    except Exception as error:  # foreign code may raise anything
        return False, describe(error)


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
