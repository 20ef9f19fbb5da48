"""The table of named algorithms, each with its source and its use: data in objectives.toml. Imports no torch.

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
from megarl.errors import ConfigError, UnknownNameError


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


class _Objectives(dict[str, Objective]):
    def __missing__(self, name: object) -> Objective:
        close = difflib.get_close_matches(str(name), self, n=3) or ["minirl", "grpo"]
        raise UnknownNameError(
            f"objective {name!r} is unknown; did you mean {' or '.join(close)}? All {len(self)} names are in "
            "docs/objectives.md and in list(megarl.core.objectives.OBJECTIVES)"
        )


OBJECTIVES: Mapping[str, Objective] = MappingProxyType(_Objectives({name: TABLE[name].objective for name in TABLE}))
"""Name -> the parts of the named algorithm. An unknown name raises UnknownNameError, a KeyError."""


def require_objective(value: object) -> Objective:
    """Return the value if it is an Objective; ConfigError with what to write if it is a name or anything else."""
    if isinstance(value, Objective):
        return value
    if isinstance(value, str):
        OBJECTIVES[value]  # an unknown name has an error of its own
        raise ConfigError(f"objective is the name {value!r}, expected the record: OBJECTIVES[{value!r}]")
    raise ConfigError(f"objective is {type(value).__name__}, expected a megarl.core.objectives.Objective")
