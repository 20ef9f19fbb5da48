"""Draws the samples that a sampling rule asks for: an episode of one or several turns, and its reward.

The model writes, an environment answers, and the turns become one sequence. Sampled tokens are never tokenized again.
The tokens of an observation are appended and left out of loss and ratios. The next turn continues from these tokens, so
columns and routes of all turns line up.

- **Ends normally** (judged and trained): the environment reports the end; turns or tokens are spent.
- **Fails** (not trained): the environment raises or returns no observation; an answer takes longer than ``step_s``; the
  episode takes longer than ``episode_s``; the engine aborts a turn.
"""

import asyncio
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import numpy as np
from transformers import PreTrainedTokenizerBase

from megarl.core.sampling.collector import Ask, Collector, FixedSamples, Key
from megarl.core.sampling.window import WindowSamples
from megarl.core.types import Rollout, SampleRequest
from megarl.data.judge import Judge, is_being_cancelled
from megarl.data.prompts import Prompt
from megarl.data.rewards import Verdict
from megarl.data.tokenizer import step_tokens
from megarl.engines.protocol import Engine, OnFinish, SamplingParams, Session, go_on
from megarl.engines.tools.protocol import Environment, Episode, ModelTurn, Observation
from megarl.errors import ConfigError, RequestError, RolloutError, describe_call, may_pass, refusal, reworded
from megarl.routes.turns import join, known_rows


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
    num_dropped: int = 0
    """As in ``EpisodeResult``."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Bounds on a rollout, in tokens, turns and seconds."""

    response_tokens: int
    """Tokens of all turns and observations together."""
    turns: int = 1
    """Turns of the model, at most."""
    turn_tokens: int | None = None
    """Tokens of one turn; None: no limit per turn."""
    positions: int | None = None
    """Positions of the model, prompt included; None: no limit."""
    vocabulary: int | None = None
    """Tokens with a row in the model's embedding; None: unknown."""
    step_s: float = 60.0
    """Seconds for one answer of the environment."""
    episode_s: float = 1800.0
    """Seconds from the end of the first turn to the end of the rollout."""

    def tokens_left(self, num_tokens: int, prompt_length: int) -> int:
        """Returns how many tokens may follow a sequence of ``num_tokens``."""
        budget = self.response_tokens - (num_tokens - prompt_length)
        # One position stays free: an SGLang server refuses a request that could fill the last position.
        return budget if self.positions is None else min(budget, self.positions - num_tokens - 1)


@dataclass(slots=True)
class EpisodeResult:
    """An episode, as far as it has come."""

    rollout: Rollout | None = None
    """All turns as one sequence; None if the first turn failed. finish_reason: of the last turn; length if a limit
    ended the episode; abort if the episode failed."""
    turn_ends: list[int] = field(default_factory=list)
    """Index of the last token of each turn of the model."""
    turn_rewards: list[float | None] = field(default_factory=list)
    """The environment's reward of each turn; None: no reward."""
    failure: str | None = None
    """Why the episode failed, in one line; None: it did not fail."""
    may_pass: bool = False
    """Whether the cause is outside of the environment: a server, a time-out, the engine."""
    num_dropped: int = 0
    """Generated tokens that are not in ``rollout``: of an agent that left a conversation for another."""


class Agent:
    """Plays episodes without the player: it asks for turns, as often as it likes."""

    async def play(
        self, player: "Player", session: Session, request: SampleRequest, prompt: str, result: EpisodeResult
    ) -> None:
        """Play an episode, and fill the result turn by turn; errors as in ``Player.play_episode``."""
        raise NotImplementedError


class EpisodeError(Exception):
    """This episode cannot continue; other episodes can."""


@dataclass(eq=False)
class Player:
    """Plays episodes and has them judged, in one event loop at a time."""

    tokenizer: PreTrainedTokenizerBase
    judge: Judge
    limits: EpisodeLimits
    environment: Environment | Agent | None = None
    concurrency: int = 4
    """How many answers the environment works on at a time."""

    def __post_init__(self) -> None:
        self._places = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()

    async def play(
        self, session: Session, request: SampleRequest, prompt: Prompt, unfinished: Rollout | None = None
    ) -> Sample:
        """Draw and judge one sample. Failures of environment or reward, and refused requests, are part of the sample.

        Other errors of the engine are raised. unfinished: a paused response to go on with. The sample of a response
        that is paused now has no reward and no failure.
        """
        try:
            played = await self.play_episode(session, request, prompt.text, unfinished)
        except RequestError as error:
            played = EpisodeResult(failure=str(error), may_pass=True)
        turns, dropped = len(played.turn_ends), played.num_dropped
        if played.rollout is None or played.failure is not None:
            error, about = played.failure or "no turn was sampled", describe_input(prompt=prompt.text)
            failure = Failure(error, about, played.may_pass, of_episode=True)
            return Sample(played.rollout, None, turns=turns, failure=failure, num_dropped=dropped)
        if played.rollout.finish_reason == "pause":
            return Sample(played.rollout, None)
        skip = not self.judge.special_tokens
        text = str(self.tokenizer.decode(played.rollout.response_tokens.tolist(), skip_special_tokens=skip))
        verdict = await self.judge.score(prompt=prompt.text, response=text, answer=prompt.answer)
        steps = self._find_steps(played, played.rollout, verdict)
        failure, late, components = None, verdict.timed_out, verdict.components
        if verdict.error is not None:
            about = describe_input(prompt=prompt.text, response=text, answer=prompt.answer)
            failure = Failure(verdict.error, about, verdict.may_pass)
        return Sample(played.rollout, verdict.reward, steps, turns, failure, late, components, dropped)

    async def play_episode(
        self, session: Session, request: SampleRequest, prompt: str, unfinished: Rollout | None = None
    ) -> EpisodeResult:
        """Play an episode to its end; equal request, weights and answers give an equal sequence.

        prompt: the text of the request's tokens. Failures of the environment and deadlines fail this episode alone;
        errors of the engine are raised. unfinished: see ``play``; without an environment only.
        """
        if self.environment is None:
            rollout = await _sample_response(session, request, unfinished, self.limits.response_tokens)
            return EpisodeResult(rollout, [rollout.num_tokens - 1], [None])
        result, limits = EpisodeResult(), self.limits
        episode: Episode | None = None
        failure, passing = None, True
        try:
            async with asyncio.timeout(None) as clock:
                if isinstance(self.environment, Agent):
                    await self.environment.play(self, session, request, prompt, result)
                else:
                    with foreign_code("the environment failed to begin"):
                        episode = self.environment.begin(prompt, request.seed)
                    await self._play_turns(result, session, request, episode, clock)
        except TimeoutError:
            failure = f"the episode took more than {limits.episode_s:g} s"
        except EpisodeError as error:
            failure, passing = str(error), may_pass(error)
        finally:
            if episode is not None:
                try:
                    with foreign_code("the environment failed to close"):
                        async with asyncio.timeout(limits.step_s):
                            await episode.close()
                except (EpisodeError, ConfigError) as error:  # an error raised here would hide an error of the engine
                    failure, passing = failure or str(error), passing and may_pass(error)
        result.failure, result.may_pass = failure, failure is not None and passing
        if result.rollout is not None and failure is not None:
            result.rollout = replace(result.rollout, finish_reason="abort")
        return result

    async def _play_turns(
        self, result: EpisodeResult, session: Session, request: SampleRequest, episode: Episode, clock: asyncio.Timeout
    ) -> None:
        """Add turns to the result until the episode has ended."""
        tokenizer, limits = self.tokenizer, self.limits
        places = self._places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.concurrency))
        tokens, prompt_length = request.prompt_tokens, len(request.prompt_tokens)
        for index in range(limits.turns):
            budget = limits.tokens_left(len(tokens), prompt_length)
            if budget < 1:  # only in the first turn: the room for later turns is checked below
                raise EpisodeError(f"the prompt of {len(tokens)} tokens leaves no room in the model's positions")
            limit = budget if limits.turn_tokens is None else min(budget, limits.turn_tokens)
            longer = replace(request, prompt_tokens=tokens, max_response_tokens=limit)
            result.rollout = whole = await sample_turn(session, longer, index, result.rollout)
            result.turn_ends.append(whole.num_tokens - 1)
            result.turn_rewards.append(None)
            if index == 0:  # the first turn may have waited long in the engine's queue
                clock.reschedule(asyncio.get_running_loop().time() + limits.episode_s)
            generated = whole.num_tokens - len(tokens)
            if whole.finish_reason == "length" and (generated == budget or generated < limit):
                return  # cut by the response limit or the last position, not by turn_tokens: no turn can follow
            written = whole.tokens[len(tokens) :].copy()  # the environment may change the copy
            text = str(tokenizer.decode(written, skip_special_tokens=True))
            step = ModelTurn(index, written, text, whole.finish_reason)
            observation = await _step(episode, step, limits.step_s, places)
            result.turn_rewards[-1] = None if observation.reward is None else float(observation.reward)
            if observation.done:
                return
            tokens = np.concatenate([whole.tokens, encode_text(tokenizer, observation.text, limits.vocabulary)])
            if index + 1 == limits.turns or limits.tokens_left(len(tokens), prompt_length) < 1:
                result.rollout = replace(whole, finish_reason="length")
                return

    def close(self) -> None:
        """End the processes of the reward."""
        self.judge.close()

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
            response, special = rollout.response_tokens, self.judge.special_tokens
            tokens = step_tokens(self.tokenizer, response, ends, special) + rollout.prompt_length
            rewards += [(int(token), step.reward) for token, step in zip(tokens, verdict.steps, strict=True)]
        return tuple(sorted(rewards))


async def sample_turn(session: Session, request: SampleRequest, index: int, earlier: Rollout | None) -> Rollout:
    """Sample turn ``index`` after the request's tokens, which begin with those of ``earlier``; return all turns joined.

    The request has the seed of the episode. EpisodeError if the engine aborts the turn.
    """
    num_rows = 0 if earlier is None else known_rows(earlier)
    turn = await session.sample(replace(request, seed=turn_seed(request.seed, index), known_rows=num_rows))
    if turn.finish_reason not in ("stop", "length"):
        raise EpisodeError(f"the engine aborted turn {index}") from RolloutError(turn.finish_reason)
    return turn if earlier is None else join(earlier, turn)


def turn_seed(seed: int, turn: int) -> int:
    """Returns the seed of a turn; the first turn has the episode's own."""
    return seed if turn == 0 else int(np.random.SeedSequence([seed, turn]).generate_state(1, np.uint64)[0])


async def _sample_response(
    session: Session, request: SampleRequest, rollout: Rollout | None, max_response_tokens: int
) -> Rollout:
    """Sample a response, or the rest of ``rollout``, until it ends or the session is paused."""
    while rollout is None or rollout.finish_reason == "pause":
        following = request if rollout is None else go_on(request, rollout, max_response_tokens)
        later = await session.sample(following)
        if rollout is not None and not later.loss_mask.any():
            return replace(rollout, finish_reason=later.finish_reason)
        rollout = later if rollout is None else join(rollout, later)
    return rollout


@contextmanager
def foreign_code(failed: str) -> Iterator[None]:
    """Around foreign code: an error costs one episode, and is raised as EpisodeError."""
    try:
        yield
    except ConfigError:
        raise
    except asyncio.CancelledError as error:
        if is_being_cancelled():
            raise
        # The environment has cancelled a task of its own. A raised CancelledError would look like a dropped episode.
        raise EpisodeError(f"{failed}: CancelledError") from error
    except (Exception, SystemExit) as error:
        raise EpisodeError(f"{failed}: {describe_call(error)}") from error


async def _step(episode: Episode, turn: ModelTurn, seconds: float, places: asyncio.Semaphore) -> Observation:
    """Return the environment's answer; EpisodeError if the answer is late, raises, or is no observation."""
    async with places:
        deadline = asyncio.timeout(seconds)
        try:
            with foreign_code(f"turn {turn.index}: the environment failed"):
                async with deadline:
                    observation = await episode.step(turn)
                # An environment may swallow the CancelledError of the deadline, or of the current task.
                if deadline.expired():
                    raise TimeoutError
                if is_being_cancelled():
                    raise asyncio.CancelledError
                if not isinstance(observation, Observation):
                    raise TypeError(f"step returned a {type(observation).__name__}, expected an Observation")
                text, reward = observation.text, observation.reward
                if not isinstance(text, str) or not (reward is None or isinstance(reward, numbers.Real)):
                    raise TypeError(refusal("observation", text=text, reward=reward))
        except EpisodeError as error:
            if isinstance(error.__cause__, TimeoutError) and deadline.expired():
                raise EpisodeError(f"turn {turn.index}: the environment took more than {seconds:g} s") from error
            raise
    if observation.reward is not None and not math.isfinite(observation.reward):
        raise EpisodeError(f"turn {turn.index}: the environment gave the reward {observation.reward}")
    return observation


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, vocabulary: int | None) -> np.ndarray:
    """Return the tokens of a text, int32 [T]; EpisodeError for a text that tokenizer or model cannot read."""
    if not text:
        return np.zeros(0, dtype=np.int32)
    # Tokenizers without byte fallback raise various errors for some texts.
    with reworded(Exception, EpisodeError, f"the tokenizer cannot read the observation {text[:80]!r}: "):
        tokens = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
    if vocabulary is not None and tokens.max(initial=0) >= vocabulary:
        raise EpisodeError(f"the observation {text[:80]!r} holds token {tokens.max()}; the model has {vocabulary} rows")
    return tokens


RequestOf = Callable[[int, int], tuple[SampleRequest, Prompt]]
"""(prompt, sample) -> the request to the engine, and the problem."""


Asker = Collector | FixedSamples | WindowSamples
"""Decides what to draw next."""


class Draw:
    """One rank's samples of a step."""

    def __init__(
        self, asker: Asker, request_of: RequestOf, player: Player, unfinished: Mapping[Key, Rollout] | None = None
    ) -> None:
        """unfinished: paused responses to go on with. Once the asker has enough, unfinished responses are paused; with
        None they are dropped."""
        self.samples: dict[Key, Sample] = {}
        """By (prompt, sample), as they arrive."""
        self.unfinished = dict(unfinished or {})
        """Paused responses, each with at least a token."""
        self.asker, self._request_of, self._player, self._pauses = asker, request_of, player, unfinished is not None
        self._session: tuple[asyncio.AbstractEventLoop, Session] | None = None
        self._is_asked_to_pause = self._is_paused = False

    def run(self, engine: Engine, params: SamplingParams, on_finish: OnFinish = None) -> dict[Key, Sample]:
        """Draw all samples, an episode for each."""
        engine.converse(self.begin, params, on_finish)
        return self.samples

    def begin(self, session: Session) -> None:
        """Start the first episodes. When an episode ends, it starts the further samples that the sampling rule
        requests."""
        self._session = asyncio.get_running_loop(), session
        self._start(session, self.asker.start())
        if self._is_asked_to_pause:
            self._pause(session)

    def pause(self) -> None:
        """Pause the session; from any thread, at any time."""
        self._is_asked_to_pause = True
        if self._session is not None:
            loop, session = self._session
            with suppress(RuntimeError):  # the session has ended
                loop.call_soon_threadsafe(self._pause, session)

    def _pause(self, session: Session) -> None:
        if not self._is_paused:
            self._is_paused = True
            session.pause()

    def _start(self, session: Session, asks: Sequence[Ask]) -> None:
        for key in [(ask.prompt, sample) for ask in asks for sample in ask.samples]:
            session.start(self._play(session, key))

    async def _play(self, session: Session, key: Key) -> None:
        sample = await self._player.play(session, *self._request_of(*key), self.unfinished.get(key))
        self.unfinished.pop(key, None)
        if (rollout := sample.rollout) is not None and rollout.finish_reason == "pause":
            self.unfinished |= {key: rollout} if rollout.loss_mask.any() else {}
            return
        if self.asker.done and not self._pauses:
            return  # earlier samples were enough
        self.samples[key] = sample
        asks = self.asker.add(*key, sample.reward)
        if not self.asker.done:
            return self._start(session, asks)
        if self._pauses:
            return self._pause(session)
        for task in session.episodes - {asyncio.current_task()}:
            task.cancel()
