"""The judge that a sampling loop awaits.

A reward function that hangs, crashes or runs out of memory costs one response, not the run.
"""

import asyncio
import inspect
import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Self

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from megarl.config.tables.data import RewardModelConfig
from megarl.data.judge.worker import WorkerContext, call_in_worker, check_in_worker, kill_group, set_up_worker
from megarl.data.rewards import Verdict, describe_failure, load_reward, read_verdict
from megarl.errors import ConfigError

START_S = 120.0
"""Time limit for the start of a worker, including the import of the reward function's module."""
TRIES = 3
"""How often a call is begun. A worker that dies before it confirms a call did not die of that call."""
BUSY_S, BUSY_FACTOR = 600.0, 20
"""How much longer than its CPU time a call may take on a machine that is busy with other processes."""
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGXCPU)
"""Signals of a process that has run out of memory, stack or CPU time by itself; others come from outside."""
Call = ProcessFuture[Verdict | ConfigError]


class Judge:
    """Calls one reward function, for one response or for several at a time.

    - Functions marked ``instantaneous`` (such as ``exact_match``) run in the caller.
    - ``async def`` functions run in the caller's event loop.
    - All others run in ``workers`` processes, which start with the first calls.

    A call that takes longer than ``timeout_s`` is stopped; time in a queue and the start of a worker do not count. A
    worker that is stopped or dies is replaced, and the response has no reward. A function marked with
    ``wrong_if_stopped`` has ``timeout_s`` of CPU time: a response that uses it, or the memory, up is wrong if the
    answer can be read. So the load of the machine changes no verdict. If the call has not ended after ``BUSY_S +
    BUSY_FACTOR * timeout_s``, the response has no reward.

    Use it in one event loop at a time, in any thread. ``close`` ends all its processes. If the trainer dies, they die
    too.
    """

    def __init__(
        self,
        function: str,
        *,
        workers: int | None = 1,
        timeout_s: float = 30.0,
        max_characters: int | None = None,
        model: RewardModelConfig | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """Raise ConfigError if the function cannot be used.

        workers: None for this rank's share of the cores; max_characters: of a response, the last ones, that a function
        marked with ``wrong_if_stopped`` gets; model: the servers of the function "reward_model"; weights: by name, of
        the several rewards that the function returns; None if it returns one.
        """
        if workers is None:  # LOCAL_WORLD_SIZE is set by torchrun
            workers = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if workers < 1 or not timeout_s > 0:
            raise ConfigError(f"a judge needs at least 1 worker and a positive time-out, got {workers} and {timeout_s}")
        self.function = function
        self.timeout_s = timeout_s
        self._reward = load_reward(function, model)
        self.special_tokens = bool(getattr(self._reward, "special_tokens", False))
        """Whether the function gets responses with their special tokens."""
        self._weights = dict(weights or {})
        self._is_checked = hasattr(self._reward, "check_answer")
        self._max_characters = max_characters if self._is_checked else None
        self._is_async = any(map(inspect.iscoroutinefunction, (self._reward, type(self._reward).__call__)))
        self._here = self._is_async or bool(getattr(self._reward, "instantaneous", False))
        self._cpu_s = timeout_s if self._is_checked and not self._here else None
        self._longest_s = timeout_s if self._cpu_s is None else BUSY_S + BUSY_FACTOR * timeout_s
        if function.startswith("__main__:") and not self._here:
            raise ConfigError(
                f"reward.function {function!r}: workers do not run the main module; put it in another one"
            )
        self._workers = workers
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        # One pool per process, so that a process that dies can damage only its own queue and locks.
        self._idle: list[ProcessPool] = []
        self._busy: dict[ProcessPool, Call | None] = {}
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def score(self, *, prompt: str, response: str, answer: str) -> Verdict:
        """Judge one response. An error of the reward function is in the verdict, except for ConfigError.

        Cancelling this stops the call. A reward function raises ConfigError if it cannot work on this machine at all;
        that is raised here too.
        """
        self._require_open()
        if self._max_characters is not None:
            response = response[-self._max_characters :]
        if self._is_async:
            return await self._score_here(prompt, response, answer)
        if self._here:
            return self._score_now(prompt, response, answer)
        async with self._slot():
            arguments = self.function, prompt, response, answer, self._weights, self._cpu_s
            verdict = await self._run(call_in_worker, arguments)
            if self._is_checked and verdict.timed_out and verdict.reward is None:
                return await self._run(check_in_worker, (self.function, answer, self._cpu_s))
            return verdict

    def _score_now(self, prompt: str, response: str, answer: str) -> Verdict:
        try:
            return read_verdict(self._reward(prompt=prompt, response=response, answer=answer), response, self._weights)
        except ConfigError:
            raise
        except (Exception, asyncio.CancelledError) as error:  # foreign code may raise anything
            return describe_failure(error, self._reward)

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the judge is closed")

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

    def _slot(self) -> asyncio.Semaphore:
        """Return the semaphore that admits one call per worker. A call that waits here can be cancelled at no cost."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(self._workers)
        return self._slots[1]

    async def _score_here(self, prompt: str, response: str, answer: str) -> Verdict:
        deadline = asyncio.timeout(None if getattr(self._reward, "limits_itself", False) else self.timeout_s)
        try:
            async with deadline:
                returned = await self._reward(prompt=prompt, response=response, answer=answer)
            return read_verdict(returned, response, self._weights)
        except ConfigError:
            raise
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            return describe_failure(error, self._reward)  # it awaited something that was cancelled, not this call
        except Exception as error:  # foreign code may raise anything
            return self._time_out() if deadline.expired() else describe_failure(error, self._reward)

    async def _run(self, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Verdict:
        for _ in range(TRIES):
            self._require_open()
            starts: dict[str, Any] = {"initializer": set_up_worker, "initargs": (self.function,)}
            pool = self._idle.pop() if self._idle else ProcessPool(max_workers=1, context=WorkerContext(), **starts)
            self._busy[pool] = None
            is_sound = True
            try:
                return await self._wait_for(self._begin(pool, work, arguments))
            except BrokenProcessPool:  # the process died before it confirmed the call, so try another one
                is_sound = False
            finally:
                self._release(pool, is_sound)
        why = f"{TRIES} workers died, or did not start, before they began this call"
        return Verdict(None, error=why, may_pass=True)

    def _begin(self, pool: ProcessPool, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Call:
        try:
            future: Call = pool.schedule(work, args=arguments, timeout=self._longest_s)
        except RuntimeError as error:
            raise BrokenProcessPool(str(error)) from error
        self._busy[pool] = future
        return future

    async def _wait_for(self, future: Call) -> Verdict:
        guard = asyncio.timeout(self._longest_s + START_S)
        try:
            async with guard:
                outcome = await asyncio.wrap_future(future)
        except ProcessExpired as error:
            if error.pid is not None:
                kill_group(error.pid)  # processes that the call started may be left
            status = error.exitcode
            how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            by_itself = status >= 0 or -status in _CRASHES
            why = f"the worker died in this call, {how}"
            return Verdict(None, error=why, may_pass=not by_itself, timed_out=self._is_checked and -status in _CRASHES)
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

    def _release(self, pool: ProcessPool, is_sound: bool) -> None:
        """A pool whose call was cancelled or timed out is sound: pebble starts another process in it."""
        try:
            del self._busy[pool]
        except KeyError:
            return  # closed in the meantime, perhaps by another thread
        if is_sound and not self._closed:
            self._idle.append(pool)
        else:
            _end(pool)

    def _time_out(self) -> Verdict:
        why = f"the reward function took more than {self._longest_s:g} s"
        return Verdict(None, error=why, may_pass=True, timed_out=self._cpu_s is None)


def _end(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()


def is_being_cancelled() -> bool:
    """Whether the running task itself was cancelled, and not another one that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
