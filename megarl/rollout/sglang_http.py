"""What every request to an SGLang server has in common: the key it carries, and paths that were renamed."""

from __future__ import annotations

SERVER_INFO = ("server_info", "get_server_info")
"""Paths that tell the release; the second is the only one of older releases."""
MODEL_INFO = ("model_info", "get_model_info")
"""Paths that tell the version of the weights; likewise."""


def authorization(api_key: str | None) -> dict[str, str]:
    """The headers that carry an API key; none without one."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
