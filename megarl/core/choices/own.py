"""Calls of functions of the user, with errors that name the function. Imports no torch."""

from collections.abc import Callable
from typing import Any

from megarl.errors import ConfigError, MegarlError, describe_call


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
