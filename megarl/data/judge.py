"""The judge that a sampling loop awaits, and the worker processes in which the judge runs reward functions.

A reward function that hangs, crashes or runs out of memory costs a single response, not the run.

A worker does not import the trainer's main module: without ``if __name__ == "__main__"``, the import would run the
whole script. A worker and its child processes end with the trainer, even if the trainer is killed.
"""

import asyncio
import contextlib
import fcntl
import importlib
import inspect
import math
import multiprocessing
import multiprocessing.context
import os
import resource
import select
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from megarl.config.plugs import check_function, load_plug
from megarl.config.process_environment import LAUNCHER
from megarl.config.tables.data import RewardModelConfig
from megarl.data.rewards import BUILT_IN_REWARDS, Verdict, describe_failure, read_verdict
from megarl.errors import ConfigError, refusal, reworded
from megarl.files.bounded_process import limit_memory, lower_limit

START_S = 120.0
"""Time limit for the start of a worker, including the import of the reward function's module."""
TRIES = 3
"""Attempts to begin a call. A worker that dies before it confirms a call did not die of the call."""
BUSY_S, BUSY_FACTOR = 600.0, 20
"""Elapsed time that a call with ``cpu_s`` of CPU time may take on a busy machine: BUSY_S + BUSY_FACTOR * cpu_s."""
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGXCPU)
"""Signals of a process that has run out of memory, stack or CPU time; other signals come from outside."""
Call = ProcessFuture[Verdict | ConfigError]


class Judge(contextlib.AbstractContextManager["Judge"]):
    """Calls a reward function, for several responses at a time.

    - Functions marked ``instantaneous`` (such as ``exact_match``) run in the caller.
    - ``async def`` functions run in the caller's event loop.
    - All other functions run in ``workers`` processes, which start with the first calls.

    A call longer than ``timeout_s`` is stopped; time in a queue and the start of a worker do not count. A stopped or
    dead worker is replaced, and the response has no reward.

    A function marked with ``wrong_if_stopped`` has ``timeout_s`` of CPU time, so that the machine's load changes no
    verdict. A response that uses up CPU time or memory is wrong if the answer can be read. A call that has not ended
    after ``BUSY_S + BUSY_FACTOR * timeout_s`` gives the response no reward.

    Use a judge in a single event loop at a time, in any thread. ``close`` ends all processes. If the trainer dies, the
    processes die too.
    """

    def __init__(
        self, function: str, *,
        workers: int | None = 1, timeout_s: float = 30.0, max_characters: int | None = None,
        model: RewardModelConfig | None = None, weights: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        """Raise ConfigError if the function cannot be used.

        workers: None for this rank's share of the cores. max_characters: a function marked with ``wrong_if_stopped``
        gets the last ``max_characters`` of a response. model: the servers of the function "reward_model". weights: by
        name, if the function returns several rewards.
        """
        if workers is None:  # torchrun sets LOCAL_WORLD_SIZE
            workers = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self.function, self.timeout_s, self._weights = function, timeout_s, dict(weights or {})
        self._reward = load_reward(function, model)
        self.special_tokens = bool(getattr(self._reward, "special_tokens", False))
        """Whether the function gets responses with special tokens."""
        self._is_checked = hasattr(self._reward, "check_answer")
        self._max_characters = max_characters if self._is_checked else None
        self._is_async = any(map(inspect.iscoroutinefunction, (self._reward, type(self._reward).__call__)))
        self._is_local = self._is_async or bool(getattr(self._reward, "instantaneous", False))
        self._cpu_s = timeout_s if self._is_checked and not self._is_local else None
        self._longest_s = timeout_s if self._cpu_s is None else BUSY_S + BUSY_FACTOR * timeout_s
        if function.startswith("__main__:") and not self._is_local:
            raise ConfigError(refusal("reward_in_main", function=function))
        self.num_workers = workers
        self._slots = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()
        """A place per worker: a call that waits for a place can be cancelled at no cost."""
        # A pool per process: a dying process can damage only the queue and locks of its pool.
        self._idle: list[ProcessPool] = []
        self._busy: dict[ProcessPool, Call | None] = {}
        self._closed = False

    def __exit__(self, *_: object) -> None:
        self.close()

    async def score(self, *, prompt: str, response: str, answer: str) -> Verdict:
        """Judge a response. The verdict holds an error of the reward function; cancelling stops the call.

        ConfigError of the function, if the function cannot work on this machine at all, is raised.
        """
        response = self._begin(response)
        if self._is_local:
            return await self._score_here(prompt, response, answer)
        async with self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.num_workers)):
            arguments = self.function, prompt, response, answer, self._weights, self._cpu_s
            verdict = await self._run(call_in_worker, arguments)
            if self._is_checked and verdict.timed_out and verdict.reward is None:
                return await self._run(check_in_worker, (self.function, answer, self._cpu_s))
            return verdict

    def _begin(self, response: str) -> str:
        """Return the characters of a response that the function gets. RuntimeError if the judge is closed."""
        if self._closed:
            raise RuntimeError("the judge is closed")
        return response if self._max_characters is None else response[-self._max_characters :]

    def close(self) -> None:
        """End all workers. Calls in progress in a live event loop raise RuntimeError."""
        self._closed = True
        while self._idle:
            _end(self._idle.pop())
        while self._busy:
            pool, future = self._busy.popitem()
            _end(pool)
            if future is not None:
                future.cancel()

    async def _score_here(self, prompt: str, response: str, answer: str) -> Verdict:
        is_limited = self._is_async and not getattr(self._reward, "limits_itself", False)
        deadline = asyncio.timeout(self.timeout_s if is_limited else None)
        try:
            async with deadline:
                returned = self._reward(prompt=prompt, response=response, answer=answer)
                returned = await returned if self._is_async else returned
            return read_verdict(returned, response, self._weights)
        except ConfigError:
            raise
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            return describe_failure(error, self._reward)  # a task inside the function was cancelled, not this call
        except Exception as error:  # foreign code may raise anything
            return self._time_out() if deadline.expired() else describe_failure(error, self._reward)

    async def _run(self, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Verdict:
        for _ in range(TRIES):
            self._begin("")
            start: dict[str, Any] = {"initializer": set_up_worker, "initargs": (self.function,)}
            pool = self._idle.pop() if self._idle else ProcessPool(max_workers=1, context=WorkerContext(), **start)
            self._busy[pool] = None
            is_sound = True
            try:
                with reworded(RuntimeError, BrokenProcessPool):
                    self._busy[pool] = future = pool.schedule(work, args=arguments, timeout=self._longest_s)
                return await self._wait_for(future)
            except BrokenProcessPool:  # the process died before it confirmed the call: try another process
                is_sound = False
            finally:
                # After a cancelled or timed-out call a pool is sound: pebble starts another process.
                if self._busy.pop(pool, pool) is not pool:  # else closed in the meantime, perhaps by another thread
                    self._idle.append(pool) if is_sound and not self._closed else _end(pool)
        reason = f"{TRIES} workers died, or did not start, before they began this call"
        return Verdict(None, error=reason, may_pass=True)

    async def _wait_for(self, future: Call) -> Verdict:
        guard = asyncio.timeout(self._longest_s + START_S)
        try:
            async with guard:
                outcome = await asyncio.wrap_future(future)
        except ProcessExpired as error:
            if error.pid is not None:
                kill_group(error.pid)  # child processes of the call may be alive
            status, crashed = error.exitcode, -error.exitcode in _CRASHES
            how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            reason, is_foreign = f"the worker died in this call, {how}", status < 0 and not crashed
            return Verdict(None, error=reason, may_pass=is_foreign, timed_out=self._is_checked and crashed)
        except TimeoutError:
            if guard.expired():
                raise BrokenProcessPool("the worker did not begin in time") from None
            return self._time_out()
        except asyncio.CancelledError:
            if self._closed and not is_being_cancelled():
                raise RuntimeError("the judge was closed in this call") from None
            raise
        if isinstance(outcome, ConfigError):
            raise outcome
        return outcome

    def _time_out(self) -> Verdict:
        reason = f"the reward function took more than {self._longest_s:g} s"
        return Verdict(None, error=reason, may_pass=True, timed_out=self._cpu_s is None)


def _end(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()


def is_being_cancelled() -> bool:
    """Whether the running task itself was cancelled, not a task that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def load_reward(name_or_path: str, model: RewardModelConfig | None = None) -> Callable[..., Any]:
    """Return the reward function of a built-in name or of "package.module:function"; model: for "reward_model".

    ConfigError if the name is unknown, the module cannot be imported, the function is missing or does not take the
    keywords prompt, response and answer.
    """
    if name_or_path in BUILT_IN_REWARDS:
        return BUILT_IN_REWARDS[name_or_path]
    if name_or_path == "reward_model" and model is not None:
        from megarl.data.reward_model import RewardModel  # takes aiohttp

        return RewardModel(model)
    reward = load_plug("reward.function", name_or_path, [*BUILT_IN_REWARDS, "reward_model"])
    return check_function("reward.function", name_or_path, reward, "*, prompt, response, answer")


MEMORY_BYTES = 4 << 30
"""Address space for the responses of a function marked with ``wrong_if_stopped``."""
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
    """Run first in a worker: die with the trainer, and load the reward function."""
    die_with_trainer()
    with contextlib.suppress(ConfigError):  # the first call raises the error again, and can report the error
        _load(function)
    if function == "math_strict":  # the import does not count as time of the first response
        importlib.import_module("megarl.data.math.grade")


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


_load = cache(load_reward)


def die_with_trainer() -> None:
    """Make a process group without the variables of the launcher, which the kernel kills when the trainer ends.

    The trainer holds the far end of the pipe that multiprocessing calls the parent's sentinel. The kernel signals when
    that end closes. Two alternatives fail:

    - A thread that waits for the pipe does not run while a reward function holds the interpreter's lock.
    - A parent death signal (prctl) follows the starting thread, which may end before the trainer.
    """
    os.setpgid(0, 0)
    for name in filter(LAUNCHER.fullmatch, tuple(os.environ)):
        del os.environ[name]
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
