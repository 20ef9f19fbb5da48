"""A judge that a sampling loop awaits: reward functions that hang, crash or eat all memory cost one response each."""

from __future__ import annotations

import asyncio
import inspect
import signal
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from megarl.data.judge_worker import WorkerContext, enter, judge_in_worker, kill_group
from megarl.data.rewards import load_reward
from megarl.data.verdicts import StepReward, Steps, Verdict, failure, verdict_of
from megarl.errors import ConfigError

__all__ = ["Judge", "StepReward", "Steps", "Verdict"]

START_S = 120.0
"""How long a worker may take to start, the import of the reward function's module included."""
TRIES = 3
"""How often a call is begun: one that a worker has not confirmed before it died is no cause of its death."""
Call = ProcessFuture[Verdict | ConfigError]
_GONE = object()


class Judge:
    """Calls one reward function for one response after the other, or for several at a time.

    ``exact_match`` and functions that are declared ``instantaneous`` run in the caller; ``async def`` functions in the
    caller's event loop; all others in ``workers`` processes, which start with the first calls. A call that takes
    longer than ``timeout_s`` (its time in a queue and the start of a worker not counted) is stopped. A worker that is
    stopped or dies is replaced.

    One event loop at a time, in any thread. ``close`` leaves no process; if the trainer dies, its workers die too.
    """

    def __init__(self, function: str, *, workers: int = 1, timeout_s: float = 30.0) -> None:
        """Raises ConfigError at once if the function cannot be used."""
        if workers < 1 or not timeout_s > 0:
            raise ConfigError(f"a judge needs at least 1 worker and a positive time-out, got {workers} and {timeout_s}")
        self.function = function
        self.timeout_s = timeout_s
        self._reward = load_reward(function)
        self._async = _is_async(self._reward)
        self._here = not self._async and bool(getattr(self._reward, "instantaneous", False))
        if function.startswith("__main__:") and not (self._async or self._here):
            raise ConfigError(
                f"reward.function {function!r}: workers do not run the main module; put it in another one"
            )
        self._workers = workers
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        # One pool per process: whatever becomes of a process, its queue and its locks, concerns one call alone.
        self._idle: list[ProcessPool] = []
        self._busy: dict[ProcessPool, Call | None] = {}
        self._closed = False

    def __enter__(self) -> Judge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def score(self, *, prompt: str, response: str, answer: str) -> Verdict:
        """Judges one response; whatever goes wrong with it is in the verdict.

        Cancelling it stops the call. Raises ConfigError where the reward function does: it cannot work here at all.
        """
        if self._closed:
            raise RuntimeError("the judge is closed")
        if self._async:
            return await self._score_in_loop(prompt, response, answer)
        if self._here:
            try:
                return verdict_of(self._reward(prompt=prompt, response=response, answer=answer), response)
            except ConfigError:
                raise
            except Exception as error:  # foreign code may raise anything
                return failure(error)
        async with self._slot():
            return await self._score_in_worker(prompt, response, answer)

    def close(self) -> None:
        """Stops what runs and ends all workers. Calls that are under way in a live event loop raise RuntimeError."""
        self._closed = True
        while self._idle:
            _end(self._idle.pop())
        while self._busy:
            pool, future = self._busy.popitem()
            _end(pool)
            if future is not None:
                future.cancel()

    def _slot(self) -> asyncio.Semaphore:
        """As many calls at a time as there are workers; others wait here, where cancelling them costs nothing."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(self._workers)
        return self._slots[1]

    async def _score_in_loop(self, prompt: str, response: str, answer: str) -> Verdict:
        deadline = asyncio.timeout(self.timeout_s)
        try:
            async with deadline:
                returned = await self._reward(prompt=prompt, response=response, answer=answer)  # type: ignore[misc]
            return verdict_of(returned, response)
        except ConfigError:
            raise
        except asyncio.CancelledError as error:
            if _being_cancelled():
                raise
            return failure(error)  # not this call was cancelled, but something that the function waited for
        except Exception as error:  # foreign code may raise anything
            return self._too_late() if deadline.expired() else failure(error)

    async def _score_in_worker(self, prompt: str, response: str, answer: str) -> Verdict:
        arguments = (self.function, prompt, response, answer)
        for _ in range(TRIES):
            if self._closed:
                raise RuntimeError("the judge is closed")
            pool = self._idle.pop() if self._idle else self._start_pool()
            self._busy[pool] = None
            sound = True
            try:
                return await self._result(self._begin(pool, arguments))
            except BrokenProcessPool:  # its process died idle, or before it confirmed the call: no fault of this one
                sound = False
            finally:
                self._release(pool, sound)
        return Verdict(None, error=f"{TRIES} workers died, or did not start, before they began this call")

    def _start_pool(self) -> ProcessPool:
        return ProcessPool(max_workers=1, context=WorkerContext(), initializer=enter, initargs=(self.function,))

    def _begin(self, pool: ProcessPool, arguments: tuple[str, str, str, str]) -> Call:
        try:
            future: Call = pool.schedule(judge_in_worker, args=arguments, timeout=self.timeout_s)
        except RuntimeError as error:
            raise BrokenProcessPool(str(error)) from error
        self._busy[pool] = future
        return future

    async def _result(self, future: Call) -> Verdict:
        guard = asyncio.timeout(self.timeout_s + START_S)
        try:
            async with guard:
                outcome = await asyncio.wrap_future(future)
        except ProcessExpired as error:
            kill_group(error.pid)  # what the call had started may be left of the group
            return Verdict(None, error=f"the worker died in this call, {_exit_in_words(error.exitcode)}")
        except TimeoutError:
            if guard.expired():
                raise BrokenProcessPool("the worker did not begin in time") from None
            return self._too_late()
        except asyncio.CancelledError:
            if self._closed and not _being_cancelled():
                raise RuntimeError("the judge was closed in this call") from None
            raise
        if isinstance(outcome, ConfigError):
            raise outcome
        return outcome

    def _release(self, pool: ProcessPool, sound: bool) -> None:
        """A pool whose call was cancelled or came too late is sound: it starts another process by itself."""
        if self._busy.pop(pool, _GONE) is _GONE:
            return  # closed meanwhile
        if sound and not self._closed:
            self._idle.append(pool)
        else:
            _end(pool)

    def _too_late(self) -> Verdict:
        return Verdict(None, error=f"the reward function took more than {self.timeout_s:g} s", timed_out=True)


def _end(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()


def _is_async(reward: object) -> bool:
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(getattr(reward, "__call__", None))  # noqa: B004


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _exit_in_words(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
