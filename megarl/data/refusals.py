"""The texts of refused data: refusals.toml."""

import tomllib
from pathlib import Path

_TEXTS: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def refusal(name: str, /, **facts: object) -> str:
    """Return the text of this name, with ``facts`` in it."""
    return _TEXTS[name].format(**facts)
