"""What a user may write in a module of their own: engines and objectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from megarl.config import Config
from megarl.config.plugs import EngineKind
from megarl.core.metrics import Stat
from megarl.core.objectives import OBJECTIVES, Coefficients, Mask, TokenColumns
from megarl.core.types import Rollout, SampleRequest
from megarl.engines.local.engine import LocalEngine
from megarl.engines.protocol import SamplingParams
from megarl.engines.tools.protocol import Episode, ModelTurn, Observation
from megarl.trainer.engines import make_local_engine


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


class AnswerCountingEngine(CountingEngine):
    """Counts a wrong answer in each session; the trainer cannot clear counts that are read-only."""

    def __init__(self, engine: LocalEngine, tell: Callable[[str], None], are_readonly: bool) -> None:
        super().__init__(engine, tell)
        self._counts = Counter[str]()
        self.answer_counts = MappingProxyType(self._counts) if are_readonly else self._counts

    def converse(self, *words: Any) -> None:
        self._counts["wrong_answers"] += 1
        super().converse(*words)


def make_counting_engine(config: Config, tell: Callable[[str], None]) -> CountingEngine:
    return CountingEngine(make_local_engine(config, tell), tell)


counting = EngineKind(make_counting_engine, routes=True)
"""By a function, and without FP8 rounding."""
named = EngineKind("own_parts:make_counting_engine", routes=True)
without_sets = EngineKind(make_counting_engine, routes=True, nucleus=True)
without_routes = EngineKind(make_counting_engine)
counts_cleared = EngineKind(
    lambda config, tell: AnswerCountingEngine(make_local_engine(config, tell), tell, False), routes=True, server=True
)
counts_readonly = EngineKind(
    lambda config, tell: AnswerCountingEngine(make_local_engine(config, tell), tell, True), routes=True, server=True
)
serving = EngineKind(make_counting_engine, routes=True, server=True, pauses=True)
"""Works while the trainer trains, as servers do, in a thread."""
not_an_engine = 1


my_grpo = replace(OBJECTIVES["grpo"], masks=(Mask.ppo(high=1.28),))


def truncated(columns: TokenColumns) -> torch.Tensor:
    """The weight of minirl and its advantage, without its mask."""
    weight = (columns.logprobs - columns.rollout_logprobs).exp().clamp(max=5.0)
    return weight * columns.advantages


def minirl(columns: TokenColumns) -> Coefficients:
    """All of minirl, with a metric of its own."""
    ratio = (columns.logprobs - columns.old_logprobs).exp()
    outside = ((columns.advantages > 0) & (ratio > 1.27)) | ((columns.advantages < 0) & (ratio < 0.8))
    values = torch.where(outside, 0.0, truncated(columns))
    return Coefficients(values, {"own/outside": Stat.mean(outside, columns.loss_mask)})


def root(ratios: torch.Tensor) -> torch.Tensor:
    return ratios.pow(0.5)


def standardized(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The advantage "grpo"."""
    found = torch.zeros_like(rewards)
    for group in groups.unique():
        own = rewards[groups == group]
        found[groups == group] = (own - own.mean()) / (own.std() + 1e-6)
    return found


def not_finite_later(ratios: torch.Tensor) -> torch.Tensor:
    """Good on the tiny batch, which has 4 tokens."""
    return ratios.log() / 0 if len(ratios) > 4 else ratios


def two_arguments(columns: TokenColumns, more: int) -> torch.Tensor:
    return columns.advantages * more


def balanced(asked: int, positives: int, negatives: int) -> int:
    """As ada_seq_balance with 2 of each class, in rounds of 3."""
    return 0 if positives >= 2 and negatives >= 2 else 3


def fails_later(asked: int, positives: int, negatives: int) -> int:
    """What a rule is tried on before the run it survives."""
    return 1 // 0 if positives > negatives > 0 else balanced(asked, positives, negatives)


def fractional(asked: int, positives: int, negatives: int) -> float:
    return 1.5


def never(asked: int, positives: int, negatives: int) -> int:
    return 0


def negative(asked: int, positives: int, negatives: int) -> int:
    return -1 if negatives == 4 else 1


def raises(asked: int, positives: int, negatives: int) -> int:
    raise SystemExit(3)


class Sevens:
    def __init__(self, prompt: str) -> None:
        self._prompt = prompt

    async def step(self, turn: ModelTurn) -> Observation:
        if self._prompt[0] in "01234":
            raise OSError("the disk is gone")
        return Observation("=7", done=turn.index == 1)

    async def close(self) -> None:
        pass


class Environment:
    def begin(self, prompt: str, seed: int) -> Episode:
        return Sevens(prompt)


def make() -> Environment:
    return Environment()
