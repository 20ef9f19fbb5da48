"""Requests to SGLang servers: bounded, balanced, with a deadline, and repeated where the server was at fault.

A group's samples go to one server, so that its prefix cache serves them. Each server has at most ``concurrency``
requests at a time; the rest wait here. A request that fails for a reason that may pass (the connection, an HTTP 5xx,
an answer that is cut short, the deadline) goes back to the queue, also of another server; nothing is counted until its
answer has been checked.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from megarl.core.types import Rollout, SampleRequest
from megarl.errors import RolloutError, TraceError
from megarl.rollout.sglang_connection import Connection
from megarl.rollout.sglang_http import MODEL_INFO, authorization


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
    """How long a server may be away before its requests go to the others."""
    api_key: str | None = None
    """Sent as a bearer token."""
    compact_routes: bool = True
    """Ask for routes in the short form, which servers with our plugin know and others ignore."""


class PassingError(Exception):
    """A failure that another attempt may not meet."""


class AwayError(PassingError):
    """The server could not be reached, or went away in the middle of an answer: no fault of the request."""


@dataclass
class _Job:
    request: SampleRequest
    position: int
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

    def generate(
        self,
        requests: Sequence[SampleRequest],
        body: Body,
        decode: Decode,
        on_finish: Callable[[int], None] | None = None,
        version: str | None = None,
    ) -> list[Rollout]:
        """The rollouts of all requests in their order; RolloutError if one cannot be had, naming the last failures.

        A server that was away gets requests again when its weights are called ``version`` (None: any).
        """
        try:
            return asyncio.run(self._generate(requests, body, decode, on_finish, version))
        except ExceptionGroup as several:  # of the workers; the first one ended the others
            raise several.exceptions[0] from None

    async def _generate(
        self,
        requests: Sequence[SampleRequest],
        body: Body,
        decode: Decode,
        on_finish: Callable[[int], None] | None,
        version: str | None,
    ) -> list[Rollout]:
        found: dict[int, Rollout] = {}
        down: set[int] = set()
        changed = asyncio.Condition()
        queues: list[deque[_Job]] = [deque() for _ in self.urls]
        for position, request in enumerate(requests):
            queues[request.group % len(queues)].append(_Job(request, position))

        async def work(server: int, connection: Connection) -> None:
            while True:
                async with changed:  # what is under way elsewhere may come back
                    await changed.wait_for(lambda: any(queues) or len(found) == len(requests))
                if len(found) == len(requests):
                    return
                job = _next(queues, server)
                if job is None:  # another worker was quicker
                    continue
                try:
                    async with asyncio.timeout(self.settings.deadline_s):
                        answer = await self._post(connection, self.urls[server], body(job.request))
                    rollout = self._decoded(job, answer, decode)
                except AwayError as failure:
                    self._lost(job, failure)
                    async with changed:
                        queues[server].appendleft(job)
                    if not await self._back(server, down, version):
                        async with changed:  # the others take over what was queued here
                            changed.notify_all()
                        if len(down) == len(self.urls):
                            raise RolloutError(
                                f"all {len(self.urls)} SGLang servers are down, the last failure: {failure}"
                            ) from failure
                        return
                    continue
                except (PassingError, TimeoutError) as failure:
                    await self._again(job, failure)
                    async with changed:
                        queues[(server + 1) % len(queues)].append(job)
                        changed.notify_all()
                    continue
                found[job.position] = rollout
                if on_finish is not None:
                    on_finish(1)
                if len(found) == len(requests):
                    async with changed:
                        changed.notify_all()

        per_server = min(self.settings.concurrency, len(requests))
        tls = ssl.create_default_context() if any(url.startswith("https:") for url in self.urls) else None
        connections = [
            (server, Connection(url, self.headers, tls))
            for server, url in enumerate(self.urls)
            for _ in range(per_server)
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for server, connection in connections:
                    group.create_task(work(server, connection))
        finally:
            for _, connection in connections:
                connection.close()
        return [found[position] for position in range(len(requests))]

    async def _post(self, connection: Connection, url: str, body: dict[str, Any]) -> Any:
        try:
            status, answer = await connection.post("generate", json.dumps(body).encode())
        except (OSError, EOFError) as error:
            raise AwayError(f"{url}: {type(error).__name__}: {error}") from error
        except ValueError as error:
            raise PassingError(f"{url}: {error}") from error
        told = answer[:300].decode("utf-8", errors="replace")
        if status >= 500:
            raise PassingError(f"{url}: HTTP {status}: {told}")
        if status != 200:
            raise RolloutError(f"{url} refuses the request, HTTP {status}: {told}")
        try:
            return json.loads(answer)
        except ValueError as error:
            raise PassingError(f"{url}: the answer of {len(answer)} bytes is no JSON ({error})") from error

    async def _back(self, server: int, down: set[int], version: str | None) -> bool:
        """Wait for a server to answer again; False, and the server counted as down, if it stays away.

        One that has been started again answers before it has its weights.
        """
        until = asyncio.get_running_loop().time() + self.settings.recovery_s
        # No proxy of the environment: servers are meant to be near, often on the loopback address.
        async with httpx.AsyncClient(headers=self.headers, timeout=20.0, trust_env=False) as http:
            while server not in down:
                await asyncio.sleep(0.5)
                try:
                    answer = await http.get(f"{self.urls[server]}/health")
                    if answer.status_code == 200 and version in (None, await self._weights(http, server)):
                        return True
                except httpx.HTTPError:
                    pass
                if asyncio.get_running_loop().time() > until:
                    down.add(server)
        return False

    async def _weights(self, http: httpx.AsyncClient, server: int) -> str | None:
        for path in MODEL_INFO:
            answer = await http.get(f"{self.urls[server]}/{path}")
            if answer.status_code == 200:
                return str(answer.json().get("weight_version"))
        return None

    def _lost(self, job: _Job, failure: AwayError) -> None:
        job.losses += 1
        if job.losses >= self.settings.losses:
            request = job.request
            raise RolloutError(
                f"group {request.group} sample {request.sample}: lost {job.losses} times with its connection, the "
                f"last: {failure}; if the server dies of this request, its log says why"
            )

    def _decoded(self, job: _Job, answer: Any, decode: Decode) -> Rollout:
        try:
            return decode(job.request, answer)
        except (RolloutError, TraceError) as error:
            raise PassingError(str(error)) from error

    async def _again(self, job: _Job, failure: BaseException) -> None:
        told = str(failure) or f"no answer within {self.settings.deadline_s} s"
        job.failures.append(told)
        if len(job.failures) >= self.settings.attempts:
            request = job.request
            raise RolloutError(
                f"group {request.group} sample {request.sample}: {len(job.failures)} attempts failed, the last: {told}"
            )
        await asyncio.sleep(0.25 * 2 ** len(job.failures))


def _next(queues: Sequence[deque[_Job]], server: int) -> _Job | None:
    """The server's own work first; when that is done, the longest queue of another."""
    if queues[server]:
        return queues[server].popleft()
    longest = max(queues, key=len)
    return longest.pop() if longest else None
