"""Plays samples, an episode and its reward each, and draws those that a sampling rule asks for."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from megarl.core.sampling.collector import Ask
from megarl.core.types import Rollout, SampleRequest
from megarl.data.judge import Judge
from megarl.data.prompts import Prompt
from megarl.data.reasoning_steps import step_tokens
from megarl.data.rewards import Verdict
from megarl.rollout.engine import Session
from megarl.rollout.episodes import EpisodeLimits, EpisodeResult, one_turn, play
from megarl.rollout.tools.protocol import Environment


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
    reward_error: str | None = None
    late_reward: bool = False
    """Whether the reward took too long."""
    episode_error: str | None = None
    components: tuple[float, ...] = ()
    """Several rewards, in the order of ``reward.weights``; empty with one reward, or if the response was stopped."""


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
        self._environment, self._concurrency = environment, concurrency
        self._places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def play(self, session: Session, request: SampleRequest, prompt: Prompt) -> Sample:
        """Draw and judge one sample. It names a failure of environment or reward; errors of the engine are raised."""
        if self._environment is None:
            played = one_turn(await session.sample(request))
        else:
            parts = self._environment, self._tokenizer, self._limits, self._semaphore()
            played = await play(session, request, prompt.text, *parts)
        if played.rollout is None or played.failure is not None:
            return Sample(played.rollout, None, turns=len(played.turn_ends), episode_error=played.failure)
        text = self._text_of(played.rollout)
        verdict = await self._judge.score(prompt=prompt.text, response=text, answer=prompt.answer)
        return self._judged(played, played.rollout, verdict)

    @property
    def plays_together(self) -> bool:
        """Whether ``play_together`` works: there is neither an environment nor a reward to wait for."""
        return self._environment is None and self._judge.is_instant

    async def play_together(self, session: Session, asked: Sequence[tuple[SampleRequest, Prompt]]) -> list[Sample]:
        """Draw and judge samples as ``play`` does, all of them as one episode of a session ``in_batches``."""
        found = []
        rollouts = await session.sample_all([request for request, _ in asked])
        for rollout, (_, prompt) in zip(rollouts, asked, strict=True):
            text = self._text_of(rollout)
            verdict = self._judge.score_now(prompt=prompt.text, response=text, answer=prompt.answer)
            found.append(self._judged(one_turn(rollout), rollout, verdict))
        return found

    def _text_of(self, rollout: Rollout) -> str:
        return self._tokenizer.decode(rollout.response_tokens.tolist(), skip_special_tokens=True)

    def _judged(self, played: EpisodeResult, rollout: Rollout, verdict: Verdict) -> Sample:
        return Sample(
            rollout,
            verdict.reward,
            self._find_steps(played, rollout, verdict) if verdict.reward is not None else (),
            len(played.turn_ends),
            verdict.error,
            verdict.timed_out,
            components=verdict.components,
        )

    def close(self) -> None:
        """End the processes of the reward."""
        self._judge.close()

    def _semaphore(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._places is None or self._places[0] is not loop:
            self._places = loop, asyncio.Semaphore(self._concurrency)
        return self._places[1]

    def _find_steps(self, played: EpisodeResult, rollout: Rollout, verdict: Verdict) -> tuple[tuple[int, float], ...]:
        """Collects the process rewards: of the turns that the environment rewarded, and of the reward function's steps.

        A verdict without steps counts as one at the end if turns were rewarded; alone it gives no steps.
        """
        turns = zip(played.turn_ends, played.turn_rewards, strict=True)
        found = [(end, reward) for end, reward in turns if reward is not None]
        if found and not verdict.steps and verdict.reward is not None:
            found.append((rollout.num_tokens - 1, verdict.reward))
        if verdict.steps:
            ends = np.array([step.end for step in verdict.steps])
            tokens = step_tokens(self._tokenizer, rollout.response_tokens, ends) + rollout.prompt_length
            found += [(int(token), step.reward) for token, step in zip(tokens, verdict.steps, strict=True)]
        return tuple(sorted(found))


Key = tuple[int, int]
"""(prompt, sample)."""
RequestOf = Callable[[int, int], tuple[SampleRequest, Prompt]]
"""(prompt, sample) -> the request to the engine, and the problem."""


class Asker(Protocol):
    """Decides what to draw next; ``megarl.core.sampling.collector.Collector`` is one."""

    def start(self) -> Sequence[Ask]:
        """Returns the first samples to draw."""

    def add(self, prompt: int, sample: int, reward: float | None) -> Sequence[Ask]:
        """Takes a sample that has arrived; returns what to draw after it."""

    @property
    def done(self) -> bool:
        """Whether it has enough: samples in flight are not needed."""


class Draw:
    """One rank's samples of a step; ``engine.converse(draw.begin, params)`` returns when they are complete."""

    def __init__(self, asker: Asker, request_of: RequestOf, player: Player) -> None:
        self.samples: dict[Key, Sample] = {}
        """By (prompt, sample), as they arrive."""
        self._asker, self._request_of, self._player = asker, request_of, player
        self._in_flight: set[asyncio.Task[None]] = set()

    def begin(self, session: Session) -> None:
        """Start the first episodes; each one starts those that its reward calls for."""
        self._start(session, self._asker.start())

    def _start(self, session: Session, asks: Sequence[Ask]) -> None:
        keys = [(ask.prompt, sample) for ask in asks for sample in ask.samples]
        if getattr(session, "in_batches", False) and self._player.plays_together:  # a session need not be a Session
            episodes = [self._play_together(session, sorted(keys))] if keys else []
        else:
            episodes = [self._play(session, key) for key in keys]
        for episode in episodes:
            task = session.start(episode)
            self._in_flight.add(task)
            task.add_done_callback(self._in_flight.discard)

    async def _play(self, session: Session, key: Key) -> None:
        self._take(session, {key: await self._player.play(session, *self._request_of(*key))})

    async def _play_together(self, session: Session, keys: Sequence[Key]) -> None:
        drawn = await self._player.play_together(session, [self._request_of(*key) for key in keys])
        self._take(session, dict(zip(keys, drawn, strict=True)))

    def _take(self, session: Session, drawn: Mapping[Key, Sample]) -> None:
        """Keep samples until there are enough, and start those that their rewards call for."""
        if self._asker.done:
            return  # other samples were enough in the meantime
        asks: list[Ask] = []
        for key, sample in drawn.items():
            if self._asker.done:
                break
            self.samples[key] = sample
            asks += self._asker.add(*key, sample.reward)
        if not self._asker.done:
            self._start(session, asks)
        else:
            for task in self._in_flight - {asyncio.current_task()}:
                task.cancel()
