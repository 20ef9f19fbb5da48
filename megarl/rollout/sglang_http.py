"""What every request to an SGLang server has in common: the key it carries, and paths that were renamed."""

from __future__ import annotations

import httpx

from megarl.errors import RolloutError

SERVER_INFO = ("server_info", "get_server_info")
"""Paths that tell the release; the second is the only one of older releases."""
MODEL_INFO = ("model_info", "get_model_info")
"""Paths that tell the version of the weights; likewise."""


def authorization(api_key: str | None) -> dict[str, str]:
    """The headers that carry an API key; none without one."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def ask_release(url: str, api_key: str | None) -> str:
    """SGLang's version as the server at ``url`` tells it, for example "0.5.23"; RolloutError if it tells none."""
    try:
        for path in SERVER_INFO:
            answer = httpx.get(f"{url}/{path}", headers=authorization(api_key), timeout=60.0, trust_env=False)
            if answer.status_code != 404:
                break
        return str(answer.raise_for_status().json()["version"])
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise RolloutError(f"no SGLang server answers at {url} ({error!r}); start it, or correct the URL") from error
