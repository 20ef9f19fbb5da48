"""The releases of Megatron-Core that the trainer runs on, and Megatron's errors about settings."""

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import megatron.core
import torch
from megatron.core.models.gpt import GPTModel

import megarl
from megarl.errors import ConfigError, MegarlError, refuse_if
from megarl.replay.megatron_state import RELEASE


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether the function has a parameter of this name."""
    return name in inspect.signature(function).parameters


def require_release() -> None:
    """ConfigError where Megatron-Core is older than 0.16: only replay in a loop of one's own works with its patch."""
    refuse_if(not takes(GPTModel.forward, "padding_mask"), ConfigError, "old_megatron", release=RELEASE)


_MEGATRON = Path(megatron.core.__file__).parent
_MEGARL = Path(megarl.__file__).parent
_DISTRIBUTED = Path(torch.distributed.__file__).parent
_DELIBERATE = (AssertionError, ValueError, NotImplementedError, ImportError, TypeError)
"""What Megatron raises on purpose."""


@contextmanager
def as_config_error(doing: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """Turn an error that Megatron raises inside into a ConfigError: with message, place, and the user's settings.

    doing: completes "Megatron cannot"; settings: the [megatron] table. Other errors pass through: those raised in
    megarl, of memory and of communication. If the table is empty, only the types of _DELIBERATE are turned.
    """
    try:
        yield
    except Exception as error:  # any class: for an unknown optimizer, Megatron raises a plain Exception
        frames = traceback.extract_tb(error.__traceback__)
        place = next((frame for frame in reversed(frames) if _within(frame, _MEGATRON, _MEGARL)), frames[-1])
        is_other = not _within(place, _MEGATRON) or any(_within(frame, _DISTRIBUTED) for frame in frames)
        is_other |= isinstance(error, (MegarlError, torch.OutOfMemoryError))
        if is_other or not (settings or isinstance(error, _DELIBERATE)):
            raise
        table = f"; [megatron] sets {', '.join(settings)}" if settings else ""
        location = f"{Path(place.filename).relative_to(_MEGATRON)}:{place.lineno}: {place.line}"
        raise ConfigError(f"Megatron cannot {doing}: {type(error).__name__}: {error} ({location}){table}") from error


def _within(frame: traceback.FrameSummary, *folders: Path) -> bool:
    return any(folder in Path(frame.filename).parents for folder in folders)
