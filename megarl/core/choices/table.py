"""The table of named algorithms with source and use, read from objectives.toml. Imports no torch.

``docs/objectives.md`` is generated from this table by ``tools/objectives_doc.py``.
"""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megarl.core.choices.parts import Objective
from megarl.core.choices.records import make
from megarl.errors import ConfigError, UnknownNameError, refusal


@dataclass(frozen=True, slots=True)
class Row:
    """A named algorithm."""

    objective: Objective
    """Parts with default values."""
    source: str
    """The publication, and deviations of the row."""
    use: str
    """When to use the algorithm, in one or two sentences."""


def _read_rows() -> dict[str, Row]:
    tables: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("objectives.toml").read_text("utf-8"))

    def make_objective(name: str) -> Objective:
        parts_of_row = {key: value for key, value in tables[name].items() if key not in ("like", "source", "use")}
        base = tables[name].get("like")
        return make(Objective, parts_of_row, None if base is None else make_objective(base))

    return {name: Row(make_objective(name), table["source"], table["use"]) for name, table in tables.items()}


TABLE: Mapping[str, Row] = MappingProxyType(_read_rows())
"""Named algorithms, with the gradients (not the loss values) of the papers."""


class _Objectives(dict[str, Objective]):
    def __missing__(self, name: object) -> Objective:
        close = difflib.get_close_matches(str(name).lower(), self, n=3) or ["minirl", "grpo"]
        raise UnknownNameError(refusal("unknown_objective", name=name, close=" or ".join(close), count=len(self)))


OBJECTIVES: Mapping[str, Objective] = MappingProxyType(_Objectives({name: TABLE[name].objective for name in TABLE}))
"""Name -> the parts of the named algorithm. An unknown name raises UnknownNameError, a KeyError."""


def find_objective(value: object) -> Objective:
    """Return a row, given the row or its name. UnknownNameError for an unknown name, ConfigError for other types."""
    if isinstance(value, str):
        return OBJECTIVES[value]
    if isinstance(value, Objective):
        return value
    kind = type(value).__name__
    raise ConfigError(f'objective is a {kind}, expected a row, such as OBJECTIVES["minirl"], or its name')
