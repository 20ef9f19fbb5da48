"""Shared parts of all requests to SGLang servers: the API key, limits on answers, and paths that differ by release."""

import asyncio
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import httpx
from pydantic import BaseModel, Field, TypeAdapter

from megarl.errors import ConfigError, DataError, RolloutError
from megarl.files.foreign_json import UNPACKED, check_types, join_body, parse_json, read_body

MAX_BYTES = 64 << 20
"""Limit of an answer about a server or an update; the longest honest answer holds the checksums of all tensors."""

SERVER_INFO = ("server_info", "get_server_info")
"""Paths that return the release and arguments; older releases know only the second."""
MODEL_INFO = ("model_info", "get_model_info")
"""Paths that return the version of the weights; older releases know only the second."""


def key_named(variable: str | None) -> str | None:
    """Return the API key in an environment variable; None without a name, ConfigError without the variable."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigError(f"sglang.api_key_env: the environment has no variable {variable}; export it")
    return os.environ[variable]


def authorization(api_key: str | None) -> dict[str, str]:
    """Return the headers with an API key; empty without a key."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def request(
    http: httpx.Client, method: str, path: str, body: Any = None, timeout_s: httpx.Timeout | float | None = None
) -> httpx.Response:
    """Return the answer to a request, read up to MAX_BYTES; httpx.HTTPError without an answer, DataError for a wrong
    answer."""
    timeout = http.timeout if timeout_s is None else timeout_s
    with http.stream(method, path, json=body, timeout=timeout, headers=UNPACKED, follow_redirects=False) as answer:
        source = str(answer.url)
        content = join_body(answer.status_code, answer.headers, answer.iter_raw(), source, MAX_BYTES)
    headers = {name: answer.headers[name] for name in ("content-type",) if name in answer.headers}
    return httpx.Response(answer.status_code, headers=headers, content=content, request=answer.request)


def read_object(answer: httpx.Response) -> dict[str, Any]:
    """Return the JSON object of an answer; DataError for other content."""
    content = parse_json(answer.content, str(answer.url), MAX_BYTES)
    if not isinstance(content, dict):
        raise DataError(f"{answer.url} answers {answer.text[:300]!r}, expected a JSON object")
    return content


def server_info(url: str, api_key: str | None, timeout_s: float = 60.0) -> dict[str, Any]:
    """Return the "version" and the arguments of a running server; RolloutError if the server does not answer."""
    try:
        with httpx.Client(headers=authorization(api_key), timeout=timeout_s, trust_env=False) as http:
            answer = request(http, "GET", f"{url}/{SERVER_INFO[0]}")
            if answer.status_code == 404:
                answer = request(http, "GET", f"{url}/{SERVER_INFO[1]}")
        info = read_object(answer.raise_for_status())
        return {**info, "version": str(info["version"])}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
        raise RolloutError(f"no SGLang server answers at {url} ({error!r}); start it, or correct the URL") from error


class _Replica(BaseModel):
    effective_max_running_requests_per_dp: int = Field(ge=1, le=1 << 40)


class _Room(BaseModel):
    """The room of a server in ``/server_info``."""

    internal_states: list[_Replica] = Field(min_length=1)
    max_total_num_tokens: int = Field(ge=1, le=1 << 60)
    context_length: int | None = None


_ROOM = TypeAdapter(_Room)


@dataclass(frozen=True, slots=True)
class Places:
    """Room of a server, or one client's share of the room."""

    requests: int
    tokens: float = math.inf
    """Tokens of prompts and responses in the cache."""
    longest: float = math.inf
    """Tokens of a prompt and a response, in the cache or the context, at about which the server cuts a response."""

    @classmethod
    def of(cls, info: Any, clients: int = 1) -> "Places | None":
        """Read the room in ``/server_info``, and divide the room by ``clients``; None if ``/server_info`` has no
        room."""
        try:
            room = check_types(_ROOM, info, "/server_info")
        except DataError:
            return None
        running = [state.effective_max_running_requests_per_dp for state in room.internal_states]
        longest = min(room.max_total_num_tokens, room.context_length or math.inf)
        return cls(max(1, sum(running) // clients), room.max_total_num_tokens * len(running) / clients, longest)


async def _ask(http: aiohttp.ClientSession, url: str, paths: Sequence[str]) -> Any:
    """The JSON at the first known path; None if the server knows no path."""
    for path in paths:
        async with http.get(f"{url}/{path}", allow_redirects=False) as response:
            if response.status == 200:
                return parse_json(await read_body(response, f"{url}/{path}", MAX_BYTES), f"{url}/{path}", MAX_BYTES)
    return None


async def find_places(http: aiohttp.ClientSession, url: str, clients: int, timeout_s: float) -> Places | None:
    """Ask a server for its room; None without an answer in time."""
    with suppress(aiohttp.ClientError, TimeoutError, DataError):
        async with asyncio.timeout(timeout_s):
            return Places.of(await _ask(http, url, SERVER_INFO), clients)
    return None


async def is_ready(
    http: aiohttp.ClientSession, url: str, version: str | None, *, timeout_s: float = 20.0, asks_health: bool = True
) -> bool:
    """Whether a server is healthy and has the weights ``version`` (None: any). The health check takes up to a
    second."""
    try:
        async with asyncio.timeout(timeout_s):
            if asks_health:
                async with http.get(f"{url}/health", allow_redirects=False) as response:
                    if response.status != 200:
                        return False
            if version is None:
                return True
            info = await _ask(http, url, MODEL_INFO)  # a restarted server is healthy before it has the weights
            return isinstance(info, dict) and str(info.get("weight_version")) == version
    except (aiohttp.ClientError, TimeoutError, DataError):
        return False
