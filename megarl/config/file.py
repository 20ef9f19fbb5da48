"""Read a configuration: a TOML file, and flags of the command line, which win; any mistake is one line."""

import difflib
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from megarl.config import Config
from megarl.config.tables.base import Table
from megarl.config.trust import require_trust
from megarl.errors import ConfigError

_MAX_BYTES = 1 << 18


def load(path: str | Path, overrides: Mapping[str, Any] | None = None, *, trust: bool = False) -> Config:
    """Read a TOML file; overrides (dotted key -> value) win over it. ConfigError, one line, if anything is wrong.

    The folder of the file becomes the first on ``sys.path``, as that of a script does: the file may name modules there.
    Not so the folder of a file that others may have written, unless the user trusts it: ``require_trust``.
    """
    table = read_toml(Path(path))
    try:
        folder = str(Path(path).absolute().parent)
        if (trust or require_trust(Path(path), table, overrides or {})) and folder not in sys.path:
            sys.path.insert(0, folder)
        return parse(table, overrides, source=str(path))
    except RecursionError:
        raise ConfigError(f"{path}: not a configuration file: its tables are nested too deeply") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file as they are. ConfigError, one line, whatever is in it."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(
                f"{path}: found {path.stat().st_size} bytes, expected a configuration of at most {_MAX_BYTES}"
            )
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a configuration file: {error}") from error
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # a number of too many digits among them
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def parse(table: Mapping[str, Any], overrides: Mapping[str, Any] | None = None, *, source: str = "config") -> Config:
    """Check nested tables, with overrides (dotted key -> value) applied; ConfigError names `source` and the key."""
    merged: Any = deepcopy(dict(table))
    for dotted, value in (overrides or {}).items():
        *parents, leaf = dotted.split(".")
        node = merged
        for parent in parents:
            node = node.setdefault(parent, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            raise ConfigError(f"{source}: {dotted}: found a value where a table was expected, above this key")
        node[leaf] = value
    try:
        config = Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_one_line(error)}") from error
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    if config.run.dir is None:  # resolved, so that the saved file says where the run lies
        config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(config.run_dir)})})
    return config


def keys() -> dict[str, FieldInfo]:
    """Every dotted key with pydantic's description of it, in file order; "megatron.*" stands for the free table."""
    found: dict[str, FieldInfo] = {}
    for name, info in Config.model_fields.items():
        options = (info.annotation, *get_args(info.annotation))  # "SftConfig | None" holds a table too
        tables = [option for option in options if isinstance(option, type) and issubclass(option, Table)]
        for table in tables:
            found |= {f"{name}.{key}": inner for key, inner in table.model_fields.items()}
        if not tables:
            found[f"{name}.*"] = info
    return found


def annotation_of(dotted: str) -> Any:
    """Type of a dotted key such as "rollout.temperature"; Any below a free table; None if there is no such key."""
    known = keys()
    if dotted in known:
        return known[dotted].annotation
    table, _, key = dotted.partition(".")
    parents = [known.get(f"{table}.*"), known.get(f"{table}.{key.partition('.')[0]}")]
    return Any if any(info and get_origin(info.annotation) is dict for info in parents) else None


def unknown_key(dotted: str) -> str:
    """What to say about a dotted key that does not exist."""
    same_name = [key for key in keys() if key.rpartition(".")[2] == dotted.rpartition(".")[2]]
    close = same_name or difflib.get_close_matches(dotted, keys(), n=1)
    return "unknown key; " + (f"did you mean {' or '.join(close)}?" if close else "remove it")


def _one_line(error: ValidationError) -> str:
    """The first problem, with its dotted key, and how many more there are."""
    problems = error.errors(include_url=False)
    first = problems[0]
    dotted = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        text = f"{dotted}: {unknown_key(dotted)}"
    elif first["type"] == "model_type":
        text = f"{dotted}: found {first['input']!r}, expected a table [{dotted}]"
    elif first["type"] == "missing":
        what = f"pass --{dotted}" if "." in dotted else f"see megarl train --help for the keys of the table [{dotted}]"
        text = f"{dotted}: missing, but needed; add it to the file or {what}"
    elif first["type"] == "value_error":
        message = str(first["ctx"]["error"]) if "ctx" in first else first["msg"]
        text = f"{dotted}.{message}" if dotted else message
    else:
        text = f"{dotted}: found {first['input']!r}, expected: {first['msg'][0].lower()}{first['msg'][1:]}"
    more = len(problems) - 1
    text = " ".join(text.split())
    return text + (f" (and {more} more problem{'s' if more > 1 else ''})" if more else "")


def split_overrides(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Take ``--table.key value``, ``--table.key=value`` and ``--table.flag`` (= true) out of the command line.

    Returns the other words and dotted key -> value of the key's type. Raises ConfigError for a key that does not exist
    or a value of the wrong type.
    """
    rest: list[str] = []
    overrides: dict[str, Any] = {}
    left = [*words]
    while left:
        word = left.pop(0)
        name, equals, text = word.partition("=")
        if not name.startswith("--") or "." not in name:
            rest.append(word)
            continue
        if not equals:
            text = left.pop(0) if left and not left[0].startswith("--") else "true"
        overrides[name[2:]] = _typed(name[2:], text)
    return rest, overrides


def _typed(key: str, text: str) -> Any:
    annotation = annotation_of(key)
    if annotation is None:
        raise ConfigError(f"--{key}: {unknown_key(key)}")
    origins = {get_origin(option) for option in (annotation, *get_args(annotation))}
    if annotation is Any or origins & {list, dict}:
        with suppress(ValueError, RecursionError):  # a string need not have quotation marks
            return tomllib.loads(f"value = {text}")["value"]
        return text
    if text == "none" and NoneType in get_args(annotation):
        return None
    try:
        return TypeAdapter(annotation).validate_python(text)
    except ValidationError as error:
        raise ConfigError(f"--{key}: found {text!r}, {error.errors()[0]['msg'].lower()}") from error


def as_flag(value: Any) -> str:
    """A value as ``split_overrides`` reads it."""
    if value is None:
        return "none"
    return as_toml(value) if isinstance(value, (bool, list, Mapping)) else str(value)


def as_toml(value: Any) -> str:
    """A value of TOML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {as_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(as_toml, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (bool, str)) else str(value)
