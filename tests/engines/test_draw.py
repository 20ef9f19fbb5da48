"""Drawing what a rule asks for: over a session whose answers come one by one, and over one that works in batches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from generate_server import GenerateServer, serving
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megarl.config.tables.rollout import SGLangConfig
from megarl.core.choices.stopping import SamplingRule, Sequential, Uniform
from megarl.core.sampling.collector import Ask, Collector, Selection
from megarl.core.types import Rollout, SampleRequest
from megarl.data.judge import Judge
from megarl.data.prompts import Prompt
from megarl.engines.local.engine import BatchSession, LocalEngine
from megarl.engines.player import Draw, EpisodeLimits, Player
from megarl.engines.protocol import Begin, Engine, OnFinish, SamplingParams, run_session
from megarl.engines.sglang.client import Call, SGLangClient
from megarl.errors import RolloutError

TIMEOUT_S = 600.0
Key = tuple[int, int]
Holds = Callable[["Server", int, int], bool]


def says_one(*, prompt: str, response: str, answer: str) -> float:
    if response == "2":
        raise ValueError("no verdict")
    return float(response == "1")


says_one.instantaneous = True  # type: ignore[attr-defined]


def first_is_digit(*, prompt: str, response: str, answer: str) -> float:
    return float(response[:1].isdigit())


first_is_digit.instantaneous = True  # type: ignore[attr-defined]


class Server(GenerateServer):
    """Answers with a character for (group, sample), once it lets it go."""

    def __init__(self, says: Callable[[int, int], str], holds: Holds = lambda *_: False) -> None:
        """``holds(server, group, sample)``: whether this answer has to wait still; asked again when any comes."""
        self.says, self.holds = says, holds
        self.asked: list[Key] = []
        self.answered: list[Key] = []
        self.lost: list[Key] = []
        self.changed = asyncio.Condition()
        super().__init__()

    async def generate(self, body: Any) -> web.Response:
        key = body["group"], body["sample"]
        try:
            async with self.changed:
                self.asked.append(key)
                self.changed.notify_all()
                await asyncio.wait_for(self.changed.wait_for(lambda: not self.holds(self, *key)), TIMEOUT_S)
                self.answered.append(key)
                self.changed.notify_all()
        except TimeoutError:
            return web.Response(status=400, text=f"{key} waited for what never came")
        except asyncio.CancelledError:
            self.lost.append(key)
            raise
        if (said := self.says(*key)) == "413":
            return web.Response(status=413, text="too large")
        return web.json_response({"says": said})


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_path)


@contextmanager
def draw_of(asker: Any, tokenizer: PreTrainedTokenizerBase, reward: str = "says_one") -> Iterator[Draw]:
    prompt = Prompt(0, np.array([3], np.int32), "1", "1", "here")
    with Judge(f"test_draw:{reward}") as judge:
        yield Draw(
            asker,
            lambda number, sample: (SampleRequest(prompt.tokens, number, sample, seed=100 * number + sample), prompt),
            Player(tokenizer, judge, EpisodeLimits(4)),
        )


def make_rollout(request: SampleRequest, token: int) -> Rollout:
    zeros = np.zeros(2, np.int32)
    return Rollout(
        request.group, request.sample, np.array([3, token], np.int32), np.array([False, True]),
        np.zeros(2, np.float32), None, None, zeros, "stop",
    )  # fmt: skip


def served(server: Server, draw: Draw, tokenizer: PreTrainedTokenizerBase) -> None:
    client = SGLangClient([server.url], SGLangConfig())
    call = Call(
        lambda request: {"group": request.group, "sample": request.sample},
        lambda request, answer, rid, stopped: make_rollout(request, tokenizer.convert_tokens_to_ids(answer["says"])),
    )
    client.converse(draw.begin, call)


def collected(rule: SamplingRule, says: Callable[[int, int], str], prompts: int, **options: Any) -> Selection:
    """What the rule selects when everything comes in order."""
    collector = Collector(rule, prompts, **options)
    asks = collector.start()
    while not collector.done:
        ask = asks.pop(0)
        for sample in ask.samples:
            text = says(ask.prompt, sample)
            asks += collector.add(ask.prompt, sample, None if text == "2" else float(text == "1"))
    return collector.select()


def test_no_prompt_waits_for_another_one(tokenizer: PreTrainedTokenizerBase) -> None:
    """The server keeps the first prompt's samples back until it was asked for everything of the others' last rounds."""
    rule = Sequential(1, 1, round_size=2, max_samples=6, train_size=2)

    def says(group: int, sample: int) -> str:
        return "1" if group == 0 and sample == 1 else "0"

    later = {(group, sample) for group in (1, 2, 3) for sample in range(6)}
    collector = Collector(rule, 4)
    with (
        serving(Server(says, lambda server, group, _: group == 0 and not later <= set(server.answered))) as (server,),
        draw_of(collector, tokenizer) as draw,
    ):
        served(server, draw, tokenizer)
    assert sorted(draw.samples) == sorted({*later, (0, 0), (0, 1)})
    assert set(server.answered[-2:]) == {(0, 0), (0, 1)}
    found, expected = collector.select(), collected(rule, says, 4)
    np.testing.assert_array_equal(found.samples, expected.samples)
    np.testing.assert_array_equal(found.drawn, expected.drawn)


def test_what_is_under_way_when_there_is_enough_is_cancelled(tokenizer: PreTrainedTokenizerBase) -> None:
    """Two spare prompts whose answers never come: the session ends without them, and the server hears of it."""
    collector = Collector(Uniform(2), 1, refill=True, max_prompts=9, spare=2)
    with (
        serving(Server(lambda _, sample: str(sample), lambda server, group, _: group > 0 or len(server.asked) < 6)) as (
            server,
        ),
        draw_of(collector, tokenizer) as draw,
    ):
        served(server, draw, tokenizer)
        assert sorted(draw.samples) == [(0, 0), (0, 1)]
        assert collector.done
        for _ in range(3000):
            if len(server.lost) == 4:
                break
            threading.Event().wait(0.02)
        assert sorted(server.lost) == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_samples_that_fail_count_as_drawn(tokenizer: PreTrainedTokenizerBase) -> None:
    """Without a verdict, or because no server takes the request."""
    rule = Sequential(1, 1, round_size=2, max_samples=4, train_size=2)

    def says(group: int, sample: int) -> str:
        return ("2", "0", "1", "413")[sample] if group == 0 else "2"

    collector = Collector(rule, 2)
    with serving(Server(says)) as (server,), draw_of(collector, tokenizer) as draw:
        served(server, draw, tokenizer)
    assert len(draw.samples) == 8
    failed = {key: sample for key, sample in draw.samples.items() if sample.reward is None}
    assert set(failed) == {(0, 0), (0, 3), *((1, sample) for sample in range(4))}
    assert [key for key, sample in draw.samples.items() if sample.rollout is None] == [(0, 3)]
    assert server.asked.count((0, 3)) == SGLangConfig().attempts
    told = failed[0, 3].failure
    assert "HTTP 413: too large" in told.error
    assert told.may_pass
    assert collector.select().drawn.tolist() == [[0, 1], [4, 4], [2, 0], [1, 0]]


def test_an_answer_that_comes_with_the_last_one_is_left_out(tokenizer: PreTrainedTokenizerBase) -> None:
    """A batch of the engine holds more than is needed: what follows the decisive sample is left out, whatever it is."""

    def sample(requests: Sequence[SampleRequest]) -> list[Rollout]:
        return [make_rollout(r, tokenizer.convert_tokens_to_ids(str(r.sample))) for r in requests]

    collector = Collector(Uniform(2), 1, refill=True, max_prompts=9, spare=2)
    with draw_of(collector, tokenizer) as draw:
        draw.run(Batches(sample), SamplingParams())
    assert sorted(draw.samples) == [(0, 0), (0, 1)]


def test_the_real_engine_answers_the_same_whatever_it_is_asked_for_together(
    engine: LocalEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    rule = Sequential(2, 2, round_size=1, max_samples=12, train_size=4)
    params = SamplingParams(max_response_tokens=2, stop_token_ids=(1,))
    found = []
    for prompts in (6, 3):
        collector = Collector(rule, prompts)
        with draw_of(collector, tokenizer, "first_is_digit") as draw:
            draw.run(engine, params)
        assert collector.done
        asked = {(pool.prompt, i) for pool in collector.select().pools for i in range(pool.num_asked)}
        assert set(draw.samples) == asked
        assert len({pool.num_asked for pool in collector.select().pools}) > 1
        found.append({key: sample.rollout.tokens.tolist() for key, sample in draw.samples.items() if sample.rollout})
    assert found[1] == {key: tokens for key, tokens in found[0].items() if key[0] < 3}


class Batches(Engine):
    """Samples in batches; a token for each (group, sample)."""

    def __init__(self, sample: Callable[[Sequence[SampleRequest]], list[Rollout]]) -> None:
        self._sample = sample

    def converse(self, begin: Begin, params: SamplingParams, on_finish: OnFinish = None) -> None:
        run_session(BatchSession(self._sample).run_episodes(begin))


@pytest.mark.parametrize("where", ["engine", "rule"])
def test_an_error_ends_the_session_and_is_raised_as_it_was(tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    def broken(requests: Sequence[SampleRequest]) -> list[Rollout]:
        if where == "engine":
            raise RolloutError("the engine broke")
        return [make_rollout(r, tokenizer.convert_tokens_to_ids("1")) for r in requests]

    class Broken(Collector):
        def add(self, prompt: int, sample: int, reward: float | None) -> list[Ask]:
            raise RolloutError("the rule broke")

    collector = Broken(Uniform(2), 3)
    with draw_of(collector, tokenizer) as draw, pytest.raises(RolloutError, match=f"the {where} broke"):
        draw.run(Batches(broken), SamplingParams())
