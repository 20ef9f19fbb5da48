"""Folders that a wheel carries: ``patches`` (diffs) and ``launch`` (recipes, scripts, model configs)."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def shipped_folder(name: str) -> Path:
    """The folder of this name inside an installed megarl, or beside the package in a checkout."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name
