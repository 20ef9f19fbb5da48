"""Flags of the command line that stand for keys of the configuration: ``--table.key value``."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from types import NoneType
from typing import Any, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from megarl.config import file as config_file
from megarl.errors import ConfigError


def split_overrides(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Take ``--table.key value``, ``--table.key=value`` and ``--table.flag`` (= true) out of the command line.

    Returns the other words and dotted key -> value of the key's type. Raises ConfigError for a key that does not exist
    or a value of the wrong type.
    """
    rest: list[str] = []
    overrides: dict[str, Any] = {}
    position = 0
    while position < len(words):
        name, equals, text = words[position].partition("=")
        position += 1
        if not name.startswith("--") or "." not in name:
            rest.append(words[position - 1])
            continue
        if not equals:
            has_value = position < len(words) and not words[position].startswith("--")
            text = words[position] if has_value else "true"
            position += has_value
        key = name[2:]
        overrides[key] = _typed(key, text)
    return rest, overrides


def _typed(key: str, text: str) -> Any:
    annotation = config_file.annotation_of(key)
    if annotation is None:
        raise ConfigError(f"--{key}: {config_file.unknown_key(key)}")
    if annotation is Any or list in (get_origin(option) for option in (annotation, *get_args(annotation))):
        return _toml_value(text)
    if text == "none" and NoneType in get_args(annotation):
        return None
    try:
        return TypeAdapter(annotation).validate_python(text)
    except ValidationError as error:
        raise ConfigError(f"--{key}: found {text!r}, {error.errors()[0]['msg'].lower()}") from error


def _toml_value(text: str) -> Any:
    """The text as a TOML value (1, 0.5, true, [1, 2]); a string if it is none."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def as_flag(value: Any) -> str:
    """A value as ``split_overrides`` reads it."""
    if value is None:
        return "none"
    return json.dumps(value) if isinstance(value, (bool, list)) else str(value)
