"""What a user may write in a module of their own: an engine and objectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megarl.config import Config
from megarl.config.engines import EngineKind
from megarl.core.types import Rollout, SampleRequest
from megarl.rollout.engine import SamplingParams
from megarl.rollout.local.engine import LocalEngine
from megarl.train.engines import make_local_engine


class CountingEngine:
    """The local engine, with a count of its responses."""

    def __init__(self, engine: LocalEngine, tell: Callable[[str], None]) -> None:
        self._engine, self._tell, self.responses = engine, tell, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, requests: Sequence[SampleRequest], params: SamplingParams, *rest: Any) -> list[Rollout]:
        self.responses += len(requests)
        self._tell(f"own engine: {self.responses} responses")
        return self._engine.generate(requests, params, *rest)

    def converse(self, *words: Any) -> None:
        self._tell("own engine: a session")
        self._engine.converse(*words)


def make_counting_engine(config: Config, tell: Callable[[str], None]) -> CountingEngine:
    return CountingEngine(make_local_engine(config, tell), tell)


counting = EngineKind(make_counting_engine, routes=True, resumable=True)
"""By a function, and without FP8 rounding."""
named = EngineKind("own_parts:make_counting_engine", routes=True)
without_routes = EngineKind(make_counting_engine)
not_an_engine = 1
