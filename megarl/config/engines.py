"""Sampling engines by name, with what each can do. The configuration is checked against these records.

A user's engine is an ``EngineKind`` in a module of the user's: ``rollout.engine = "package.module:name"``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from megarl.config.plugs import load_plug
from megarl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EngineKind:
    """A kind of sampling engine. A capability that is False makes settings that need it an error."""

    factory: str | Callable[..., Any]
    """Makes the engine: ``factory(config, tell)`` returns a ``megarl.rollout.engine.Engine``. All ranks call it
    together. A string "package.module:name" is imported when the run starts."""
    routes: bool = False
    """Returns the experts of every token; train.replay = "r3" needs them."""
    fp8: bool = False
    """Can round its weights through FP8: rollout.fp8_rounding."""
    nucleus: bool = False
    """Returns log-probabilities of the nucleus that it samples from; rollout.top_p below 1 needs them."""
    server: bool = False
    """Samples in servers, which the [sglang] table describes and which can work while the trainer trains."""
    resumable: bool = False
    """A response follows from weights, prompt and seed alone, so that a resumed run repeats lost steps exactly."""

    @property
    def capabilities(self) -> tuple[str, ...]:
        """The names of what it can do."""
        return tuple(field.name for field in fields(self)[1:] if getattr(self, field.name))


ENGINES: Mapping[str, EngineKind] = MappingProxyType(
    {
        "local": EngineKind(
            "megarl.train.engines:make_local_engine", routes=True, fp8=True, nucleus=True, resumable=True
        ),
        "sglang": EngineKind("megarl.train.engines:make_sglang_engine", routes=True, fp8=True, server=True),
    }
)
"""The engines that megarl brings."""


def engine_kind(name: str) -> EngineKind:
    """The engine of a name in ENGINES, or of "package.module:name". ConfigError if there is none."""
    if name in ENGINES:
        return ENGINES[name]
    found = load_plug("engine", name, " or ".join(f'"{known}"' for known in ENGINES))
    if not isinstance(found, EngineKind):
        raise ConfigError(
            f"engine: found {type(found).__name__} at {name!r}, expected a megarl.config.engines.EngineKind"
        )
    return found
