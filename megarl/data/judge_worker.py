"""The processes in which a judge runs reward functions: how they start, what they do, how they end.

multiprocessing's own spawned process runs the trainer's main module once more, which for a script without
``if __name__ == "__main__"`` means the whole script; and it outlives a trainer that is killed, and so do the processes
that a call has started. The differences to it are here.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import multiprocessing
import multiprocessing.context
import os
import select
import signal
import sys
import threading
import types
from collections.abc import Iterator

from megarl.data.rewards import RewardFunction, load_reward
from megarl.data.verdicts import Verdict, failure, verdict_of
from megarl.errors import ConfigError

DISTRIBUTED = frozenset(
    f"{scope}{name}" for scope in ("", "LOCAL_", "GROUP_", "ROLE_") for name in ("RANK", "WORLD_SIZE")
) | {"MASTER_ADDR", "MASTER_PORT", "ROLE_NAME"}
"""Variables of a launcher, besides TORCHELASTIC_*: with them a library would take a worker for a rank."""
_MAIN = threading.Lock()


class WorkerProcess(multiprocessing.context.SpawnProcess):
    """A spawned process that knows nothing of the main module, and ends together with its children."""

    def start(self) -> None:
        with _without_main():
            super().start()

    def terminate(self) -> None:
        """Kills the process and those it has started; no reward function can put that off."""
        if self.pid is not None and self.exitcode is None:  # not reaped: the number is still its own
            kill_group(self.pid)
            self.kill()


class WorkerContext(multiprocessing.context.SpawnContext):
    Process = WorkerProcess  # type: ignore[assignment]


def kill_group(pid: int) -> None:
    """Kills the process group of a worker, if it is there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def enter(function: str) -> None:
    """Runs first in a worker: its own process group, bound to the trainer's life, and the reward function loaded."""
    os.setpgid(0, 0)
    _die_with_parent()
    for name in tuple(os.environ):
        if name in DISTRIBUTED or name.startswith("TORCHELASTIC_"):
            del os.environ[name]
    with contextlib.suppress(ConfigError):  # raised again by the first call, which has somebody to tell
        _loaded(function)
    if function == "math_verify":
        importlib.import_module("math_verify")  # here its imports do not count as time of the first response


def judge_in_worker(function: str, prompt: str, response: str, answer: str) -> Verdict | ConfigError:
    """Runs in a worker: one call. Nothing foreign is returned, for it may not survive the way to the trainer."""
    try:
        return verdict_of(_loaded(function)(prompt=prompt, response=response, answer=answer), response)
    except ConfigError as error:
        return ConfigError(str(error))
    except BaseException as error:  # foreign code may raise anything, SystemExit too
        return failure(error)


@functools.cache
def _loaded(function: str) -> RewardFunction:
    return load_reward(function)


def _die_with_parent() -> None:
    """Has the kernel kill this process group when the trainer is gone, however it went and whatever runs here.

    The trainer holds the other end of the pipe that multiprocessing calls the parent's sentinel. A thread that waits
    for it would not run beside code that keeps the interpreter's lock, and a death signal (prctl) is bound to the
    thread that has started this process, which may end before the trainer.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "only in a worker"
    pipe = parent.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | fcntl.FASYNC)
    if select.select([pipe], [], [], 0)[0]:  # it was gone before
        kill_group(os.getpgrp())


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """While a process is started, its preparation finds an empty main module, so it imports none."""
    with _MAIN:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
