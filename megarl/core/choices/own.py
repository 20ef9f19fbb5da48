"""Functions of the user, called so that an error names them. Imports no torch."""

from collections.abc import Callable
from typing import Any

from megarl.errors import ConfigError, MegarlError, describe_call


def name_of(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"


def call_own(part: str, function: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Return ``function(*given, **options)``; ConfigError with the part, the function and its line if it raises."""
    try:
        return function(*given, **options)
    except MegarlError:
        raise
    except (Exception, SystemExit) as error:  # the user's code, which may raise anything
        raise ConfigError(f"{part}: the function {name_of(function)} raised {describe_call(error)}") from error
