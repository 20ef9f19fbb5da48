"""The smallest configuration of a run: as a table, checked, and as the text of a file."""

from __future__ import annotations

import copy
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest
import tomli_w

from megarl.config import Config
from megarl.config.file import parse
from megarl.errors import ConfigError

SMALLEST: Mapping[str, Mapping[str, Any]] = {
    "run": {"steps": 3},
    "model": {"path": "models/tiny"},
    "data": {"train": "train.jsonl", "max_prompt_tokens": 16},
    "rollout": {"prompts_per_step": 32, "group_size": 8, "max_response_tokens": 10},
    "optim": {"lr": 1e-4},
}


def parsed(**overrides: Any) -> Config:
    """Return the configuration with overrides, such as ``rollout__top_p=0.9``."""
    return parse(SMALLEST, {key.replace("__", "."): value for key, value in overrides.items()})


def refusal(**overrides: Any) -> str:
    """Return the line that refuses these overrides."""
    with pytest.raises(ConfigError) as caught:
        parsed(**overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def run_text(**overrides: Any) -> str:
    """Return the configuration with overrides as TOML, unchecked."""
    tables: Any = copy.deepcopy(dict(SMALLEST))
    for key, value in overrides.items():
        table, _, name = key.partition("__")
        if name:
            tables.setdefault(table, {})[name] = value
        else:
            tables[table] = value
    return tomli_w.dumps(tables)


def read_rows(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (words, parts of a message) of lines ``words | part | part``; a line that begins with blanks continues."""
    for row in text.strip().replace("\n    |", " |").splitlines():
        words, *parts = row.split(" | ")
        yield words, parts


def read_words(words: str) -> dict[str, Any]:
    """Return dotted key -> value of ``key=value`` words; a value that is no TOML is text."""
    overrides: dict[str, Any] = {}
    for word in shlex.split(words):
        key, _, text = word.partition("=")
        overrides[key] = text
        with suppress(tomllib.TOMLDecodeError):
            overrides[key] = tomllib.loads(f"value = {text}")["value"]
    return overrides
