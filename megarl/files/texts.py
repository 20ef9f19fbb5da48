"""Tables of TOML beside the modules that read them, and the texts of refusals: refusals.toml."""

import tomllib
from pathlib import Path
from typing import Any


def read_table(module: str, name: str = "") -> dict[str, Any]:
    """Return the TOML file beside a module (``__file__``) that has its name, or ``name``."""
    path = Path(module)
    return tomllib.loads((path.with_name(name) if name else path.with_suffix(".toml")).read_text("utf-8"))


_REFUSALS: dict[str, str] = read_table(__file__, "refusals.toml")


def refusal(name: str, /, **facts: object) -> str:
    """Return the text of this name in refusals.toml, with ``facts`` in it."""
    return _REFUSALS[name].format(**facts)
