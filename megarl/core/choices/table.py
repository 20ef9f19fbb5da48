"""The table of named algorithms, each with its source and its use: data in objectives.toml. Imports no torch.

``docs/objectives.md`` is generated from this table by ``tools/objectives_doc.py``.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megarl.core.choices.parts import Objective
from megarl.core.choices.records import make


@dataclass(frozen=True, slots=True)
class Row:
    """One named algorithm."""

    objective: Objective
    """Its parts and default values."""
    source: str
    """Where it is from, and where the row departs from it."""
    use: str
    """When to use it, in one sentence or two."""


def _read_rows() -> dict[str, Row]:
    tables: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("objectives.toml").read_text("utf-8"))

    def make_objective(name: str) -> Objective:
        parts = {key: value for key, value in tables[name].items() if key not in ("like", "source", "use")}
        like = tables[name].get("like")
        return make(Objective, parts, None if like is None else make_objective(like))

    return {name: Row(make_objective(name), table["source"], table["use"]) for name, table in tables.items()}


TABLE: Mapping[str, Row] = MappingProxyType(_read_rows())
"""Named algorithms. Their gradients, not their loss values, are those of the papers."""

OBJECTIVES: Mapping[str, Objective] = MappingProxyType({name: row.objective for name, row in TABLE.items()})
"""The parts of each named algorithm."""
