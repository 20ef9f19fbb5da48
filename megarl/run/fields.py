"""The fields of a run's JSON files, with their types: fields.toml."""

import math
import tomllib
from pathlib import Path
from typing import Any

_FIELDS: dict[str, dict[str, list[str]]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def require_fields(record: Any, name: str, largest: float = math.inf) -> None:
    """ValueError unless ``record`` is an object with the fields of table ``name``, all numbers below ``largest``."""
    if not isinstance(record, dict):
        raise ValueError(f"found {type(record).__name__}, expected an object")
    for field, kinds in _FIELDS[name].items():
        if field not in record:
            raise ValueError(f"{field} is missing")
        value = record[field]
        kind = "null" if value is None else type(value).__name__
        if kind not in kinds or (isinstance(value, int | float) and not abs(value) < largest):
            raise ValueError(f"{field} is {value!r:.80}, expected {' or '.join(kinds)}")
