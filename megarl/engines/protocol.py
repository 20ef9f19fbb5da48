"""The protocol of every sampling engine, the base class of sessions, and the settings of a sampling request."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol, Self

import numpy as np
import torch

from megarl.core.types import Rollout, SampleRequest
from megarl.errors import RolloutError, refusal
from megarl.routes.turns import known_rows


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of all requests of a call; the configuration checks the values."""

    temperature: float = 1.0
    """Divides the logits. 0 picks the most likely token; only evaluation may."""
    top_p: float = 1.0
    """In (0, 1]: samples from the smallest set of most likely tokens with at least this mass, renormalised."""
    max_response_tokens: int = 1024
    """At least 1. A response also ends at the model's last position."""
    stop_token_ids: tuple[int, ...] = ()
    """A response ends at the first stop token, and includes the stop token."""
    return_routed_experts: bool = True
    """Whether rollouts carry the experts of every prompt and response token."""
    max_kept_ids: int | None = None
    """With top_p below 1: rollouts carry the ids of each token's nucleus, at most this number per response (a larger
    number is an error). None: rollouts carry no ids."""
    segment_tokens: int | None = None
    """After this number of tokens, an engine that decodes in batches answers its requests, unfinished responses with
    finish_reason "pause": new requests may take places in the next batch. None: a batch runs to its end."""
    return_gate_weights: bool = False
    """Whether rollouts with experts carry their gate weights too."""
    return_indexer_topk: bool = False
    """Whether rollouts with experts carry the keys that a sparse indexer selected, too."""

    @property
    def has_nucleus(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary."""
        return self.top_p < 1.0 and self.temperature > 0.0


class Session:
    """An episode's view of an engine: the episode awaits ``sample`` as often as needed.

    An episode is a coroutine; between two samples it may await an environment or a reward. Episodes do not wait for
    each other, unless the engine computes in batches.
    """

    def __init__(self) -> None:
        self.episodes: set[asyncio.Task[None]] = set()
        """Those that have not ended."""
        self._tasks = asyncio.TaskGroup()
        self.closing = AsyncExitStack()
        """Closes what episodes share, at the end of the session."""

    async def run_episodes(self, begin: Callable[[Self], None]) -> None:
        """Run the episodes that ``begin`` starts until all have ended."""
        async with self.closing, self._tasks:
            begin(self)

    def start(self, episode: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run an episode. The session lasts until all episodes have ended; the first error ends the session.

        A cancelled episode does not count as an error, and its request is dropped.
        """
        task = self._tasks.create_task(episode)
        self.episodes.add(task)
        task.add_done_callback(self._end_episode)
        return task

    async def sample(self, request: SampleRequest) -> Rollout:
        """Samples one response, or after ``pause`` a part."""
        raise NotImplementedError

    def pause(self) -> None:
        """Stop sampling; to be called once, in the event loop of the session.

        Waiting requests get their part of the response with finish_reason "pause"; later requests, the prompt alone.
        """
        raise NotImplementedError

    def _end_episode(self, task: asyncio.Task[None]) -> None:
        self.episodes.discard(task)
        self._after_episode()

    def _after_episode(self) -> None:
        raise NotImplementedError


def run_session(session: Coroutine[Any, Any, None]) -> None:
    """Run a session in an event loop of its own; of several errors the first is raised, the cause of the others."""
    try:
        asyncio.run(session)
    except ExceptionGroup as several:
        raise several.exceptions[0] from None


Begin = Callable[[Session], None]
"""Starts the first episodes of a session."""
OnFinish = Callable[[int], None] | None
"""Called with ``n`` whenever ``n`` more responses are complete, and perhaps with 0 in between. An error in the call
ends the sampling."""


class Engine(Protocol):
    """Samples responses, and takes new weights from the trainer."""

    weight_version: int = -1
    """Version of the weights for the next token; -1 before the first update."""
    receives_weights: bool = True
    """Whether this rank needs the tensors of an update; the other ranks only help to gather the tensors."""
    answer_counts: Mapping[str, int] = MappingProxyType({})
    """Counts of this rank, which the trainer clears once it has read them; empty without servers. The trainer cannot
    clear a read-only mapping: metrics then count all answers so far.

    wrong_answers: refused answers, requested again. refused_requests: requests that a server did not serve (HTTP 408,
    413, 429, 5xx), sent again. retractions: how often servers dropped a request from memory, and read it again.
    retracted_answers: answers asked for again for that. lost_parts: paused responses whose tokens were lost. slot_ms,
    busy_slot_ms: milliseconds of the servers' slots (``megarl.engines.sglang.client``), and of slots with a request.
    """

    def converse(self, begin: Begin, params: SamplingParams, on_finish: OnFinish = None) -> None:
        """Run the episodes that ``begin`` starts, and their successors, in a new event loop.

        RolloutError for a request that cannot be served or an answer that cannot be right; WeightSyncError while the
        weights are incomplete; errors of an episode are raised unchanged.
        """

    def generate(
        self, requests: Sequence[SampleRequest], params: SamplingParams, on_finish: OnFinish = None
    ) -> list[Rollout]:
        """Sample one response for each request, in the order of the requests; errors as in ``converse``."""
        return sample_each(lambda begin: self.converse(begin, params, on_finish), requests)

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace all weights; ``tensors`` are (name, tensor) as in a Hugging Face checkpoint, each exactly once.

        Copy the tensors: a tensor may be a view of the trainer's weights, which the next step changes. Each expert has
        a tensor; tied tensors appear once. A missing, unknown, repeated or mis-shaped name raises WeightSyncError; the
        engine then refuses to sample until a whole update has arrived.
        """

    def prove_weights(self) -> bool:
        """Return whether foreign code has changed the weights since ``update_weights``; no rank samples meanwhile.

        If so, the responses since the update are wrong. An engine without outside access returns False.
        """
        return False

    def rest(self) -> None:
        """Free memory until the next ``update_weights`` if possible; collective over the ranks that share the
        engine."""

    def close(self) -> None:
        """Free the engine's resources. The engine is unusable afterwards; a second call does nothing."""


def check_prompt(request: SampleRequest, params: SamplingParams, vocabulary: int) -> None:
    """RolloutError for a prompt or stop tokens outside of the vocabulary."""
    prompt, label = request.prompt_tokens, request.label
    if prompt.ndim != 1 or prompt.dtype.kind not in "iu" or not prompt.size:
        raise RolloutError(f"{label}: the prompt is {prompt.dtype} {prompt.shape}, expected integers [P], at least one")
    if prompt.astype(np.uint64).max() >= vocabulary:  # a negative token becomes a large number
        raise RolloutError(f"{label}: the prompt has a token outside of 0..{vocabulary - 1}")
    if any(token >= vocabulary for token in params.stop_token_ids):
        raise RolloutError(f"stop_token_ids {params.stop_token_ids} leave the vocabulary of {vocabulary} tokens")


def limit_response(request: SampleRequest, params: SamplingParams, positions: int) -> int:
    """Return the longest response in tokens to a request of a model with ``positions``; RolloutError if none fits."""
    prompt_length, requested = len(request.prompt_tokens), request.max_response_tokens
    most = params.max_response_tokens if requested is None else min(requested, params.max_response_tokens)
    if min(most, positions - prompt_length) < 1:
        raise RolloutError(refusal("no_room", label=request.label, size=prompt_length, positions=positions, most=most))
    return min(most, positions - prompt_length)


def prompt_alone(request: SampleRequest, version: int) -> Rollout:
    """Return the answer to a request that a pause leaves without a token."""
    size = len(request.prompt_tokens)
    logprobs, versions = np.zeros(size, np.float32), np.full(size, version, np.int32)
    tokens, mask = np.asarray(request.prompt_tokens, np.int32), np.zeros(size, bool)
    return Rollout(request.group, request.sample, tokens, mask, logprobs, None, None, versions, "pause")


def go_on(request: SampleRequest, earlier: Rollout, max_response_tokens: int) -> SampleRequest:
    """Return the request that continues ``earlier``, of a response of at most ``max_response_tokens`` in all."""
    drawn = earlier.num_tokens - len(request.prompt_tokens)
    limit = min(max_response_tokens, request.max_response_tokens or max_response_tokens)
    rows, num_drawn = known_rows(earlier), request.num_drawn + drawn
    changes: Any = {"prompt_tokens": earlier.tokens, "known_rows": rows, "max_response_tokens": limit - drawn}
    return replace(request, num_drawn=num_drawn, **changes)


def sample_each(converse: Callable[[Begin], None], requests: Sequence[SampleRequest]) -> list[Rollout]:
    """Sample a response for each request, in separate episodes."""
    rollouts: dict[int, Rollout] = {}

    async def sample(session: Session, position: int) -> None:
        rollouts[position] = await session.sample(requests[position])

    def begin(session: Session) -> None:
        for position in range(len(requests)):
            session.start(sample(session, position))

    converse(begin)
    return [rollouts[position] for position in range(len(requests))]


def too_many_kept(request: SampleRequest, num_ids: int, limit: int, num_tokens: int) -> RolloutError:
    """Return the error for a response whose ``num_tokens`` tokens have more nucleus ids than ``max_kept_ids``."""
    return RolloutError(refusal("too_many_kept", request=request, num_tokens=num_tokens, num_ids=num_ids, limit=limit))
