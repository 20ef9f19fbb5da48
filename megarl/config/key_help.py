"""Help on the keys of the configuration, by table: type, choices, unit, default and meaning of each."""

from collections.abc import Mapping
from itertools import starmap
from typing import Annotated, Any

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from megarl.config import Config
from megarl.config import file as config_file
from megarl.config.plugs import ENGINES
from megarl.core.choices.table import OBJECTIVES
from megarl.errors import ConfigError, did_you_mean
from megarl.text_table import text_table

_NAMES: dict[str, Mapping[str, Any]] = {"train.objective": OBJECTIVES, "rollout.engine": ENGINES}
"""Keys with named choices, which also take "package.module:name"."""
_UNITS = {"_s": "seconds", "_gib": "GiB", "_mb": "MiB", "_kb": "KiB", "_tokens": "tokens"}
_TYPES = {"integer": "whole number", "boolean": "true | false", "string": "text", "object": "table", "null": "none"}
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def describe_tables() -> str:
    """Return one line for each table, and how to see the keys of a table."""
    rows = [(f"  [{name}]", meaning.rstrip(".")) for name, (meaning, _) in _tables().items()]
    return (
        f"\nTables of the configuration:\n\n{text_table(rows)}\n\n"
        "Any key is a flag too, and wins over the file: --rollout.temperature 0.7 (none for no value).\n"
        "megarl help TABLE shows the keys of a table, megarl help all those of all tables."
    )


def describe(topic: str) -> str:
    """Describe the keys of a table ("rollout"), one key ("rollout.temperature" or "temperature"), or "all". ConfigError
    for an unknown topic."""
    tables = _tables()
    if topic == "all":
        return "\n\n".join(map(describe, tables))
    name = topic.strip("[]")
    if name in tables:
        meaning, keys = tables[name]
        return "\n\n".join([f"[{name}]  {meaning}", *starmap(_describe_key, keys.items())])
    every = config_file.keys()
    if keys := [key for key in every if name in (key, key.rpartition(".")[2])]:
        return "\n\n".join(_describe_key(key, every[key]) for key in keys)
    hint = did_you_mean(name, [*tables, *every], f"expected a table, one of {', '.join(tables)}, a key, or all")
    raise ConfigError(f"megarl help: found {topic!r}; {hint}")


def _tables() -> dict[str, tuple[str, dict[str, FieldInfo]]]:
    """Table -> (meaning, key -> pydantic's description of the key)."""
    tables = {}
    for name, info in Config.model_fields.items():
        meaning = getattr(config_file.table_of(info), "__doc__", None) or info.description or ""
        keys = {key: inner for key, inner in config_file.keys().items() if key.startswith(f"{name}.")}
        tables[name] = " ".join(meaning.split()).removeprefix(f"[{name}]: "), keys
    return tables


def _describe_key(key: str, info: FieldInfo) -> str:
    annotated: Any = Annotated[info.annotation, info]
    kind, default = _kind(TypeAdapter(annotated).json_schema()), info.get_default()
    if key in _NAMES:
        kind = f"{' | '.join(_NAMES[key])} | package.module:name"
    unit = next((unit for suffix, unit in _UNITS.items() if key.endswith(suffix)), "")
    about = ", ".join(filter(None, (kind, unit)))
    says = " [needed]" if info.is_required() else f" [default {_plain(default)}]" if default not in (None, {}) else ""
    meaning = " ".join((info.description or "").split())
    lines = text_table([("    ", about), *([("    ", meaning)] if meaning else [])])
    return f"  --{key}{says}\n{lines}"


def _kind(schema: Mapping[str, Any]) -> str:
    """The type with choices and bounds, such as ``whole number > 0``."""
    if "anyOf" in schema:
        return " | ".join(map(_kind, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return " | ".join(_plain(choice) for choice in schema.get("enum", (schema.get("const"),)))
    kind = schema.get("type")
    if kind == "array":
        return f"list of: {_kind(schema.get('items', {}))}"
    bounds = [f"{sign} {schema[name]:g}" for name, sign in _BOUNDS.items() if name in schema]
    return " ".join([_TYPES.get(str(kind), str(kind or "any value")), " and ".join(bounds)]).strip()


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
