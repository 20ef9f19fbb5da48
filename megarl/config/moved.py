"""Configurations inside run folders that were moved or copied."""

import os
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

PATHS = (("model", "path"), ("model", "reference"), ("data", "train"), ("data", "heldout"), ("sft", "data"))
PATHS += (("sft", "out"),)
"""Keys that may name a file or folder."""


def follow(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the saved configuration of the run in ``folder``, with current paths.

    run.dir becomes the folder. A missing path is looked up at the old place relative to the run folder, so a tree that
    was moved as a whole is found again.
    """
    old_dir = _get(table, "run", "dir")
    if old_dir is None or Path(old_dir).resolve() == folder.resolve():
        return table
    moved = deepcopy(table)
    moved["run"]["dir"] = str(folder)
    for name, key in PATHS:
        if (value := _get(table, name, key)) is not None and not Path(value).exists():
            new_path = os.path.normpath(folder / os.path.relpath(value, old_dir))
            moved[name][key] = new_path if Path(new_path).exists() else value
    return moved


def _get(table: Mapping[str, Any], name: str, key: str) -> str | None:
    inner = table.get(name)
    value = inner.get(key) if isinstance(inner, Mapping) else None
    return value if isinstance(value, str) and "\0" not in value else None
