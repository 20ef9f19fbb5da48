"""Plays samples (an episode and a reward each), and draws the samples that a sampling rule asks for."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from megarl.core.sampling.collector import Ask
from megarl.core.types import Rollout, SampleRequest
from megarl.data.judge import Judge
from megarl.data.prompts import Prompt
from megarl.data.rewards import Verdict
from megarl.data.tokenizer import step_tokens
from megarl.engines.episodes import EpisodeLimits, EpisodeResult, play
from megarl.engines.protocol import Engine, OnFinish, SamplingParams, Session
from megarl.engines.tools.protocol import Environment
from megarl.errors import RequestError


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sample has no reward."""

    error: str
    """One line: type and message of an exception, and its file and line."""
    about: str
    """Prompt, response and answer, each shortened."""
    may_pass: bool = False
    """Whether the cause is outside of the user's code: a server, a time-out, the engine."""
    of_episode: bool = False
    """Whether the environment failed, and not the reward."""

    def __str__(self) -> str:
        return f"{self.error}; {self.about}"


def describe_input(**texts: str) -> str:
    """Return texts by name in one line; long texts are shortened in the middle."""
    shown = {name: text if len(text) <= 120 else f"{text[:60]}...{text[-60:]}" for name, text in texts.items()}
    return ", ".join(f"{name} {text!r}" for name, text in shown.items())


@dataclass(frozen=True, slots=True)
class Sample:
    """A response and its reward."""

    rollout: Rollout | None
    """None if the episode failed in its first turn."""
    reward: float | None
    """None if the environment or the reward failed: the sample counts as drawn, but is not trained."""
    steps: tuple[tuple[int, float], ...] = ()
    """(index of the last token, reward) of each step, ascending; empty without process rewards."""
    turns: int = 1
    failure: Failure | None = None
    """Why the reward is missing; None if the sample has a reward."""
    late_reward: bool = False
    """Whether the reward took too long."""
    components: tuple[float, ...] = ()
    """Several rewards, in the order of ``reward.weights``; empty with one reward, or for a stopped response."""


class Player:
    """Plays episodes and has them judged, in one event loop at a time."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        judge: Judge,
        limits: EpisodeLimits,
        environment: Environment | None = None,
        concurrency: int = 4,
    ) -> None:
        """concurrency: how many answers the environment works on at a time."""
        self._tokenizer, self._judge, self._limits = tokenizer, judge, limits
        self._environment = environment
        self._places, self._concurrency = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore](), concurrency

    async def play(self, session: Session, request: SampleRequest, prompt: Prompt) -> Sample:
        """Draw and judge one sample. Failures of environment or reward, and refused requests, are part of the sample.

        Other errors of the engine are raised.
        """
        try:
            if self._environment is None:
                rollout = await session.sample(request)
                played = EpisodeResult(rollout, [rollout.num_tokens - 1], [None])
            else:
                places = self._places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._concurrency))
                world = self._environment, self._tokenizer, self._limits, places
                played = await play(session, request, prompt.text, *world)
        except RequestError as error:
            failure = Failure(str(error), describe_input(prompt=prompt.text), may_pass=True, of_episode=True)
            return Sample(None, None, failure=failure)
        if played.rollout is None or played.failure is not None:
            error, about = played.failure or "no turn was sampled", describe_input(prompt=prompt.text)
            failure = Failure(error, about, played.may_pass, of_episode=True)
            return Sample(played.rollout, None, turns=len(played.turn_ends), failure=failure)
        skip = not self._judge.special_tokens
        text = str(self._tokenizer.decode(played.rollout.response_tokens.tolist(), skip_special_tokens=skip))
        verdict = await self._judge.score(prompt=prompt.text, response=text, answer=prompt.answer)
        steps = self._find_steps(played, played.rollout, verdict)
        failure = None
        if verdict.error is not None:
            about = describe_input(prompt=prompt.text, response=text, answer=prompt.answer)
            failure = Failure(verdict.error, about, verdict.may_pass)
        turns = len(played.turn_ends)
        return Sample(played.rollout, verdict.reward, steps, turns, failure, verdict.timed_out, verdict.components)

    def close(self) -> None:
        """End the processes of the reward."""
        self._judge.close()

    def _find_steps(self, played: EpisodeResult, rollout: Rollout, verdict: Verdict) -> tuple[tuple[int, float], ...]:
        """Collect the process rewards: of turns with a reward from the environment, and of the reward function's steps.

        A verdict without steps counts as one step at the end of rewarded turns.
        """
        turns = zip(played.turn_ends, played.turn_rewards, strict=True)
        rewards = [(end, reward) for end, reward in turns if reward is not None]
        if verdict.reward is None or not (rewards or verdict.steps):
            return ()
        if not verdict.steps:
            rewards.append((rollout.num_tokens - 1, verdict.reward))
        else:
            ends = [step.end for step in verdict.steps]
            response, special = rollout.response_tokens, self._judge.special_tokens
            tokens = step_tokens(self._tokenizer, response, ends, special) + rollout.prompt_length
            rewards += [(int(token), step.reward) for token, step in zip(tokens, verdict.steps, strict=True)]
        return tuple(sorted(rewards))


Key = tuple[int, int]
"""(prompt, sample)."""
RequestOf = Callable[[int, int], tuple[SampleRequest, Prompt]]
"""(prompt, sample) -> the request to the engine, and the problem."""


class Asker(Protocol):
    """Decides what to draw next, as ``megarl.core.sampling.collector.Collector`` does."""

    def start(self) -> Sequence[Ask]:
        """Returns the first samples to draw."""
        ...

    def add(self, prompt: int, sample: int, reward: float | None) -> Sequence[Ask]:
        """Take a sample that has arrived; return the samples to draw next."""
        ...

    @property
    def done(self) -> bool:
        """Whether the samples suffice: samples in flight are not needed."""
        ...


class Draw:
    """One rank's samples of a step."""

    def __init__(self, asker: Asker, request_of: RequestOf, player: Player) -> None:
        self.samples: dict[Key, Sample] = {}
        """By (prompt, sample), as they arrive."""
        self._asker, self._request_of, self._player = asker, request_of, player
        self._in_flight: set[asyncio.Task[None]] = set()

    def run(self, engine: Engine, params: SamplingParams, on_finish: OnFinish = None) -> dict[Key, Sample]:
        """Draw all samples, an episode for each."""
        engine.converse(self.begin, params, on_finish)
        return self.samples

    def begin(self, session: Session) -> None:
        """Start the first episodes. When an episode ends, it starts the further samples that the sampling rule
        requests."""
        self._start(session, self._asker.start())

    def _start(self, session: Session, asks: Sequence[Ask]) -> None:
        for key in [(ask.prompt, sample) for ask in asks for sample in ask.samples]:
            task = session.start(self._play(session, key))
            self._in_flight.add(task)
            task.add_done_callback(self._in_flight.discard)

    async def _play(self, session: Session, key: Key) -> None:
        sample = await self._player.play(session, *self._request_of(*key))
        if self._asker.done:
            return  # earlier samples were enough
        self.samples[key] = sample
        asks = self._asker.add(*key, sample.reward)
        if not self._asker.done:
            return self._start(session, asks)
        for task in self._in_flight - {asyncio.current_task()}:
            task.cancel()
