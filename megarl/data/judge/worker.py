"""The worker processes in which a judge runs reward functions.

A worker does not import the trainer's main module: without ``if __name__ == "__main__"``, the import would run the
whole script. A worker and its child processes end with the trainer, even if the trainer is killed.
"""

import contextlib
import fcntl
import functools
import importlib
import math
import multiprocessing
import multiprocessing.context
import os
import re
import resource
import select
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping

from megarl.data.rewards import load_reward
from megarl.data.verdicts import Verdict, describe_failure, read_verdict
from megarl.errors import ConfigError
from megarl.files.bounded_process import limit_memory, lower_limit

DISTRIBUTED = re.compile(r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|ROLE_NAME|TORCHELASTIC_.*)")
"""Variables of a launcher, because of which a library would take a worker for a rank."""
MEMORY_BYTES = 4 << 30
"""Address space for the responses of a function marked with ``wrong_if_stopped``."""
_IMPORTS = {"math_verify": ("math_verify",), "math_strict": ("megarl.data.math.grade",)}
_MAIN = threading.Lock()


class WorkerProcess(multiprocessing.context.SpawnProcess):
    """A spawned process without the main module; it ends together with its child processes."""

    def start(self) -> None:
        with _without_main():
            super().start()

    def terminate(self) -> None:
        """Kill the process and its child processes; a reward function cannot prevent the kill."""
        if self.pid is not None and self.exitcode is None:  # not reaped: no other process has this number
            kill_group(self.pid)
            self.kill()


class WorkerContext(multiprocessing.context.SpawnContext):
    Process = WorkerProcess


def kill_group(pid: int) -> None:
    """Kill a process group, if it is alive."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def set_up_worker(function: str) -> None:
    """Run first in a worker: make a process group that dies with the trainer, and load the reward function."""
    os.setpgid(0, 0)
    _die_with_parent()
    for name in tuple(os.environ):
        if DISTRIBUTED.fullmatch(name):
            del os.environ[name]
    with contextlib.suppress(ConfigError):  # the first call raises the error again, and can report the error
        _load(function)
    for name in _IMPORTS.get(function, ()):  # the import does not count as time of the first response
        importlib.import_module(name)


def call_in_worker(
    function: str, prompt: str, response: str, answer: str, weights: Mapping[str, float], cpu_s: float | None
) -> Verdict | ConfigError:
    """Judge a response, in a worker. Return only megarl's types: a foreign exception may not unpickle.

    cpu_s: limit of CPU time of a function marked with ``wrong_if_stopped``; None for other functions.
    """
    _limit_use(cpu_s)
    try:
        return read_verdict(_load(function)(prompt=prompt, response=response, answer=answer), response, weights)
    except ConfigError as error:
        return ConfigError(str(error))
    except (TimeoutError, MemoryError) as error:
        return check_in_worker(function, answer, cpu_s) or describe_failure(error, _load(function))
    except BaseException as error:  # foreign code may raise anything, SystemExit too
        return describe_failure(error, _load(function))


def check_in_worker(function: str, answer: str, cpu_s: float | None) -> Verdict | None:
    """Judge a response whose call was stopped, in a worker: the response is wrong if the answer can be read.

    None if the function has no ``check_answer`` (``wrong_if_stopped``).
    """
    _limit_use(cpu_s)
    check_answer = getattr(_load(function), "check_answer", None)
    if check_answer is None:
        return None
    try:
        check_answer(answer)
    except BaseException as error:
        return describe_failure(error, _load(function))
    return Verdict(0.0, timed_out=True)


def _limit_use(cpu_s: float | None) -> None:
    """Have the kernel end this process (SIGXCPU) after ``cpu_s`` more CPU time, rounded up, and limit its memory.

    No signal handler interrupts a library in C.
    """
    if cpu_s is not None:
        lower_limit(resource.RLIMIT_CORE, 0)
        lower_limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + cpu_s))
        if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
            limit_memory(MEMORY_BYTES)


_load = functools.cache(load_reward)


def _die_with_parent() -> None:
    """Have the kernel kill this process group when the trainer ends, for whatever reason.

    The trainer holds the far end of the pipe that multiprocessing calls the parent's sentinel. The kernel signals when
    that end closes. Two alternatives fail:

    - A thread that waits for the pipe does not run while a reward function holds the interpreter's lock.
    - A parent death signal (prctl) follows the starting thread, which may end before the trainer.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "only in a worker"
    pipe = parent.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | fcntl.FASYNC)
    if select.select([pipe], [], [], 0)[0]:  # the trainer has already ended
        kill_group(os.getpgrp())


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Replace the main module by an empty module, which a process started inside imports."""
    with _MAIN:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
