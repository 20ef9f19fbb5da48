"""Settings that Megatron cannot serve, as one line for the user.

Megatron checks settings where it needs them: when a config is made, when a module is built, or in the first pass. It
says so with assertions, some without a word, and with errors of every kind.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import megatron.core
import torch

import megarl
from megarl.errors import ConfigError, MegarlError

_MEGATRON = Path(megatron.core.__file__).parent
_MEGARL = Path(megarl.__file__).parent
_DISTRIBUTED = Path(torch.distributed.__file__).parent
_OF_SETTINGS = (AssertionError, ValueError, TypeError, NotImplementedError, ImportError)
"""What Megatron raises on purpose."""


@contextmanager
def as_config_error(doing: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """Turn an error that Megatron raises inside into a ConfigError: what it said, where, and what the user has set.

    doing: completes "Megatron cannot"; settings: the [megatron] table. Errors that answer no setting pass through:
    those that arise in megarl, of memory and of communication, and, if the table is empty, all but assertions and
    their like.
    """
    try:
        yield
    except Exception as error:  # of any class: an unknown optimizer, for one, is a plain Exception
        frames = traceback.extract_tb(error.__traceback__)
        place = next((frame for frame in reversed(frames) if _within(frame, _MEGATRON, _MEGARL)), frames[-1])
        elsewhere = (
            isinstance(error, (MegarlError, torch.OutOfMemoryError))
            or not _within(place, _MEGATRON)
            or any(_within(frame, _DISTRIBUTED) for frame in frames)
        )
        if elsewhere or not (settings or isinstance(error, _OF_SETTINGS)):
            raise
        table = f"; [megatron] sets {', '.join(settings)}" if settings else ""
        raise ConfigError(f"Megatron cannot {doing}: {_told(error, place)}{table}") from error


def _told(error: Exception, place: traceback.FrameSummary) -> str:
    """What was said and where; where nothing was said that a user could read, the line of code that says it."""
    where = f"{Path(place.filename).relative_to(_MEGATRON)}:{place.lineno}"
    if str(error) and isinstance(error, (AssertionError, ValueError, NotImplementedError, ImportError)):
        return f"{error} ({where})"
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{said} ({where}: {place.line})"


def _within(frame: traceback.FrameSummary, *folders: Path) -> bool:
    return any(folder in Path(frame.filename).parents for folder in folders)
