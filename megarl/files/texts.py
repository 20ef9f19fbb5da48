"""Tables of TOML beside the modules that read them."""

import tomllib
from pathlib import Path
from typing import Any

from megarl.errors import refusal as refusal


def read_table(module: str, name: str = "") -> dict[str, Any]:
    """Return the TOML file beside a module (``__file__``) that has its name, or ``name``."""
    path = Path(module)
    return tomllib.loads((path.with_name(name) if name else path.with_suffix(".toml")).read_text("utf-8"))
