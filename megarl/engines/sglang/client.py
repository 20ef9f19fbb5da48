"""Requests to SGLang servers: balanced, bounded, with a deadline, and repeated after a server's fault.

- **Balance.** The samples of a group go to a single server, whose prefix cache serves the group. A server has at most
  ``concurrency`` requests at once. Further requests wait here, and move only if their server is full or away.
- **Repeats.** A request waits again after a failure that may pass: the connection, an HTTP 5xx, a truncated or wrong
  answer, the deadline. HTTP 408, 429 and 503 mean a busy server, and allow longer waits; 413 means a request of a
  refused size. An answer counts only after all checks.
- **Pause.** ``Session.pause`` has the servers end the requests, whose answers then hold the tokens so far. Requests
  that wait here, or get no answer within ``PAUSE_S``, come back with the prompt alone.
- **Idle share.** A server has as many slots as it had requests at once at most. A slot is idle while it has no request,
  between the first request of a ``converse`` and the last answer.
- **Ids.** Every attempt has a new id, and the answer must repeat the id: late, repeated or exchanged answers have a
  wrong id. SGLang refuses an id in use, and aborts by prefixes of ids, hence the new ids of equal length.
"""

import asyncio
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp

from megarl.config.tables.rollout import SGLangConfig
from megarl.core.types import Rollout, SampleRequest
from megarl.engines.protocol import Begin, OnFinish, Session, prompt_alone, run_session
from megarl.engines.sglang.http import is_ready
from megarl.errors import DataError, RequestError, RolloutError, TraceError, refusal, refuse_if, reworded
from megarl.files.foreign_json import UNPACKED, parse_json, read_body, retry_after

KEEP_CONNECTION_S = 3.0
"""SGLang closes a connection after five idle seconds, even while a request is on its way."""
BUFFER_BYTES = 1 << 20
TICK_S = 1.0
"""Interval of ``on_finish(0)``, in which the trainer may end the wait for long responses."""
RETURN_POLL_S = 0.5
"""Time between two questions whether a server is back."""
OPEN_S = 2.0
"""Longest wait at the start of a session for a server's report of its weights."""
BUSY = (408, 429, 503)
"""HTTP statuses of a busy server or proxy."""
TOO_LARGE = 413
WRONG = "wrong_answers"
PAUSE_S = 15.0
"""Longest wait for the answer to a request that is to end; then the tokens so far are lost."""
STOP_AGAIN_S = 0.5
"""Time between two calls to end a request: a server ignores a call that overtakes its request."""
BACKOFF_S = 0.5
"""Wait before a request is sent again; doubles with each attempt."""
MAX_WAIT_S = 30.0
"""Longest wait before a request is sent again, whatever its Retry-After says."""
LOSSES = 30
"""Lost connections, or waits for a busy server, of one request before the rollout fails."""
MAX_ANSWER_BYTES = 1 << 30
"""Of the answer to a request of unknown length."""

Decode = Callable[[SampleRequest, Any, str, bool], Rollout]
"""(request, answer, id of the attempt, whether it was to end) -> rollout; RolloutError or TraceError for a wrong
answer."""
Tell = Callable[[str], None]
Body = Callable[[SampleRequest], dict[str, Any]]
Limit = Callable[[SampleRequest], int]
"""Returns the longest honest answer to a request, in bytes."""


class AwayError(Exception):
    """The server could not be reached, or went away during an answer: not the request's fault."""


class RetryError(Exception):
    """A failure that may pass at the next attempt; ``event`` is counted (``Engine.answer_counts``).

    remedy: if no attempt helps, this request alone fails, with this advice.
    """

    def __init__(self, message: str, event: str = "", status: int = 0, wait_s: float = 0.0, remedy: str = "") -> None:
        super().__init__(message)
        self.event, self.status, self.wait_s, self.remedy = event, status, wait_s, remedy


@dataclass(eq=False)
class _Job:
    request: SampleRequest
    answer: asyncio.Future[Rollout]
    """Cancelled if the episode no longer waits."""
    failures: int = 0
    losses: int = 0
    """Lost connections, and waits for a busy server."""
    rid: str = ""
    """Id of the attempt on its way; empty while the request waits."""


@dataclass(eq=False)
class _Server:
    url: str
    queue: deque[_Job] = field(default_factory=deque)
    """Requests of the server's own groups."""
    busy: int = 0
    most_busy: int = 0
    busy_s: float = 0.0
    """Seconds of all its requests together."""
    is_away: bool = False
    """Does not answer at the moment, and gets no requests."""
    down: bool = False
    """Was away for too long, and is not asked any more."""


@dataclass(frozen=True, slots=True)
class Call:
    """What the requests of a ``converse`` have in common."""

    body: Body
    decode: Decode
    on_finish: OnFinish = None
    version: str | None = None
    """A server gets no requests unless its weights are called so; None: any."""
    max_bytes: Limit = lambda request: MAX_ANSWER_BYTES
    refuses_reread: bool = False
    """Whether retracted answers are asked for again."""


class SGLangClient:
    """Sends ``/generate`` requests to the servers at ``urls``."""

    def __init__(
        self, urls: Sequence[str], settings: SGLangConfig, headers: Mapping[str, str] = {}, tell: Tell = print
    ) -> None:
        """``headers`` go with every request, an API key among them. ``tell`` gets a line for the first
        event of a kind since the counts were cleared."""
        refuse_if(not urls, RolloutError, "no_server")
        self.urls, self.settings, self.tell = [*urls], settings, tell
        self.headers = UNPACKED | dict(headers)
        self.counts = Counter[str]()
        """See ``Engine.answer_counts``."""

    def converse(self, begin: Begin, call: Call) -> None:
        """See ``Engine.converse``; RolloutError if a request keeps failing, with the last failure.

        RequestError, raised to the caller of the request, if no server takes a request of its size.
        """

        async def run() -> None:
            # trust_env: servers are near, often on the loopback address, and no proxy may come between.
            async with aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_CONNECTION_S),
                headers=self.headers,
                timeout=aiohttp.ClientTimeout(total=None),
                read_bufsize=BUFFER_BYTES,
                auto_decompress=False,  # ``read_body`` unpacks up to a limit
                trust_env=False,
            ) as http:
                await _RequestSession(self, http, call).run_episodes(begin)

        run_session(run())


class _RequestSession(Session):
    def __init__(self, client: SGLangClient, http: aiohttp.ClientSession, call: Call) -> None:
        super().__init__()
        self._servers = [_Server(url) for url in client.urls]
        self._client, self._settings, self._http, self._call = client, client.settings, http, call
        self._is_open, self._version = call.version is None, int(call.version or -1)
        self._helpers: list[asyncio.Task[None]] = []
        """Tasks that end with the last episode: the ticks, and waits for absent servers."""
        self._serving: dict[_Job, tuple[_Server, asyncio.Task[None]]] = {}
        self._is_paused = False
        self._sent_at: list[float] = []
        """Loop times of the first request and the last answer."""

    async def run_episodes(self, begin: Begin) -> None:
        async with self.closing, self._tasks:
            begin(self)
            if self.episodes:
                self._helpers += [self._tasks.create_task(work) for work in (self._tick(), self._open())]
        duration = max(self._sent_at, default=0.0) - min(self._sent_at, default=0.0)
        slots = sum(server.most_busy for server in self._servers)
        self._client.counts["slot_ms"] += round(1e3 * slots * duration)
        self._client.counts["busy_slot_ms"] += round(1e3 * sum(server.busy_s for server in self._servers))

    def pause(self) -> None:
        self._is_paused = True
        for server in self._servers:
            while server.queue:
                self._return_alone(server.queue.popleft())
        for job, (server, _) in [*self._serving.items()]:
            if job.rid:
                self._tasks.create_task(self._stop(job, server.url, job.rid))
            else:
                self._return_alone(job)

    async def _stop(self, job: _Job, url: str, rid: str) -> None:
        """Have a server end a request, and wait for the answer with the tokens so far."""
        until = asyncio.get_running_loop().time() + PAUSE_S
        while not job.answer.done() and (remaining_s := until - asyncio.get_running_loop().time()) > 0:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with asyncio.timeout(remaining_s):
                    told = await self._http.post(f"{url}/abort_request", json={"rid": rid}, allow_redirects=False)
                    await told.read()
            await asyncio.wait([job.answer], timeout=min(remaining_s, STOP_AGAIN_S))
        if not job.answer.done():
            self._lose_part(job, f"{url}: no answer within {PAUSE_S} s to a request that was to end")

    def _lose_part(self, job: _Job, cause: str) -> None:
        if not self._client.counts["lost_parts"]:
            self._client.tell(f"warning: lost the tokens so far of a response that goes on later, the first: {cause}")
        self._client.counts["lost_parts"] += 1
        self._return_alone(job)

    def _return_alone(self, job: _Job) -> None:
        """Answer a request with its prompt alone."""
        if not job.answer.done():
            job.answer.set_result(prompt_alone(job.request, self._version))
        if job in self._serving:
            self._serving[job][1].cancel()

    async def _tick(self) -> None:
        while self._call.on_finish is not None:
            await asyncio.sleep(TICK_S)
            self._call.on_finish(0)

    async def _open(self) -> None:
        """Begin with the servers that have the weights of the session; await servers that are fresh or behind."""
        version, servers = self._call.version, self._servers if not self._is_open else ()
        checks = (is_ready(self._http, server.url, version, timeout_s=OPEN_S, asks_health=False) for server in servers)
        for server, ready in zip(servers, await asyncio.gather(*checks), strict=True):
            if not ready:
                self._lose(server, AwayError(f"{server.url} does not answer with weights {version}"))
        self._is_open = True
        self._assign()

    async def sample(self, request: SampleRequest) -> Rollout:
        if self._is_paused:
            return prompt_alone(request, self._version)
        answer: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
        queue = self._servers[request.group % len(self._servers)].queue
        job = _Job(request, answer)
        # A later turn goes first: the server's cache still has the prefix of its episode.
        queue.appendleft(job) if request.known_rows else queue.append(job)
        # Defer: a request must not take a place at the preferred server of a second group.
        asyncio.get_running_loop().call_soon(self._assign)
        try:
            return await answer
        except asyncio.CancelledError:
            if job in self._serving:  # closing its connection makes the server abort the request
                self._serving[job][1].cancel()
            raise

    def _after_episode(self) -> None:
        if not self.episodes:
            for task in self._helpers:
                task.cancel()

    def _assign(self) -> None:
        """Fill the places of all servers that answer."""
        for server in self._servers if self._is_open else ():
            while not self._is_blocked(server) and (job := self._next(server)) is not None:
                server.busy += 1
                server.most_busy = max(server.most_busy, server.busy)
                serving = self._tasks.create_task(self._serve(server, job))
                self._serving[job] = server, serving
                serving.add_done_callback(lambda task, server=server, job=job: self._release(server, job, task))

    def _is_blocked(self, server: _Server) -> bool:
        return server.is_away or server.busy >= self._settings.concurrency

    def _next(self, server: _Server) -> _Job | None:
        """Take a request of the server's own groups, else the newest request of the longest queue of a blocked
        server."""
        while True:
            blocked = [other.queue for other in self._servers if other.queue and self._is_blocked(other)]
            if server.queue:
                job = server.queue.popleft()
            elif blocked:
                job = max(blocked, key=len).pop()
            else:
                return None
            if not job.answer.done():
                return job

    async def _serve(self, server: _Server, job: _Job) -> None:
        """Send a request; set the answer, or queue the request again."""
        try:
            rollout = await self._ask(server, job)
        except (AwayError, RetryError) as failure:
            if self._is_paused:
                self._lose_part(job, str(failure))
                return
            if isinstance(failure, RetryError):
                await self._repeat(server, job, failure)
                return
            job.losses += 1
            if job.losses >= LOSSES:
                raise RolloutError(refusal("request_lost", job=job, failure=failure)) from failure
            server.queue.appendleft(job)
            self._lose(server, failure)
        else:
            if not job.answer.done():
                job.answer.set_result(rollout)
            if self._call.on_finish is not None and rollout.finish_reason != "pause":
                self._call.on_finish(1)

    async def _ask(self, server: _Server, job: _Job) -> Rollout:
        """Send an attempt and check the answer; AwayError or RetryError if the next may succeed."""
        clock, rid, deadline_s = asyncio.get_running_loop().time, uuid.uuid4().hex, self._settings.deadline_s
        job.rid, start = rid, clock()
        try:
            with reworded(TimeoutError, RetryError, f"{server.url}: no answer within {deadline_s} s"):
                async with asyncio.timeout(deadline_s):
                    answer = await self._post(server.url, self._call.body(job.request) | {"rid": rid}, job.request)
        finally:
            job.rid, end = "", clock()
            server.busy_s += end - start
            self._sent_at = [min([start, *self._sent_at]), end]
        with reworded((RolloutError, TraceError), partial(RetryError, event=WRONG), f"{server.url}: "):
            rollout = self._call.decode(job.request, answer, rid, self._is_paused)
        if self._call.refuses_reread and rollout.reread_mask is not None:
            raise RetryError(refusal("answer_reread", url=server.url), "retracted_answers", remedy=refusal("memory"))
        return rollout

    async def _repeat(self, server: _Server, job: _Job, failure: RetryError) -> None:
        """Queue a request at the next server after a pause, or give the request up."""
        client, event = self._client, failure.event
        if event and not client.counts[event]:
            client.tell(f"warning: {event.replace('_', ' ')}, which are asked for again, the first: {failure}")
        client.counts.update([event] if event else [])
        job.losses += failure.status in BUSY
        job.failures += failure.status not in BUSY
        tries = job.failures + job.losses
        if job.failures >= self._settings.attempts or job.losses >= LOSSES:
            last = f"{job.request.label}: {tries} attempts failed, the last: {failure}"
            if not failure.remedy:
                raise RolloutError(last) from failure
            if not job.answer.done():
                job.answer.set_exception(RequestError(f"{last}; {failure.remedy}"))
            return
        await asyncio.sleep(max(failure.wait_s, min(BACKOFF_S * 2 ** (tries - 1), MAX_WAIT_S / 2)))
        self._servers[(self._servers.index(server) + 1) % len(self._servers)].queue.append(job)

    def _release(self, server: _Server, job: _Job, task: asyncio.Task[None]) -> None:
        """Called when a request was answered, queued again or cancelled."""
        server.busy -= 1
        if self._serving.get(job, (server, None))[1] is task:  # else the request was sent again already
            del self._serving[job]
        if task.cancelled() or task.exception() is None:
            self._assign()

    async def _post(self, url: str, body: dict[str, Any], request: SampleRequest) -> Any:
        limit = self._call.max_bytes(request)
        named: Any = {"prefix": f"{url}: ", "tell": lambda error: f"{type(error).__name__}: {error}"}
        away = reworded((aiohttp.ClientConnectionError, aiohttp.ClientPayloadError), AwayError, **named)
        wrong = reworded(DataError, partial(RetryError, event=WRONG))
        with reworded(aiohttp.ClientError, RetryError, **named), away, wrong:
            async with self._http.post(f"{url}/generate", json=body, allow_redirects=False) as response:
                status, wait_s = response.status, retry_after(response.headers, MAX_WAIT_S)
                answer = await read_body(response, f"{url}/generate", limit)
            if status == 200:
                return parse_json(answer, f"{url}/generate", limit)
        message = f"HTTP {status}: {answer[:300].decode('utf-8', errors='replace')}"
        if status >= 500 or status in (*BUSY, TOO_LARGE):
            remedy = "raise the limit of this server or proxy" if status == TOO_LARGE else ""
            raise RetryError(f"{url}: {message}", "refused_requests", status, wait_s, remedy)
        raise RolloutError(f"{url} refuses the request, {message}")

    def _lose(self, server: _Server, failure: AwayError) -> None:
        if not server.is_away:
            server.is_away = True
            self._helpers.append(self._tasks.create_task(self._await_return(server, failure)))

    async def _await_return(self, server: _Server, failure: AwayError) -> None:
        """Assign requests to a server again when it has the weights; RolloutError if all servers stay away."""
        is_restarted = self._settings.urls or self._settings.max_restarts
        until = asyncio.get_running_loop().time() + (self._settings.start_deadline_s if is_restarted else 1.0)
        while asyncio.get_running_loop().time() < until:
            await asyncio.sleep(RETURN_POLL_S)
            if await is_ready(self._http, server.url, self._call.version):
                server.is_away = False
                self._assign()
                return
        server.down = True
        if all(other.down for other in self._servers):
            raise RolloutError(f"all {len(self._servers)} SGLang servers are down, the last failure: {failure}")
