"""Records with fields from a configuration file: valid values and replacement of a field.

Also calls of functions of the user, with errors that name the function.

Imports no torch.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megarl.errors import ConfigError, MegarlError, describe_call

Load = Callable[[str, str], Any]
"""(the part, "package.module:name") -> the user's object of that name."""
OFF = "off"
"""None in a configuration file, and the removal of a tuple element."""
_LARGEST: dict[type, float] = {int: 2**31, float: 1e30}
"""Bounds of numbers: products of counts fit into int64, factors into fp32."""
_WORDS: dict[Any, str] = {float: "a finite number", NoneType: 'None ("off")'}


@cache
def options_of(kind: type) -> Mapping[str, tuple[Any, ...]]:
    """Return field -> valid options (types, strings of a Literal, ``tuple[...]``), in the order of the record."""
    return {name: tuple(_flatten(hint)) for name, hint in get_type_hints(kind).items()}


def check_types(record: Any, label: str) -> None:
    """Raise ConfigError if a value of the record does not fit the type of the field; ``label`` starts the message."""
    for name, options in options_of(type(record)).items():
        value = getattr(record, name)
        if not _fits(value, options):
            raise ConfigError(f"{label}: {name} is {value!r}, expected {describe_options(options)}")


def describe_options(options: tuple[Any, ...]) -> str:
    """Return the options of a field in words."""
    words = ["a list" if get_origin(option) is tuple else _WORDS.get(option) for option in options]
    return " or ".join(
        word or (repr(option) if isinstance(option, str) else option.__name__)
        for word, option in zip(words, options, strict=True)
    )


def make(
    kind: Any, changes: Mapping[str, Any], old: Any = None, load: Load = lambda _, path: path, prefix: str = ""
) -> Any:
    """Return a record of type ``kind`` with fields in the notation of ``[train.objective_overrides]``; other fields are
    from ``old``, or defaults.

    - A value replaces a field; "off" means None.
    - Field of type record: a table replaces fields of the record.
    - Field of type list of records: a list of tables replaces the whole list; a table with the keys "0", "1", ...
      changes single records, or adds a record after the last.
    - Text with a colon: a function of the user, loaded by ``load``.

    ConfigError, with the key below ``prefix``, for an unknown key, a value that does not fit, or a missing field.
    """
    options, values = options_of(kind), {}
    for key, value in changes.items():
        if key not in options:
            close = difflib.get_close_matches(key, options, n=1) or list(options)
            raise ConfigError(f"{prefix}{key}: unknown part; did you mean {' or '.join(close)}?")
        values[key] = _replacement(getattr(old, key, None), options[key], value, load, f"{prefix}{key}")
    if old is not None:
        return replace(old, **values)
    for field in fields(kind):
        if field.default is MISSING and field.name not in values:
            raise ConfigError(f"{prefix}{field.name}: missing, expected {describe_options(options[field.name])}")
    return kind(**values)


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
        field = next(word for word in reversed(place.split(".")) if not word.isdecimal())
        return load(field.removesuffix("s"), value)
    return value


def _replaced_list(old: tuple[Any, ...], element: tuple[Any, ...], value: Any, load: Load, place: str) -> Any:
    if value == OFF:
        return ()
    if isinstance(value, Mapping):
        elements = list(old)
        for key, change in value.items():
            last = len(elements) - (change == OFF)
            if not (str(key).isdecimal() and int(key) <= last):
                raise ConfigError(f"{place}.{key}: expected a number from 0 to {last}, of {len(elements)} there")
            index = int(key)
            if index == len(elements):
                elements.append(None)
            elements[index] = _replacement(elements[index], element, change, load, f"{place}.{key}")
        return tuple(record for record in elements if record is not None)
    if isinstance(value, list | tuple):
        return tuple(_replacement(None, element, table, load, f"{place}.{n}") for n, table in enumerate(value))
    return value  # check_types names the expected type


def _flatten(hint: Any) -> list[Any]:
    """The members of a union, with the strings of a Literal."""
    if get_origin(hint) in (Union, UnionType):
        return [option for member in get_args(hint) for option in _flatten(member)]
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [Callable if hint is Callable or get_origin(hint) is Callable else hint]


def _fits(value: object, options: tuple[Any, ...]) -> bool:
    """A whole number fits a float; true and false do not."""
    for option in options:
        if get_origin(option) is tuple and isinstance(value, tuple):
            inner, *_ = get_args(option)
            if all(_fits(entry, tuple(_flatten(inner))) for entry in value):
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


def name_of(function: Callable[..., Any]) -> str:
    """Return "module:name" of a function, of the class for a callable object."""
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"


def call_own(label: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return ``function(*arguments, **options)``; ConfigError with label, function and line if the function raises."""
    try:
        return function(*arguments, **options)
    except MegarlError:
        raise
    except (Exception, SystemExit) as error:  # code of the user may raise anything
        raise ConfigError(f"{label}: the function {name_of(function)} raised {describe_call(error)}") from error
