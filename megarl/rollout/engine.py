"""The one protocol of every sampling engine, and the settings of a sampling request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megarl.core.types import Rollout, SampleRequest
from megarl.errors import ConfigError, RolloutError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How responses are sampled; the same for all requests of a call. Raises ConfigError for a bad value."""

    temperature: float = 1.0
    """Divides the logits. 0 picks the most likely token: for evaluation only, see ``require_stochastic``."""
    top_p: float = 1.0
    """In (0, 1]: samples from the smallest set of most likely tokens that holds this mass, renormalised."""
    max_response_tokens: int = 1024
    """At least 1. A response also ends where the positions of the model end."""
    stop_token_ids: tuple[int, ...] = ()
    """A response ends with the first of these; it stays in the response as its last token."""
    return_routed_experts: bool = True
    """Whether rollouts carry the experts of every prompt and response token."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise ConfigError(f"temperature is {self.temperature}, expected a finite number >= 0")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p is {self.top_p}, expected a number in (0, 1]; 1 switches it off")
        if self.max_response_tokens < 1:
            raise ConfigError(f"max_response_tokens is {self.max_response_tokens}, expected at least 1")
        if any(token < 0 for token in self.stop_token_ids):
            raise ConfigError(f"stop_token_ids are {self.stop_token_ids}, expected token ids >= 0")

    def require_stochastic(self) -> None:
        """Raises ConfigError at temperature 0, where the sampling policy is a point mass.

        All its log-probabilities are then 0 and say nothing about the model, so that every ratio between training and
        sampling policy would be wrong. Call it for rollouts that a policy gradient is taken on.
        """
        if self.temperature == 0.0:
            raise ConfigError(
                "temperature is 0 (greedy) for rollouts that train: their log-probabilities are those of a point mass, "
                "set a temperature > 0 and keep 0 for evaluation"
            )


class Session(Protocol):
    """An engine that samples what its episodes ask for, as they ask.

    An episode is a coroutine that awaits ``sample`` as often as it needs, and whatever else between (an environment, a
    reward). None waits for another one, unless the engine can only compute in batches.
    """

    def start(self, episode: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs an episode. The session lasts until all have ended; the first that raises ends it. One that is
        cancelled is not missed: what it asked for is dropped."""
        ...

    async def sample(self, request: SampleRequest) -> Rollout:
        """Samples one response."""
        ...


class Engine(Protocol):
    """Samples responses, and takes new weights from the trainer."""

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next token is sampled with."""
        ...

    @property
    def sync_seconds(self) -> Mapping[str, float]:
        """Seconds that this rank has spent on the parts of the last weight update, where it has parts."""
        ...

    def generate(
        self,
        requests: Sequence[SampleRequest],
        params: SamplingParams,
        on_finish: Callable[[int], None] | None = None,
    ) -> list[Rollout]:
        """Samples one response for each request and returns them in the order of the requests.

        ``on_finish(n)`` is called whenever ``n`` more responses are complete, and may be called with 0 in between; what
        it raises ends the sampling. Raises RolloutError for a request that cannot be served or an answer that cannot be
        true, WeightSyncError while the weights are incomplete.
        """
        ...

    def converse(
        self,
        begin: Callable[[Session], None],
        params: SamplingParams,
        on_finish: Callable[[int], None] | None = None,
    ) -> None:
        """Runs the episodes that ``begin`` starts, and those that they start, in an event loop of its own.

        ``on_finish`` and errors as in ``generate``; an error of an episode is raised too.
        """
        ...

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replaces all weights; ``tensors`` are (name, tensor) as in a Hugging Face checkpoint, each exactly once.

        There is one tensor per expert, and no tensor that the checkpoint ties to another one. A missing, unknown,
        repeated or mis-shaped name raises WeightSyncError; the engine then refuses to generate until a whole update
        has arrived.
        """
        ...

    def rest(self) -> None:
        """Gives memory back until the next ``update_weights``, where the engine can; a collective call of the ranks
        that share it."""
        ...

    def close(self) -> None:
        """Frees what the engine holds. It cannot be used afterwards; closing twice does nothing."""
        ...


def response_limit(request: SampleRequest, params: SamplingParams) -> int:
    """Longest response to a request, in tokens; RolloutError if it may have none."""
    own = request.max_response_tokens
    if own is not None and own < 1:
        raise RolloutError(
            f"group {request.group} sample {request.sample}: max_response_tokens is {own}, expected at least 1"
        )
    return params.max_response_tokens if own is None else min(own, params.max_response_tokens)


def one_each(converse: Callable[[Callable[[Session], None]], None], requests: Sequence[SampleRequest]) -> list[Rollout]:
    """``Engine.generate`` by a session: an episode for each request."""
    found: dict[int, Rollout] = {}

    async def one(session: Session, position: int) -> None:
        found[position] = await session.sample(requests[position])

    def begin(session: Session) -> None:
        for position in range(len(requests)):
            session.start(one(session, position))

    converse(begin)
    return [found[position] for position in range(len(requests))]
