"""Rollouts of several turns: the model writes, an environment answers, and all of it is one sequence.

The tokens of a turn are kept as they were sampled; only the text of an observation is tokenized, appended, and left out
of loss and ratios. The next turn goes on from these tokens, so that columns and routes of all turns line up.
"""

from __future__ import annotations

import asyncio
import math
import numbers
from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from megarl.core.turns import join, known_rows
from megarl.core.types import Rollout, SampleRequest
from megarl.errors import ConfigError
from megarl.rollout.engine import Session
from megarl.rollout.tools.protocol import Environment, Episode, ModelTurn, Observation


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """How long a rollout may become."""

    response_tokens: int
    """All turns and observations together."""
    turns: int = 1
    """Turns of the model."""
    turn_tokens: int | None = None
    """Tokens of one turn; None for what is left."""
    positions: int | None = None
    """Positions of the model, prompt included; None if they have no end."""
    step_s: float = 60.0
    """Seconds for one answer of the environment."""
    episode_s: float = 1800.0
    """Seconds from the end of the first turn to the end of the rollout."""

    def tokens_left(self, num_tokens: int, prompt_length: int) -> int:
        """How many tokens may follow a sequence of ``num_tokens``."""
        left = self.response_tokens - (num_tokens - prompt_length)
        # One position stays free: an SGLang server refuses a request that could fill the last one.
        return left if self.positions is None else min(left, self.positions - num_tokens - 1)


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """What came of an episode."""

    rollout: Rollout | None
    """All turns; finish_reason is that of the last one, length if a limit ended the episode, abort if it failed. None
    if it failed in its first turn."""
    turn_ends: tuple[int, ...] = ()
    """Index of the last token of each turn of the model."""
    turn_rewards: tuple[float | None, ...] = ()
    """What the environment gave for each of them; None where it gave nothing."""
    failure: str | None = None
    """Why it failed, in one line: the environment, or a deadline."""


async def play_turn(session: Session, request: SampleRequest) -> EpisodeResult:
    """A response of one turn, without an environment."""
    rollout = await session.sample(request)
    return EpisodeResult(rollout, (rollout.num_tokens - 1,), (None,))


async def play(
    session: Session,
    request: SampleRequest,
    prompt: str,
    environment: Environment,
    tokenizer: PreTrainedTokenizerBase,
    limits: EpisodeLimits,
    places: asyncio.Semaphore,
) -> EpisodeResult:
    """An episode from its first turn to its end; the same request, weights and answers give the same sequence.

    prompt: the text of the request's tokens. places: how many answers the environment works on at a time. What the
    environment fails at, and deadlines, fail this episode alone; errors of the engine are raised.
    """
    course = _Course(request)
    episode: Episode | None = None
    failure = closing = None
    try:
        async with asyncio.timeout(None) as clock:
            episode = _begun(environment, prompt, request.seed)
            await course.run(session, episode, tokenizer, limits, places, clock)
    except TimeoutError:
        failure = f"the episode took more than {limits.episode_s:g} s"
    except EpisodeError as error:
        failure = str(error)
    finally:  # what is raised here would hide an error of the engine
        if episode is not None:
            closing = await _close(episode, limits.step_s)
    failure = failure or closing
    return course.played() if failure is None else course.failed(failure)


class EpisodeError(Exception):
    """An environment raised, or did not answer in time."""


class _Course:
    """An episode under way."""

    def __init__(self, request: SampleRequest) -> None:
        self._request = request
        self._prompt_length = len(request.prompt_tokens)
        self._whole: Rollout | None = None
        self._ends: list[int] = []
        self._rewards: list[float | None] = []

    def played(self) -> EpisodeResult:
        return EpisodeResult(self._whole, tuple(self._ends), tuple(self._rewards))

    def failed(self, why: str) -> EpisodeResult:
        whole = None if self._whole is None else replace(self._whole, finish_reason="abort")
        return EpisodeResult(whole, tuple(self._ends), tuple(self._rewards), why)

    async def run(
        self,
        session: Session,
        episode: Episode,
        tokenizer: PreTrainedTokenizerBase,
        limits: EpisodeLimits,
        places: asyncio.Semaphore,
        clock: asyncio.Timeout,
    ) -> None:
        tokens = self._request.prompt_tokens
        for index in range(limits.turns):
            left = limits.tokens_left(len(tokens), self._prompt_length)
            if left < 1:  # a later turn is not begun without room
                raise EpisodeError(f"the prompt of {len(tokens)} tokens leaves no room in the model's positions")
            asked = left if limits.turn_tokens is None else min(left, limits.turn_tokens)
            turn = await self._turn(session, index, tokens, asked)
            if index == 0:  # before, it waited until the engine had begun with it, in a queue of thousands perhaps
                clock.reschedule(asyncio.get_running_loop().time() + limits.episode_s)
            whole = self._whole
            assert whole is not None
            generated = turn.num_tokens - len(tokens)
            if turn.finish_reason == "length" and (generated == left or generated < asked):
                return  # cut for good: by the length of the response, or by the end of the positions
            written = turn.tokens[len(tokens) :].copy()  # what an environment does to them is its own business
            text = tokenizer.decode(written, skip_special_tokens=True)
            step = ModelTurn(index, written, text, turn.finish_reason)
            observation = await _answer(episode, step, limits.step_s, places)
            self._rewards[-1] = None if observation.reward is None else float(observation.reward)
            if observation.done:
                return
            tokens = np.concatenate([whole.tokens, _encoded(tokenizer, observation.text)])
            if limits.tokens_left(len(tokens), self._prompt_length) < 1:
                break
        self._whole = replace(whole, finish_reason="length")

    async def _turn(self, session: Session, index: int, tokens: np.ndarray, asked: int) -> Rollout:
        """Sample one more turn and join it to those before."""
        before = self._whole
        request = replace(
            self._request,
            prompt_tokens=tokens,
            seed=turn_seed(self._request.seed, index),
            known_rows=0 if before is None else known_rows(before),
            max_response_tokens=asked,
        )
        turn = await session.sample(request)
        if turn.finish_reason == "abort":
            raise EpisodeError(f"the engine aborted turn {index}")
        self._whole = turn if before is None else join(before, turn)
        self._ends.append(turn.num_tokens - 1)
        self._rewards.append(None)
        return turn


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a turn; the first one has the episode's own."""
    return seed if turn == 0 else int(np.random.SeedSequence([seed, turn]).generate_state(1, np.uint64)[0])


def _begun(environment: Environment, prompt: str, seed: int) -> Episode:
    try:
        return environment.begin(prompt, seed)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # as in a step
        raise EpisodeError(f"the environment failed to begin: {_told(error)}") from error


async def _answer(episode: Episode, turn: ModelTurn, seconds: float, places: asyncio.Semaphore) -> Observation:
    """The environment's answer; EpisodeError if it is late, raises, or is none."""
    failed = f"turn {turn.index}: the environment failed"
    async with places:
        try:
            async with asyncio.timeout(seconds) as deadline:
                observation = await episode.step(turn)
            if deadline.expired():  # an environment may swallow what cancels it
                raise TimeoutError
            if _is_cancelled():
                raise asyncio.CancelledError
            _check(observation)
        except ConfigError:
            raise
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            # Of a task of its own, perhaps. Let through, it would end this episode as if nobody wanted it any more.
            raise EpisodeError(f"{failed}: CancelledError") from error
        except (Exception, SystemExit) as error:  # foreign code: what it raises costs one episode, and is counted
            if isinstance(error, TimeoutError) and deadline.expired():
                raise EpisodeError(f"turn {turn.index}: the environment took more than {seconds:g} s") from error
            raise EpisodeError(f"{failed}: {_told(error)}") from error
    if observation.reward is not None and not math.isfinite(observation.reward):
        raise EpisodeError(f"turn {turn.index}: the environment gave the reward {observation.reward}")
    return observation


def _check(observation: object) -> None:
    """Raises TypeError for what is no observation."""
    if not isinstance(observation, Observation):
        raise TypeError(f"step returned a {type(observation).__name__}, expected an Observation")
    if not isinstance(observation.text, str):
        raise TypeError(f"the text of its observation is a {type(observation.text).__name__}")
    if observation.reward is not None and not isinstance(observation.reward, numbers.Real):
        raise TypeError(f"the reward of its observation is a {type(observation.reward).__name__}, expected a number")


async def _close(episode: Episode, seconds: float) -> str | None:
    """Close the episode; why that failed, if it did."""
    try:
        async with asyncio.timeout(seconds):
            await episode.close()
    except asyncio.CancelledError:
        if _is_cancelled():
            raise
        return "the environment failed to close: CancelledError"
    except (Exception, SystemExit) as error:  # as in a step
        return f"the environment failed to close: {_told(error)}"
    return None


def _is_cancelled() -> bool:
    """Whether the running task was told to end, and did not come upon a CancelledError in any other way."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _told(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> np.ndarray:
    if not text:
        return np.zeros(0, dtype=np.int32)
    try:
        return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
    except Exception as error:  # a tokenizer without bytes or an unknown token refuses some texts, each in its own way
        raise EpisodeError(f"the tokenizer cannot read the observation {text[:80]!r}: {error}") from error
