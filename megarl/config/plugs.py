"""The user's own objects, named as "package.module:name", and the sampling engines.

The configuration is checked against the capabilities of the engine. A user's engine is an ``EngineKind``:
``rollout.engine = "package.module:name"``.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megarl.errors import ConfigError, describe, one_of, refusal, reworded
from megarl.files.texts import read_table


def load_plug(key: str, path: str, built_in: Iterable[str] = ()) -> Any:
    """Return the object named by "package.module:name". ConfigError, with ``key``, if the import fails.

    built_in: the built-in values of the setting, for the message.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"{key}: found {path!r}, {one_of(path, [*built_in, 'package.module:name'])}")
    problem, advice = f"{key}: found {path!r}, but cannot import {module_name!r} (", refusal("no_module")
    with reworded((Exception, SystemExit), ConfigError, problem, advice, describe):  # as users' code may
        module = importlib.import_module(module_name)
    try:
        return getattr(module, name)
    except Exception:  # a module may have a __getattr__ of its own
        origin = getattr(module, "__file__", None) or module_name
        raise ConfigError(f"{key}: found {path!r}, but {origin} has nothing named {name!r}") from None


def check_function(key: str, path: str, function: Any, parameters: str, other: str = "") -> Callable[..., Any]:
    """Return a loaded function that can be called with ``parameters``, "a, b" or "*, a, b". ConfigError for any object
    that cannot; ``other`` names alternatives for the message."""
    if not callable(function):
        expected = f"expected {other}a function ({parameters})"
        raise ConfigError(f"{key}: found {type(function).__name__} at {path!r}, {expected}")
    names = parameters.removeprefix("*, ").split(", ")
    words, keywords = ((), dict.fromkeys(names)) if parameters.startswith("*") else (names, {})
    try:
        inspect.signature(function).bind(*words, **keywords)  # a wrong signature would fail on every call
    except ValueError:  # some built-ins have no signature
        pass
    except TypeError as error:
        misfit = f"{inspect.signature(function)} ({error}), expected ({parameters})"
        raise ConfigError(f"{key}: the function {path!r} has the parameters {misfit}") from None
    return function


@dataclass(frozen=True, slots=True)
class EngineKind:
    """A kind of sampling engine. Settings that need a missing capability are an error."""

    factory: str | Callable[..., Any]
    """Makes the engine: ``factory(config, tell)`` returns a ``megarl.engines.protocol.Engine``. All ranks call it
    together. A string "package.module:name" is imported when the run starts."""
    routes: bool = False
    """Returns the experts of every token; train.replay = "r3" needs them."""
    gates: bool = False
    """Returns the gate weights of experts if ``SamplingParams.return_gate_weights`` is set: train.replay_gates."""
    indexer: bool = False
    """Returns the keys that sparse attention selects if ``SamplingParams.return_indexer_topk`` is set:
    train.replay_indexer."""
    fp8: bool = False
    """Can round its weights through FP8: rollout.fp8_rounding."""
    fp8_arithmetic: bool = False
    """Can round activations and cache too: rollout.fp8_activations, rollout.fp8_kv_cache."""
    nucleus: bool = False
    """Returns log-probabilities of the sampled nucleus; needed by rollout.top_p below 1."""
    kept_sets: bool = False
    """Returns the ids of each token's nucleus if ``SamplingParams.max_kept_ids`` is set; needed by
    rollout.keep_sampling_mask with top_p below 1."""
    server: bool = False
    """Samples in servers, which can work while the trainer trains. The [sglang] table describes the servers."""
    pauses: bool = False
    """Its sessions can ``pause``, and its requests go on with a part of a response; rollout.max_staleness needs it."""


_ENGINES = read_table(__file__, "engines.toml")
ENGINES: Mapping[str, EngineKind] = MappingProxyType({name: EngineKind(**table) for name, table in _ENGINES.items()})
"""The engines that megarl brings."""


def engine_kind(name: str) -> EngineKind:
    """Return the engine of a name in ENGINES, or of "package.module:name". ConfigError for an unknown engine."""
    if name in ENGINES:
        return ENGINES[name]
    kind = load_plug("engine", name, ENGINES)
    if not isinstance(kind, EngineKind):
        raise ConfigError(f"engine: found {type(kind).__name__} at {name!r}, expected a megarl.config.plugs.EngineKind")
    return kind
