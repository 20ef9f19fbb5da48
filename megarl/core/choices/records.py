"""Records whose fields may come from a configuration file: what a field may hold, and how one is replaced.

Imports no torch.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megarl.errors import ConfigError

Load = Callable[[str, str], Any]
"""(the part, "package.module:name") -> the user's object of that name."""
OFF = "off"
"""Stands for None in a configuration file, and for no element in a tuple."""
_LARGEST: dict[type, float] = {int: 2**31, float: 1e30}
"""What numbers are below: counts that a product with a batch's fits into int64, and factors that fit into fp32."""
_WORDS: dict[Any, str] = {
    Callable: "a function",
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a name",
    NoneType: 'None ("off")',
}


@cache
def options_of(kind: type) -> Mapping[str, tuple[Any, ...]]:
    """Return field -> what it may hold: types, the strings of a Literal, and ``tuple[...]``; in the record's order."""
    return {name: tuple(_flatten(hint)) for name, hint in get_type_hints(kind).items()}


def check_types(record: Any, who: str) -> None:
    """Raise ConfigError if a field holds what its type does not allow: a configuration file may hold anything."""
    for name, options in options_of(type(record)).items():
        value = getattr(record, name)
        if not _fits(value, options):
            raise ConfigError(f"{who}: {name} is {value!r}, expected {describe_options(options)}")


def describe_options(options: tuple[Any, ...]) -> str:
    """Return the options of a field in words."""
    named = [repr(option) for option in options if isinstance(option, str)]
    parts = [f"one of {', '.join(named)}"] if named else []
    for option in options:
        if get_origin(option) is tuple:
            inner = tuple(_flatten(get_args(option)[0]))
            parts.append(f"a list, each {describe_options(inner)}")
        elif not isinstance(option, str):
            parts.append(_WORDS.get(option) or f"a table of {option.__name__}")
    return " or ".join(parts)


def override(record: Any, changes: Mapping[str, Any], load: Load, where: str = "") -> Any:
    """Return the record with parts replaced, as ``[train.objective_overrides]`` writes them.

    A value replaces a field, and the string "off" stands for None. For a field that is a record, a table replaces
    fields of it. For a field that is a list of records, a list of tables replaces all of it, and a table with the keys
    "0", "1" and so on changes one of them, or adds one after the last. A text with a colon names the user's own
    function, which ``load`` finds. Raises ConfigError for a key or a table that does not fit.
    """
    return make(type(record), changes, record, load, where)


def make(
    kind: Any, changes: Mapping[str, Any], old: Any = None, load: Load = lambda _, path: path, where: str = ""
) -> Any:
    """Return a record with these parts, written as for ``override``; the others are those of ``old``, or defaults."""
    options, found = options_of(kind), {}
    for key, value in changes.items():
        if key not in options:
            close = difflib.get_close_matches(key, options, n=1) or list(options)
            raise ConfigError(f"{where}{key}: unknown part; did you mean {' or '.join(close)}?")
        found[key] = _replacement(getattr(old, key, None), options[key], value, load, f"{where}{key}")
    if old is not None:
        return replace(old, **found)
    for field in fields(kind):
        if field.default is MISSING and field.name not in found:
            raise ConfigError(f"{where}{field.name}: missing, expected {describe_options(options[field.name])}")
    return kind(**found)


def _replacement(old: Any, options: tuple[Any, ...], value: Any, load: Load, place: str) -> Any:
    listed = next((option for option in options if get_origin(option) is tuple), None)
    if listed is not None:
        return _replaced_list(old or (), tuple(_flatten(get_args(listed)[0])), value, load, place)
    kind: Any = next((option for option in options if is_dataclass(option)), None)
    if isinstance(value, Mapping) and kind is not None:
        return make(kind, value, old if isinstance(old, kind) else None, load, f"{place}.")
    if value == OFF:
        return None
    if isinstance(value, str) and ":" in value and Callable in options:
        part = next(word for word in reversed(place.split(".")) if not word.isdecimal())
        return load(part.removesuffix("s"), value)
    return value


def _replaced_list(old: tuple[Any, ...], element: tuple[Any, ...], value: Any, load: Load, place: str) -> Any:
    if value == OFF:
        return ()
    if isinstance(value, Mapping):
        elements = list(old)
        for key, change in value.items():
            most = len(elements) - (change == OFF)
            if not (str(key).isdecimal() and int(key) <= most):
                raise ConfigError(
                    f"{place}.{key}: expected a number from 0 to {most}, as there are {len(elements)}"
                    + ("" if change == OFF else f"; {most} adds one")
                )
            index = int(key)
            if index == len(elements):
                elements.append(None)
            elements[index] = _replacement(elements[index], element, change, load, f"{place}.{key}")
        return tuple(each for each in elements if each is not None)
    if isinstance(value, list | tuple):
        return tuple(_replacement(None, element, each, load, f"{place}.{n}") for n, each in enumerate(value))
    return value  # the check of types names what was expected


def _flatten(hint: Any) -> list[Any]:
    """The members of a union, with the strings of a Literal in its place."""
    if get_origin(hint) in (Union, UnionType):
        return [option for member in get_args(hint) for option in _flatten(member)]
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [Callable if hint is Callable or get_origin(hint) is Callable else hint]


def _fits(value: object, options: tuple[Any, ...]) -> bool:
    """A whole number is a number too; true and false are not."""
    for option in options:
        if get_origin(option) is tuple and isinstance(value, tuple):
            inner, *_ = get_args(option)
            if all(_fits(each, tuple(_flatten(inner))) for each in value):
                return True
        if isinstance(option, type) and is_dataclass(option) and isinstance(value, option):
            return True
    if isinstance(value, str):
        return value in options or str in options
    if callable(value):
        return Callable in options
    if value is None or isinstance(value, bool):
        return type(value) in options
    kind = int if isinstance(value, int) and float not in options else float
    return isinstance(value, int | float) and kind in options and abs(value) < _LARGEST[kind]
