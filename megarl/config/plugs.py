"""The user's own parts: a setting may name an object as "package.module:name"."""

from __future__ import annotations

import importlib
from typing import Any

from megarl.errors import ConfigError


def load_plug(key: str, path: str, built_in: str = "a built-in name") -> Any:
    """The object that "package.module:name" names. ConfigError, with ``key``, if it cannot be imported.

    built_in: the other values of the setting, for the message.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"{key}: found {path!r}, expected {built_in}, or package.module:name")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code, which may raise anything
        told = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(
            f"{key}: found {path!r}, but cannot import {module_name!r} ({told}); put the module beside the "
            "configuration file, or its folder on PYTHONPATH"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        where = getattr(module, "__file__", None) or module_name
        raise ConfigError(f"{key}: found {path!r}, but {where} has nothing named {name!r}") from None
