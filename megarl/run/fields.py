"""The fields of a run's JSON files, with their types: fields.toml."""

import math
from typing import Any

from megarl.files.texts import read_table

_FIELDS: dict[str, dict[str, list[str]]] = read_table(__file__)


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
