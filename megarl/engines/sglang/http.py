"""Shared parts of all requests to SGLang servers: the API key, limits on answers, and reports of a server."""

import asyncio
import os
from typing import Any

import aiohttp
import httpx

from megarl.errors import ConfigError, DataError, RolloutError, describe, reworded
from megarl.files.foreign_json import UNPACKED, join_body, parse_json, read_body

MAX_BYTES = 64 << 20
"""Limit of an answer about a server or an update; the longest honest answer holds the checksums of all tensors."""


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


def request(http: httpx.Client, method: str, path: str, body: Any, timeout_s: float) -> httpx.Response:
    """Return the answer to a request, read up to MAX_BYTES; httpx.HTTPError without an answer, DataError for a wrong
    answer."""
    with http.stream(method, path, json=body, timeout=timeout_s, headers=UNPACKED, follow_redirects=False) as answer:
        content = join_body(answer.status_code, answer.headers, answer.iter_raw(), str(answer.url), MAX_BYTES)
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
    kinds = (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError)
    prefix, advice = f"no SGLang server answers at {url} (", "); start it, or correct the URL"
    with reworded(kinds, RolloutError, prefix, advice, describe):
        with httpx.Client(headers=authorization(api_key), trust_env=False) as http:
            answer = request(http, "GET", f"{url}/server_info", None, timeout_s)
        info = read_object(answer.raise_for_status())
        return {**info, "version": str(info["version"])}


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
            # A restarted server is healthy before it has the weights.
            async with http.get(f"{url}/model_info", allow_redirects=False) as response:
                body = await read_body(response, f"{url}/model_info", MAX_BYTES)
            info = parse_json(body, f"{url}/model_info", MAX_BYTES) if response.status == 200 else None
            return isinstance(info, dict) and str(info.get("weight_version")) == version
    except (aiohttp.ClientError, TimeoutError, DataError):
        return False
