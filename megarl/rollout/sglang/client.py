"""Requests to SGLang servers: bounded, balanced, with a deadline, and repeated where the server was at fault.

A group's samples go to one server, so that its prefix cache serves them. Each server has at most ``concurrency``
requests at a time; the rest wait here, and go to another server only where their own has its hands full or is away. A
request that fails for a reason that may pass (the connection, an HTTP 5xx, an answer that is cut short, the deadline)
waits again; nothing is counted until its answer has been checked.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from megarl.core.types import Rollout, SampleRequest
from megarl.errors import RolloutError, TraceError
from megarl.rollout.engine import Session
from megarl.rollout.sessions import SessionBase, run_session
from megarl.rollout.sglang.http import MODEL_INFO, authorization

KEEP_CONNECTION_S = 3.0
"""SGLang closes a connection that has been idle for five seconds, also in the moment that a request goes out."""
BUFFER_BYTES = 1 << 20

TICK_S = 1.0
"""Between two looks of the trainer at what it waits for."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """How hard servers are pressed, and how long they may take."""

    concurrency: int = 64
    """Requests that one server has at a time."""
    deadline_s: float = 600.0
    """Longest time from sending a request to the whole answer."""
    attempts: int = 4
    """How often one request is answered badly or too late before the rollout fails."""
    losses: int = 30
    """How often one request is lost together with its connection before the rollout fails."""
    recovery_s: float = 300.0
    """How long a server may be away before it counts as down; the rollout fails when all are."""
    api_key: str | None = None
    """Sent as a bearer token."""
    compact_routes: bool = True
    """Ask for routes in the short form, which servers with our plugin know and others ignore."""


class PassingError(Exception):
    """A failure that another attempt may not meet."""


class AwayError(PassingError):
    """The server could not be reached, or went away in the middle of an answer: no fault of the request."""


@dataclass(eq=False)
class _Job:
    request: SampleRequest
    answer: asyncio.Future[Rollout]
    """Cancelled if nobody waits for it any more."""
    failures: list[str] = field(default_factory=list)
    losses: int = 0


Decode = Callable[[SampleRequest, Any], Rollout]
Body = Callable[[SampleRequest], dict[str, Any]]


class SGLangClient:
    """Sends ``/generate`` requests to the servers at ``urls``."""

    def __init__(self, urls: Sequence[str], settings: ClientSettings, headers: Mapping[str, str] | None = None) -> None:
        """``headers`` go with every request."""
        if not urls:
            raise RolloutError("there is no SGLang server to send requests to")
        self.urls = list(urls)
        self.settings = settings
        self.headers = authorization(settings.api_key) | dict(headers or {})

    def converse(
        self,
        begin: Callable[[Session], None],
        body: Body,
        decode: Decode,
        on_finish: Callable[[int], None] | None = None,
        version: str | None = None,
    ) -> None:
        """See ``Engine.converse``; RolloutError if a response cannot be had, naming the last failures.

        A server that was away gets requests again when its weights are called ``version`` (None: any).
        """
        run_session(self._converse(begin, body, decode, on_finish, version))

    async def _converse(
        self,
        begin: Callable[[Session], None],
        body: Body,
        decode: Decode,
        on_finish: Callable[[int], None] | None,
        version: str | None,
    ) -> None:
        # Bounded by ourselves. No proxy of the environment is used: servers are near, often on the loopback address.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_CONNECTION_S)
        async with aiohttp.ClientSession(
            connector=connector,
            headers=self.headers,
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=BUFFER_BYTES,
            trust_env=False,
        ) as http:
            await _RequestSession(self.urls, self.settings, http, body, decode, on_finish, version).run_episodes(begin)


class _RequestSession(SessionBase):
    """A session: which request waits for which server, and which servers can be asked."""

    def __init__(
        self,
        urls: Sequence[str],
        settings: ClientSettings,
        http: aiohttp.ClientSession,
        body: Body,
        decode: Decode,
        on_finish: Callable[[int], None] | None,
        version: str | None,
    ) -> None:
        super().__init__()
        self._urls, self._settings, self._http = urls, settings, http
        self._body, self._decode, self._on_finish, self._version = body, decode, on_finish, version
        self._queues: list[deque[_Job]] = [deque() for _ in urls]
        self._busy = [0] * len(urls)
        self._away: set[int] = set()
        """Do not answer at the moment; those of them that are ``_down`` are not asked any more."""
        self._down: set[int] = set()
        self._returns: list[asyncio.Task[None]] = []
        self._ticking: asyncio.Task[None] | None = None
        self._serving: dict[asyncio.Future[Rollout], asyncio.Task[None]] = {}

    async def run_episodes(self, begin: Callable[[Session], None]) -> None:
        """Run all episodes; ``on_finish(0)`` every second, so that the trainer may end the wait for long responses."""
        async with self._tasks:
            begin(self)
            if self._episodes and self._on_finish is not None:
                self._ticking = self._tasks.create_task(self._tick(self._on_finish))

    async def _tick(self, on_finish: Callable[[int], None]) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            on_finish(0)

    async def sample(self, request: SampleRequest) -> Rollout:
        """See ``Session.sample``."""
        answer: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
        queue, job = self._queues[request.group % len(self._queues)], _Job(request, answer)
        # What has begun goes on before more is begun: its prefix is still in the server's cache.
        queue.appendleft(job) if request.known_rows else queue.append(job)
        # After all that asks in this moment: else the first to ask would take servers from those whose own they are.
        asyncio.get_running_loop().call_soon(self._fill)
        try:
            return await answer
        except asyncio.CancelledError:  # the server aborts a request when it notices that its connection is closed
            if answer in self._serving:
                self._serving[answer].cancel()
            raise

    def _after_an_episode(self) -> None:
        if not self._episodes:
            for waiting in self._returns:  # nobody needs those servers any more
                waiting.cancel()
            if self._ticking is not None:
                self._ticking.cancel()

    def _fill(self) -> None:
        """Give every server that can be asked as many requests as it may have."""
        for server in range(len(self._urls)):
            while (
                server not in self._away
                and self._busy[server] < self._settings.concurrency
                and (job := self._next(server)) is not None
            ):
                self._busy[server] += 1
                serving = self._tasks.create_task(self._serve(server, job))
                self._serving[job.answer] = serving
                serving.add_done_callback(lambda task, server=server, job=job: self._served(server, job, task))

    def _next(self, server: int) -> _Job | None:
        """What this server is to do now, if there is something that is still waited for."""
        while (job := self._waiting(server)) is not None and job.answer.cancelled():
            pass
        return job

    def _waiting(self, server: int) -> _Job | None:
        """The server's own work first; then that of others, but only what they could not begin now themselves."""
        if self._queues[server]:
            return self._queues[server].popleft()
        waiting = [
            queue
            for other, queue in enumerate(self._queues)
            if queue and (other in self._away or self._busy[other] >= self._settings.concurrency)
        ]
        return max(waiting, key=len).pop() if waiting else None

    async def _serve(self, server: int, job: _Job) -> None:
        url = self._urls[server]
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                answer = await self._post(url, self._body(job.request))
            try:
                rollout = self._decode(job.request, answer)
            except (RolloutError, TraceError) as error:
                raise PassingError(str(error)) from error
        except AwayError as failure:
            self._lost(job, failure)
            self._queues[server].appendleft(job)
            if server not in self._away:
                self._away.add(server)
                self._returns.append(self._tasks.create_task(self._await_return(server, failure)))
        except (PassingError, TimeoutError) as failure:
            await self._again(job, failure)
            self._queues[(server + 1) % len(self._queues)].append(job)
        else:
            if not job.answer.done():
                job.answer.set_result(rollout)
            if self._on_finish is not None:
                self._on_finish(1)

    def _served(self, server: int, job: _Job, task: asyncio.Task[None]) -> None:
        """A request is answered, waits again, or is not wanted any more."""
        self._busy[server] -= 1
        if self._serving.get(job.answer) is task:  # else it is under way again
            del self._serving[job.answer]
        if task.cancelled() or task.exception() is None:
            self._fill()

    async def _post(self, url: str, body: dict[str, Any]) -> Any:
        try:
            content = json.dumps(body).encode()
            async with self._http.post(
                f"{url}/generate", data=content, headers={"content-type": "application/json"}
            ) as response:
                status, answer = response.status, await response.read()
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise AwayError(f"{url}: {type(error).__name__}: {error}") from error
        except aiohttp.ClientError as error:
            raise PassingError(f"{url}: {type(error).__name__}: {error}") from error
        told = answer[:300].decode("utf-8", errors="replace")
        if status >= 500:
            raise PassingError(f"{url}: HTTP {status}: {told}")
        if status != 200:
            raise RolloutError(f"{url} refuses the request, HTTP {status}: {told}")
        try:
            return json.loads(answer)
        except ValueError as error:
            raise PassingError(f"{url}: the answer of {len(answer)} bytes is no JSON ({error})") from error

    async def _await_return(self, server: int, failure: AwayError) -> None:
        """Let a server have requests again when it answers, or count it as down if it stays away.

        One that has been started again answers before it has its weights.
        """
        until = asyncio.get_running_loop().time() + self._settings.recovery_s
        while asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.5)
            if await self._answers(self._urls[server]):
                self._away.discard(server)
                self._fill()
                return
        self._down.add(server)
        if len(self._down) == len(self._urls):
            raise RolloutError(f"all {len(self._urls)} SGLang servers are down, the last failure: {failure}")

    async def _answers(self, url: str) -> bool:
        """Whether a server is healthy and has the weights that are sampled with."""
        try:
            async with asyncio.timeout(20.0):
                async with self._http.get(f"{url}/health") as response:
                    if response.status != 200:
                        return False
                for path in MODEL_INFO if self._version is not None else ():
                    async with self._http.get(f"{url}/{path}") as response:
                        if response.status == 200:
                            return str((await response.json()).get("weight_version")) == self._version
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return False
        return self._version is None

    def _lost(self, job: _Job, failure: AwayError) -> None:
        job.losses += 1
        if job.losses >= self._settings.losses:
            request = job.request
            raise RolloutError(
                f"group {request.group} sample {request.sample}: lost {job.losses} times with its connection, the "
                f"last: {failure}; if the server dies of this request, its log says why"
            )

    async def _again(self, job: _Job, failure: BaseException) -> None:
        told = str(failure) or f"no answer within {self._settings.deadline_s} s"
        job.failures.append(told)
        if len(job.failures) >= self._settings.attempts:
            request = job.request
            raise RolloutError(
                f"group {request.group} sample {request.sample}: {len(job.failures)} attempts failed, the last: {told}"
            )
        await asyncio.sleep(0.25 * 2 ** len(job.failures))
