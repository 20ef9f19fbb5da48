"""Read a configuration from a TOML file and flags; flags win, and any mistake is one line."""

import json
import os
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from megarl.config import Config
from megarl.config.tables.base import Table
from megarl.config.trust import require_trust
from megarl.errors import ConfigError, DataError, did_you_mean, one_of, reason_of, refusal, reworded
from megarl.files.foreign_json import require_regular

SAVED = "config.toml"
"""The resolved configuration in a run folder."""
RUN_ID = "run_id"
"""File beside config.toml with the name that the run gave itself."""
_PLACES = ("model.path", "model.reference", "data.train", "data.heldout")
_MAX_BYTES = 1 << 18
_MOST_PROBLEMS = 8
_KINDS = {"a valid integer": "a whole number", "a valid number": "a number", "a valid boolean": "true or false"}
_KINDS |= {"a valid string": "text", "a valid list": "a list", "a valid dictionary": "a table"}
"""Pydantic's words, and plain ones."""


def load(path: str | Path, overrides: Mapping[str, Any] | None = None, *, trust: bool = False) -> Config:
    """Read a TOML file; overrides (dotted key -> value) win. ConfigError, one line, for any mistake.

    The folder of the file becomes the first entry of ``sys.path``, because the file may name modules there.
    ``require_trust`` excludes folders that other users can write, unless the user passes ``trust``. With ``trust``,
    code in the model's folder is trusted too, unless the file says otherwise.
    """
    table = read_toml(Path(path))
    try:
        folder = str(Path(path).absolute().parent)
        if Path(path).name == SAVED and (Path(folder) / RUN_ID).is_file():
            _require_place(table, Path(folder), overrides or {})
        if (trust or require_trust(Path(path), table, overrides or {})) and folder not in sys.path:
            sys.path.insert(0, folder)
        if trust and isinstance(model := table.get("model"), dict):
            model.setdefault("trust_remote_code", True)
        config = parse(table, overrides, source=str(path))
        _require_working_folder(config, path, folder)
        return config
    except RecursionError:
        raise ConfigError(f"{path}: not a configuration file: its tables are nested too deeply") from None


def _require_place(table: Mapping[str, Any], folder: Path, overrides: Mapping[str, Any]) -> None:
    """ConfigError for the saved configuration of a run that was moved or copied, unless run.dir is given."""
    inner = table.get("run")
    old_dir = inner.get("dir") if isinstance(inner, Mapping) else None
    if isinstance(old_dir, str) and "run.dir" not in overrides and Path(old_dir).resolve() != folder.resolve():
        raise ConfigError(refusal("moved_run", file=folder / SAVED, old_dir=old_dir, folder=folder))


def _require_working_folder(config: Config, path: str | Path, folder: str) -> None:
    """ConfigError for an input that only the file's folder has: paths are relative to the working folder."""
    inputs: dict[str, str | None] = {key: attrgetter(key)(config) for key in _PLACES}
    inputs |= {"sft.data": config.sft.data} if config.sft else {}
    for key, value in (inputs | {f"eval.sets.{name}": source for name, source in config.eval.sets.items()}).items():
        if value and not os.path.exists(value) and os.path.exists(beside := os.path.join(folder, value)):
            raise ConfigError(refusal("other_folder", path=path, key=key, value=value, here=os.getcwd(), beside=beside))


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def find_saved(path: Path, otherwise: str) -> tuple[Path, dict[str, str]]:
    """Return the saved configuration of the run with this folder, folder of checkpoints or step folder, and overrides:
    where run, model and data are now.

    Relative paths count from the folder in which the run was started, which a relative run.dir tells. ConfigError,
    which ends with ``otherwise``, without a run.
    """
    files = (place / SAVED for place in (path.resolve(), *path.resolve().parents[:2]) if (place / RUN_ID).is_file())
    if (saved := next(filter(Path.is_file, files), None)) is None:
        absent = " (no such folder)" * (not path.exists())
        raise ConfigError(f"{path}{absent} has no {SAVED} of a run in it or above it: {otherwise}")
    texts = {key: Path(value) for key, value in flatten(read_toml(saved)).items() if isinstance(value, str)}
    folder, old = saved.parent, texts.get("run.dir", saved)
    start = Path() if old.is_absolute() else next((each for each in folder.parents if each / old == folder), Path())
    places = {key: (start / texts.get(key, "")).absolute() for key in _PLACES if key in texts or key == "model.path"}
    # Data may also be the name of a data set.
    found = {key: str(place) for key, place in places.items() if key == "model.path" or place.exists()}
    return saved, {"run.dir": str(folder), **found}


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file, unchecked. ConfigError, one line, for any content that is no TOML."""
    try:
        require_regular(path)
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise DataError(f"{path}: found {size} bytes, expected a configuration of at most {_MAX_BYTES}")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a configuration file: {reason_of(error)}") from error
    except DataError as error:
        raise ConfigError(str(error)) from error
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
    _check_values(merged, source)
    with reworded(ValidationError, ConfigError, f"{source}: ", tell=lambda error: _one_line(error, merged)):
        config = Config.model_validate(merged)
    if config.run.dir is None:  # resolved, so that the saved file has the run's place
        config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(config.run_dir)})})
    return config


def _check_values(value: Any, source: str, dotted: str = "") -> None:
    """ConfigError for values that no setting can have: an integer beyond 64 bits, which TOML excludes, or a NUL in
    text."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_values(inner, source, f"{dotted}.{key}" if dotted else str(key))
    elif isinstance(value, list):
        for inner in value:
            _check_values(inner, source, dotted)
    elif isinstance(value, int) and abs(value) >= 1 << 63:
        raise ConfigError(refusal("large_integer", source=source, dotted=dotted, bits=value.bit_length()))
    elif isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{source}: {dotted}: found {value!r}, expected text without NUL characters; remove them")


def keys() -> dict[str, FieldInfo]:
    """Every dotted key with pydantic's description of it, in file order; "megatron.*" stands for the free table."""
    infos: dict[str, FieldInfo] = {}
    for name, info in Config.model_fields.items():
        table = table_of(info)
        infos |= {f"{name}.{key}": inner for key, inner in table.model_fields.items()} if table else {f"{name}.*": info}
    return infos


def table_of(info: FieldInfo) -> type[Table] | None:
    """The table that a key of ``Config`` holds; None for a free table. "SftConfig | None" holds a table too."""
    options = (info.annotation, *get_args(info.annotation))
    return next((option for option in options if isinstance(option, type) and issubclass(option, Table)), None)


def annotation_of(dotted: str) -> Any:
    """Type of a dotted key such as "rollout.temperature"; Any below a free table; None for an unknown key."""
    infos = keys()
    if dotted in infos:
        return infos[dotted].annotation
    table, key = dotted.split(".")[:2]
    parent = infos.get(f"{table}.*") or infos.get(f"{table}.{key}")
    return Any if parent and get_origin(parent.annotation) is dict else None


def unknown_key(dotted: str) -> str:
    """Return the message for an unknown dotted key."""
    same_name = [key for key in keys() if key.rpartition(".")[2] == dotted.rpartition(".")[2]]
    known = keys() if "." in dotted else Config.model_fields
    hint = f"did you mean {' or '.join(same_name)}?" if same_name else did_you_mean(dotted, known, "remove it")
    return f"unknown key; {hint}"


def _one_line(error: ValidationError, table: Mapping[str, Any]) -> str:
    """All problems, unknown keys first, because unknown keys often explain missing keys."""
    problems: dict[str, str] = {}
    missing: list[str] = []
    for problem in sorted(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden"):
        dotted, kind = _place(problem, table), problem["type"]
        if kind == "extra_forbidden":
            problems[dotted] = f"{dotted}: {unknown_key(dotted)}"
        elif kind == "missing":
            missing.append(dotted)
        elif dotted in problems:  # a further type that the key may have
            problems[dotted] += f", or {expectation(problem).removeprefix('expected ')}"
        else:
            problems[dotted] = _describe_problem(problem, dotted)
    if missing:
        problems["missing"] = f"{', '.join(missing)}: missing, but needed; add to the file, or pass as flags"
    texts = [" ".join(text.split()) for text in problems.values()]
    if len(texts) == 1:
        return texts[0]
    shown = " ".join(f"({number}) {text}" for number, text in enumerate(texts[:_MOST_PROBLEMS], 1))
    return f"{len(texts)} problems: {shown}"


def _place(problem: Any, table: Mapping[str, Any]) -> str:
    """The dotted key, without pydantic's name for a type of the key."""
    loc = [str(name) for name in problem["loc"]]
    value: Any = table
    for depth, name in enumerate(loc):
        value = value.get(name) if isinstance(value, Mapping) else None
        if depth == 1 and value is not None and value is problem["input"]:
            return ".".join(loc[:2])
    return ".".join(loc)


def _describe_problem(problem: Any, dotted: str) -> str:
    if problem["type"] == "model_type":
        return f"{dotted}: found {problem['input']!r}, expected a table [{dotted}]"
    if problem["type"] == "value_error":
        message = str(problem["ctx"]["error"]) if "ctx" in problem else problem["msg"]
        return f"{dotted}.{message}" if dotted else message
    return f"{dotted}: found {problem['input']!r}, {expectation(problem)}"


def expectation(problem: Any) -> str:
    """Return what pydantic expected in the place of a wrong value."""
    if problem["type"] == "literal_error":
        names = re.split(", | or ", problem["ctx"]["expected"])  # as pydantic joins them
        return one_of(str(problem["input"]), [name.strip("'") for name in names])
    text = problem["msg"].removeprefix("Input should be ").partition(", unable to")[0]
    text = re.sub("^(greater|less) than", r"a number \g<0>", text)
    return f"expected {_KINDS.get(text, text[0].lower() + text[1:])}"


def split_overrides(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Take ``--table.key value``, ``--table.key=value`` and ``--table.flag`` (= true) out of the command line.

    Returns the remaining words, and dotted key -> value of the key's type. ConfigError for an unknown key or a value of
    the wrong type.
    """
    arguments: list[str] = []
    overrides: dict[str, Any] = {}
    queue = [*words]
    while queue:
        word = queue.pop(0)
        name, equals, text = word.partition("=")
        if not name.startswith("--") or "." not in name:
            arguments.append(word)
            continue
        has_value = equals or (queue and not queue[0].startswith("--"))
        overrides[name[2:]] = _typed(name[2:], text if equals else queue.pop(0) if has_value else None)
    return arguments, overrides


def _typed(key: str, text: str | None) -> Any:
    """The value of a flag; without a text, true."""
    annotation = annotation_of(key)
    if annotation is None:
        raise ConfigError(f"--{key}: {unknown_key(key)}")
    text = "true" if text is None and (annotation is Any or bool in (annotation, *get_args(annotation))) else text
    kinds = {annotation, *(get_origin(option) for option in (annotation, *get_args(annotation)))}
    if text is not None and kinds & {Any, list, dict}:
        with suppress(ValueError, RecursionError):  # a string need not have quotation marks
            return tomllib.loads(f"value = {text}")["value"]
        return text
    if text == "none" and NoneType in get_args(annotation):
        return None
    prefix = f"--{key}: found {'no value' if text is None else repr(text)}, expected "
    with reworded(ValidationError, ConfigError, prefix, tell=_list_kinds):
        return TypeAdapter(annotation).validate_python(Ellipsis if text is None else text)  # no setting is an ellipsis


def _list_kinds(error: ValidationError) -> str:
    problems = [problem for problem in error.errors() if problem["type"] != "none_required"]
    return ", or ".join(dict.fromkeys(expectation(problem).removeprefix("expected ") for problem in problems))


def as_flag(value: Any) -> str:
    """A value as ``split_overrides`` reads it."""
    return "none" if value is None else as_toml(value) if isinstance(value, (bool, list, Mapping)) else str(value)


def as_toml(value: Any) -> str:
    """A value of TOML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {as_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(as_toml, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (bool, str)) else str(value)
