"""Trust in a configuration file: a file that another user may have written is data, until the user passes
``--trust``."""

import grp
import os
import pwd
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError, refusal
from megarl.files.texts import read_table

_KEYS: dict[str, list[str]] = read_table(__file__)
PLUGS = tuple(_KEYS["plugs"])
"""Keys that may name the user's own code, as "package.module:name"."""
POWERS = tuple(_KEYS["powers"])
"""Keys whose values run or send something."""


def require_trust(path: Path, table: Mapping[str, Any], overrides: Mapping[str, Any]) -> bool:
    """Whether only this user and root can have written the file, and modules beside the file.

    ConfigError for an untrusted file with effective keys of PLUGS or POWERS that ``overrides`` do not replace.
    """
    if (reason := find_stranger(path)) is None:
        return True
    if powers := [text for key in (*PLUGS, *POWERS) if key not in overrides and (text := _describe_power(table, key))]:
        raise ConfigError(refusal("not_trusted", path=path, reason=reason, powers="; ".join(powers)))
    return False


def find_stranger(path: Path) -> str | None:
    """Reason why a user besides this user and root may have written a file, or modules beside the file; None without a
    reason."""
    places = dict.fromkeys((path.resolve(), path.resolve().parent, path.absolute().parent))
    return next(filter(None, map(_find_writer, places)), None)


def make_private(folder: Path) -> Path:
    """Return a folder without links in its path, made if missing; PermissionError if other users can write or swap the
    folder."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = folder.resolve()  # others may turn a link in /tmp elsewhere later
    is_sticky = folder.parent.stat().st_mode & stat.S_ISVTX
    reason = _find_writer(folder) or (None if is_sticky else _find_writer(folder.parent))
    if reason is not None:
        raise PermissionError(reason)
    return folder


def _find_writer(place: Path) -> str | None:
    status = place.stat()
    if status.st_uid not in (os.geteuid(), 0):
        return f"{place} belongs to user {status.st_uid}"
    if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid)):
        return f"others can write {place}"
    return None


def safe_environment() -> dict[str, str]:
    """Environment for a Python program that imports nothing from the current folder (Python 3.11 or newer)."""
    return os.environ | {"PYTHONSAFEPATH": "1"}


def _is_private(gid: int) -> bool:
    """Whether a group has no member but this user; some systems give each user a group."""
    with suppress(KeyError):
        group, name = grp.getgrgid(gid), pwd.getpwuid(os.geteuid()).pw_name
        return group.gr_name == name and not {*group.gr_mem} - {name}
    return False


def _describe_power(table: Mapping[str, Any], key: str) -> str | None:
    section, _, name = key.partition(".")
    inner = table.get(section)
    value = inner.get(name) if isinstance(inner, Mapping) else None
    return f"{key} = {value!r}" if value and (key in POWERS or _names_code(value)) else None


def _names_code(value: Any) -> bool:
    """Whether a value, or a nested value, looks like "package.module:name", or sends results out."""
    if isinstance(value, Mapping):
        return any(map(_names_code, value.values()))
    return (
        any(map(_names_code, value))
        if isinstance(value, list | tuple)
        else ":" in str(value) or value in _KEYS["senders"]
    )
