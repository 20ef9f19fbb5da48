"""What all requests to SGLang servers share: the API key, and paths that differ between releases."""

import asyncio
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
import httpx

from megarl.errors import ConfigError, RolloutError

SERVER_INFO = ("server_info", "get_server_info")
"""Paths that return the release and arguments; older releases know only the second."""
MODEL_INFO = ("model_info", "get_model_info")
"""Paths that return the version of the weights; older releases know only the second."""


def key_named(variable: str | None) -> str | None:
    """Returns the API key in a variable of the environment; None without a name, ConfigError without the variable."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigError(f"sglang.api_key_env: the environment has no variable {variable}; export it")
    return os.environ[variable]


def authorization(api_key: str | None) -> dict[str, str]:
    """Returns the headers that carry an API key; none without a key."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def server_info(url: str, api_key: str | None, timeout_s: float = 60.0) -> dict[str, Any]:
    """Returns the "version" and the arguments of a running server; RolloutError if it does not answer."""
    try:
        ask = partial(httpx.get, headers=authorization(api_key), timeout=timeout_s, trust_env=False)
        answer = ask(f"{url}/{SERVER_INFO[0]}")
        if answer.status_code == 404:
            answer = ask(f"{url}/{SERVER_INFO[1]}")
        found = answer.raise_for_status().json()
        return {**found, "version": str(found["version"])}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
        raise RolloutError(f"no SGLang server answers at {url} ({error!r}); start it, or correct the URL") from error


@dataclass(frozen=True, slots=True)
class Places:
    """How much a server has room for at a time, or the part of it that one of several clients may take."""

    requests: int
    tokens: float = math.inf
    """Of prompts and responses in its cache."""

    @classmethod
    def of(cls, info: Any, clients: int = 1) -> "Places | None":
        """Read what ``/server_info`` says, and divide it by ``clients``; None if it does not say."""
        try:
            states = info["internal_states"]  # one of each replica
            running = [int(state["effective_max_running_requests_per_dp"]) for state in states]
            tokens = int(info["max_total_num_tokens"]) * len(running)
        except (KeyError, TypeError, ValueError):
            return None
        if not running or min(*running, tokens) < 1:
            return None
        return cls(max(1, sum(running) // clients), tokens / clients)


async def find_places(http: aiohttp.ClientSession, url: str, clients: int, timeout_s: float) -> Places | None:
    """Ask a server how much it has room for; None if it does not say in time."""
    with suppress(aiohttp.ClientError, TimeoutError, ValueError):
        async with asyncio.timeout(timeout_s):
            for path in SERVER_INFO:
                async with http.get(f"{url}/{path}") as response:
                    if response.status == 200:
                        return Places.of(await response.json(), clients)
    return None


async def is_ready(
    http: aiohttp.ClientSession, url: str, version: str | None, *, timeout_s: float = 20.0, asks_health: bool = True
) -> bool:
    """Whether a server is healthy, which it says after a second, and has the weights ``version`` (None: any)."""
    try:
        async with asyncio.timeout(timeout_s):
            if asks_health:
                async with http.get(f"{url}/health") as response:
                    if response.status != 200:
                        return False
            for path in MODEL_INFO if version is not None else ():  # a restarted server is healthy before it has them
                async with http.get(f"{url}/{path}") as response:
                    if response.status == 200:
                        return str((await response.json()).get("weight_version")) == version
        return version is None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return False
