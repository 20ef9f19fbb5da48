"""Episodes on the local engine: one sequence whose columns are those of its turns, and failures that cost one each."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
from episode_worlds import (
    Script,
    check_columns,
    check_joined,
    check_teacher_forced,
    for_ever,
    merging_tokenizer,
    play_all,
    player_of,
    says,
)
from rollout_oracle import Oracle, make_requests

from megarl.core.types import Rollout, SampleRequest
from megarl.data.judge import Judge
from megarl.data.prompts import Prompt
from megarl.engines.local.engine import LocalEngine
from megarl.engines.player import EpisodeLimits, EpisodeResult, Player, turn_seed
from megarl.engines.protocol import SamplingParams, Session
from megarl.engines.tools.protocol import ModelTurn, Observation
from megarl.errors import ConfigError, RolloutError

SOME_STOPS = SamplingParams(max_response_tokens=100, stop_token_ids=tuple(range(1, 6)))
"""A turn has six tokens on average, and ends with one of <eos>, a, b, c, d."""
ONE_TOKEN = SamplingParams(max_response_tokens=100, stop_token_ids=tuple(range(32)))
"""Every turn is one token, and stops."""
NO_STOP = SamplingParams(max_response_tokens=100)
"""Every turn is as long as it may be."""
LIMITS = EpisodeLimits(response_tokens=40, turns=4, turn_tokens=8, positions=64)


def played_of(found: list[EpisodeResult | None]) -> list[EpisodeResult]:
    assert None not in found
    return [played for played in found if played is not None]


def whole_of(played: EpisodeResult | None) -> Rollout:
    assert played is not None
    assert played.rollout is not None
    return played.rollout


def prompt_of(size: int) -> SampleRequest:
    return SampleRequest(np.full(size, 3, np.int32), 0, 0, 5)


def test_the_sequence_is_what_one_pass_over_it_says(engine: LocalEngine, oracle: Oracle) -> None:
    joined = check_joined(engine, make_requests(10, copies=3), oracle, SOME_STOPS, LIMITS, close=1e-5, is_local=True)
    assert {version for whole in joined for version in whole.weight_versions.tolist()} == {7}


def test_turns_stand_one_after_the_other_as_they_were_sampled(engine: LocalEngine) -> None:
    requests = make_requests(6, copies=2)
    texts = ("b0", "", "bb7")
    tokenizer = merging_tokenizer()
    for request in requests:
        script = says(*texts, reward=0.5)
        (played,) = played_of(play_all(engine, [request], script, LIMITS, SOME_STOPS))
        tokens, mask = list(request.prompt_tokens), [False] * len(request.prompt_tokens)
        for turn in script.turns:
            assert turn.text == tokenizer.decode(turn.tokens, skip_special_tokens=True)
            assert turn.tokens.dtype == np.int32
            assert played.turn_ends[turn.index] == len(tokens) + len(turn.tokens) - 1
            tokens += turn.tokens.tolist()
            mask += [True] * len(turn.tokens)
            if turn.index < len(played.turn_ends) - 1:
                observed = tokenizer(texts[turn.index], add_special_tokens=False)["input_ids"]
                tokens += observed
                mask += [False] * len(observed)
        assert whole_of(played).tokens.tolist() == tokens
        assert whole_of(played).loss_mask.tolist() == mask
        assert [turn.index for turn in script.turns] == list(range(len(script.turns)))
        assert played.turn_rewards == [0.5] * len(script.turns) + [None] * (len(played.turn_ends) - len(script.turns))
        assert script.prompts == [("prompt 0", request.seed)]
        assert (script.closed, script.most) == ([1], 1)


def test_later_turns_have_the_versions_and_seeds_that_they_were_sampled_with() -> None:
    """A session that counts up its weights, which an engine of this repository does not do in mid-session."""
    seen: list[SampleRequest] = []

    @dataclass
    class Counting:
        def start(self, episode: Any) -> Any:
            raise AssertionError

        async def sample(self, request: SampleRequest) -> Rollout:
            seen.append(request)
            size, version = len(request.prompt_tokens) + 2, len(seen)
            mask = np.arange(size) >= size - 2
            rows = (np.arange(size) < size - 1) & (np.arange(size) >= request.known_rows)
            return Rollout(
                request.group,
                request.sample,
                np.append(request.prompt_tokens, [4, 1]).astype(np.int32),
                mask,
                np.where(mask, -float(version), 0.0).astype(np.float32),
                np.where(rows[:, None, None], version, 0).astype(np.uint8),
                rows,
                np.full(size, version, np.int32),
                "stop",
            )

    limits = EpisodeLimits(response_tokens=20, turns=3)
    played = asyncio.run(
        player_of(says("0", "1", "2"), limits).play_episode(cast(Session, Counting()), prompt_of(3), "")
    )
    whole = whole_of(played)
    assert whole.weight_versions.tolist() == [1] * 5 + [2] * 3 + [3] * 3
    assert whole.rollout_logprobs.tolist() == [0, 0, 0, -1, -1, 0, -2, -2, 0, -3, -3]
    assert whole.routed_experts[:10, 0, 0].tolist() == [1] * 4 + [2] * 3 + [3] * 3
    assert [request.known_rows for request in seen] == [0, 4, 7]
    assert [request.seed for request in seen] == [5, turn_seed(5, 1), turn_seed(5, 2)]
    assert len({request.seed for request in seen}) == 3
    assert [request.max_response_tokens for request in seen] == [20, 17, 14]


AA = ("aa",) * 9
"""Two tokens, again and again."""


@pytest.mark.parametrize(
    ("params", "limits", "texts", "turns", "steps", "response", "finish"),
    [
        (ONE_TOKEN, EpisodeLimits(100, turns=3), AA, 3, 3, 7, "length"),  # the last turn is answered, for its reward
        (ONE_TOKEN, EpisodeLimits(100, turns=3), AA[:1], 2, 2, 4, "stop"),
        (ONE_TOKEN, EpisodeLimits(7, turns=9), AA, 3, 3, 7, "length"),
        (ONE_TOKEN, EpisodeLimits(7, turns=9), AA[:2], 3, 3, 7, "stop"),
        (ONE_TOKEN, EpisodeLimits(6, turns=9), AA, 2, 2, 4, "length"),  # an observation that leaves no token
        (ONE_TOKEN, EpisodeLimits(5, turns=9), AA, 2, 2, 4, "length"),  # and one that does not fit itself
        (NO_STOP, EpisodeLimits(9, turns=9), AA, 1, 0, 9, "length"),
        (NO_STOP, EpisodeLimits(100, turns=9, turn_tokens=4), AA[:1], 2, 2, 10, "length"),  # done, on a cut turn
        (NO_STOP, EpisodeLimits(9, turns=9, turn_tokens=4), AA, 2, 1, 9, "length"),
        (NO_STOP, EpisodeLimits(10, turns=9, turn_tokens=4), AA, 2, 1, 10, "length"),
        (NO_STOP, EpisodeLimits(11, turns=9, turn_tokens=4), AA, 2, 2, 10, "length"),
        (NO_STOP, EpisodeLimits(8, turns=9, turn_tokens=4), ("",) * 9, 2, 1, 8, "length"),
        (replace(NO_STOP, max_response_tokens=3), EpisodeLimits(100, turns=9), AA, 1, 0, 3, "length"),
        (NO_STOP, EpisodeLimits(100, turns=9, positions=64), AA, 1, 0, 53, "length"),
        (NO_STOP, EpisodeLimits(100, turns=9), AA, 1, 0, 54, "length"),  # the engine's own end
        (ONE_TOKEN, EpisodeLimits(100, turns=99, positions=64), AA * 9, 18, 18, 52, "length"),
    ],
)
def test_limits_are_exact(
    engine: LocalEngine,
    params: SamplingParams,
    limits: EpisodeLimits,
    texts: tuple[str, ...],
    turns: int,
    steps: int,
    response: int,
    finish: str,
) -> None:
    script, request = says(*texts), prompt_of(10)
    (played,) = played_of(play_all(engine, [request], script, limits, params))
    assert (len(played.turn_ends), len(script.turns), played.failure) == (turns, steps, None)
    assert (len(whole_of(played).response_tokens), whole_of(played).finish_reason) == (response, finish)
    check_columns(played, request, last_row=True)
    assert script.closed == [1]


class Broken(Script):
    """Raises where it is told to."""

    def __init__(self, where: str, error: BaseException, turn: int = 0) -> None:
        async def answer(turn_: ModelTurn) -> Observation:
            if where == "step" and turn_.index == turn:
                raise error
            return Observation("ab", done=turn_.index == 2)

        super().__init__(answer)
        self.where, self.error = where, error

    def begin(self, prompt: str, seed: int) -> Any:
        if self.where == "begin":
            raise self.error
        episode = super().begin(prompt, seed)
        if self.where == "close":
            counted = episode.close

            async def close() -> None:
                await counted()
                raise self.error

            episode.close = close  # type: ignore[method-assign]
        return episode


def answers(found: Any) -> Callable[[], Script]:
    async def answer(turn: ModelTurn) -> Observation:
        return found if turn.index == 1 else Observation("ab", done=False)

    return lambda: Script(answer)


FAULTS: dict[str, tuple[Callable[[], Script], str, int | None]] = {
    "begin": (lambda: Broken("begin", OSError("no host")), "the environment failed to begin: OSError: no host", 0),
    "step": (lambda: Broken("step", RolloutError("a\n b")), "turn 0: the environment failed: RolloutError: a b", 1),
    "its own task": (lambda: Broken("step", asyncio.CancelledError()), "turn 0: the environment failed: Cancelled", 1),
    "close": (lambda: Broken("close", ValueError("no")), "the environment failed to close: ValueError: no", 3),
    "nan": (answers(Observation("", False, math.nan)), "turn 1: the environment gave the reward nan", 2),
    "none": (answers(None), "turn 1: the environment failed: TypeError: step returned a NoneType", 2),
    "reward": (
        answers(Observation("", False, "1")),
        "turn 1: the environment failed: TypeError: its observation has '' and the reward",
        2,
    ),  # type: ignore[arg-type]
    "surrogate": (answers(Observation("\ud800", False)), "the tokenizer cannot read the observation '\\ud800': ", 2),
    "late": (lambda: Script(for_ever), "turn 0: the environment took more than 1 s", 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_costs_its_episode_alone(engine: LocalEngine, oracle: Oracle, fault: str) -> None:
    make, told, turns = FAULTS[fault]
    broken, sound = make(), says("b0", "b")
    requests = make_requests(3)
    bounds = replace(LIMITS, step_s=1.0 if fault == "late" else 600.0)
    found = played_of(play_all(engine, requests, [sound, broken, sound], [LIMITS, bounds, LIMITS], SOME_STOPS))
    assert found[1].failure.startswith(told)
    assert len(found[1].turn_ends) == turns
    assert broken.closed == ([] if fault.startswith("begin") else [1])
    if turns == 0:
        assert found[1].rollout is None
    else:
        assert whole_of(found[1]).finish_reason == "abort"
        check_columns(found[1], requests[1], last_row=True)
        check_teacher_forced(found[1], oracle, 1e-5, same_order=True)
    alone = played_of(play_all(engine, requests[::2], says("b0", "b"), LIMITS, SOME_STOPS))
    for played, other in zip(found[::2], alone, strict=True):
        assert played.failure is None
        assert np.array_equal(whole_of(played).tokens, whole_of(other).tokens)
        assert whole_of(played).finish_reason == whole_of(other).finish_reason != "abort"


def test_the_first_failure_is_told_and_errors_of_the_engine_are_not_hidden_by_close(engine: LocalEngine) -> None:
    both = Broken("close", ValueError("second"))
    both.answer = answers(None)().answer
    (played,) = played_of(play_all(engine, make_requests(1), both, LIMITS, SOME_STOPS))
    assert str(played.failure).startswith("turn 1: the environment failed: TypeError: step returned a NoneType")
    broken = Broken("close", ValueError("second"))
    with pytest.raises(RolloutError, match="prompt has a token outside"):
        play_all(engine, [SampleRequest(np.array([99], np.int32), 0, 0, 0)], broken, LIMITS, SOME_STOPS)
    assert broken.closed == [1]
    for where in ("begin", "step"):  # what cannot work for anyone ends the session
        with pytest.raises(ConfigError, match="no such tool"):
            play_all(engine, make_requests(2), Broken(where, ConfigError("no such tool")), LIMITS, SOME_STOPS)


def test_the_deadline_of_an_episode_in_mid_step(engine: LocalEngine) -> None:
    script = Script(for_ever)
    (played,) = played_of(play_all(engine, make_requests(1), script, replace(LIMITS, episode_s=2.0), SOME_STOPS))
    assert played.failure == "the episode took more than 2 s"
    assert whole_of(played).finish_reason == "abort"
    assert (len(played.turn_ends), played.turn_rewards, script.closed) == (1, [None], [1])


@pytest.mark.parametrize("where", ["step", "sample", "place"])
def test_a_cancelled_episode_is_closed_once_and_missed_by_nobody(engine: LocalEngine, where: str) -> None:
    """In mid-step; while its second turn waits for the batch; and while it waits for a place."""
    doomed, others = Script(for_ever) if where == "step" else says("b0", "b0", "b0"), says("b")
    requests, found = make_requests(3), {}
    at_work = asyncio.Event()

    async def slow(turn: ModelTurn) -> Observation:
        at_work.set()
        await asyncio.sleep(0.3)
        return Observation("ab", done=turn.index == 1)

    def begin(session: Session) -> None:
        held = asyncio.Semaphore(1)

        async def one(i: int, environment: Any) -> None:
            player = player_of(environment, LIMITS)
            if where == "place" and i == 0:
                player._places[asyncio.get_running_loop()] = held
            found[i] = await player.play_episode(session, requests[i], "")

        async def ends() -> None:
            if where == "place":
                await held.acquire()
            await at_work.wait()
            await asyncio.sleep(0.05)
            task.cancel()

        task = session.start(one(0, doomed))
        session.start(one(1, Script(slow)))
        session.start(one(2, others))
        cancelling.append(asyncio.get_running_loop().create_task(ends()))  # no episode: the batch would wait for it

    cancelling: list[asyncio.Task[None]] = []
    engine.converse(begin, SOME_STOPS)
    assert sorted(found) == [1, 2]
    assert all(found[i].failure is None for i in found)
    assert doomed.closed == [1]
    assert others.closed == [1]


def samples_of(engine: LocalEngine, requests: list[SampleRequest], environments: list[Script]) -> list[Any]:
    """What a player with each environment makes of each request."""
    samples: dict[int, Any] = {}

    def begin(session: Session) -> None:
        async def one(i: int) -> None:
            player = Player(merging_tokenizer(), judge, replace(LIMITS, response_tokens=54), environments[i])
            samples[i] = await player.play(session, requests[i], Prompt(i, requests[i].prompt_tokens, "", "a", ""))

        for i in range(len(requests)):
            session.start(one(i))

    with Judge("exact_match") as judge:
        engine.converse(begin, SOME_STOPS)
    return [samples[i] for i in range(len(requests))]


def test_rewards_of_turns_are_steps_at_their_last_tokens(engine: LocalEngine) -> None:
    async def answer(turn: ModelTurn) -> Observation:
        return Observation("b0", turn.index == 2, None if turn.index == 1 else turn.index + 0.5)

    requests = make_requests(4)
    for request, sample in zip(requests, samples_of(engine, requests, [Script(answer)] * 4), strict=True):
        whole = sample.rollout
        generated = np.flatnonzero(whole.loss_mask)
        ends = [int(t) for t in generated if t + 1 == whole.num_tokens or not whole.loss_mask[t + 1]]
        last = whole.num_tokens - 1  # where the verdict on the whole response is a step too
        assert sample.steps == tuple(sorted([(ends[0], 0.5), (ends[2], 2.5), (last, 0.0)]))
        assert (sample.turns, sample.reward, sample.failure) == (3, 0.0, None)
        assert ends[0] >= len(request.prompt_tokens)


def test_failed_episodes_have_no_reward_and_say_why(engine: LocalEngine) -> None:
    broken = [Broken(where, OSError("x")) for where in ("begin", "step")]
    samples = samples_of(engine, make_requests(2), broken)
    found = [(s.reward, s.turns, s.steps, s.rollout is None) for s in samples]
    assert found == [(None, 0, (), True), (None, 1, (), False)]
    assert all(f"OSError: x ({__file__}:" in sample.failure.error for sample in samples)
    assert all(sample.failure.of_episode and not sample.failure.may_pass for sample in samples)
