"""Agents that speak OpenAI's chat completions, on the local engine: their requests become sequences as sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import pytest
from agent_worlds import CALL, FORGETFUL, MARKED, Scripted, answer_of, chat_tokenizer, plain_http, play_agents
from episode_worlds import check_teacher_forced, play_all, says
from rollout_oracle import Oracle, make_requests

from megarl.core.types import Rollout, SampleRequest
from megarl.engines.agents import MOST_BYTES
from megarl.engines.local.engine import LocalEngine
from megarl.engines.player import EpisodeLimits, turn_seed
from megarl.engines.protocol import SamplingParams
from megarl.errors import ConfigError, RolloutError

SOME_STOPS = SamplingParams(max_response_tokens=100, stop_token_ids=(2, 3, 4, 5))
"""A turn ends with one of a, b, c, d."""
LIMITS = EpisodeLimits(response_tokens=1000, turns=6, turn_tokens=8, positions=64)
TEXTS = ("b0", "bb7", "b")


def unmerged(num: int, **options: Any) -> list[Any]:
    """Requests whose prompts are the tokens of their text."""
    tokenizer = chat_tokenizer()
    requests = make_requests(3 * num, **options)
    return [
        request
        for request in requests
        if tokenizer(tokenizer.decode(request.prompt_tokens))["input_ids"] == request.prompt_tokens.tolist()
    ][:num]


def request_of(seed: int, group: int = 0) -> SampleRequest:
    return SampleRequest(np.array([2], np.int32), group, 0, seed)


async def observer(texts: tuple[str, ...], prompt: str, base_url: str, api_key: str, seed: int) -> None:
    """Continues as the environment ``says(*texts)`` does."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    async with plain_http(base_url, api_key) as post:
        for text in texts:
            messages += [answer_of(await post(messages)), {"role": "tool", "content": text}]
        await post(messages)


def check_equal(rollout: Rollout, other: Rollout) -> None:
    for field in fields(Rollout):
        a, b = getattr(rollout, field.name), getattr(other, field.name)
        if field.name == "rollout_logprobs":
            np.testing.assert_allclose(a, b, atol=1e-6)
        else:
            assert np.array_equal(a, b), field.name


USER = {"role": "user", "content": "aa"}
CD, E, CUT = [4, 5, 1], [6, 1], [4, 5]
THOUGHT, APART, CALLED = [4, 21, 5, 1], [2, 3, 1], [31, 1]
Change = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""The answer to ``USER`` -> the messages of the second request."""


def follows(role: str = "tool", **change: Any) -> Change:
    """USER, the answer with changes, and a message with the content 7."""
    return lambda answer: [USER, answer | change, {"role": role, "content": "7"}]


def calls(arguments: str, **more: str) -> dict[str, Any]:
    return {"tool_calls": [{"id": "x", "type": "function", "function": {"name": "add", "arguments": arguments}} | more]}


CASES: dict[str, tuple[str, list[int], Change, dict[str, Any], list[str], int]] = {
    # template, first answer, second request, keys of the first request -> texts, sampled ones second; tokens dropped
    "unchanged": (MARKED, CD, follows(), {}, ["1aa<eos>2", "cd<eos>", "37<eos>2", "e<eos>"], 0),
    "white space": (MARKED, CD, follows(content=" cd\n"), {}, ["1aa<eos>2", "cd<eos>", "37<eos>2", "e<eos>"], 0),
    "parts": (
        MARKED, CD, follows(content=[{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]), {},
        ["1aa<eos>2", "cd<eos>", "37<eos>2", "e<eos>"], 0,
    ),
    "tokens that would merge": (MARKED, APART, follows(), {}, ["1aa<eos>2", "ab<eos>", "37<eos>2", "e<eos>"], 0),
    "other JSON": (
        MARKED, CALLED, follows(**calls('{ "x":1 }')), {"tools": [{}]},
        ["1aa<eos>2", f"{CALL}<eos>", "37<eos>2", "e<eos>"], 0,
    ),
    "other arguments": (
        MARKED, CALLED, follows(**calls('{"x": 8}')), {"tools": [{}]}, ["1aa<eos>28<eos>37<eos>2", "e<eos>"], 2,
    ),
    "a call as text": (MARKED, CALLED, follows(), {}, ["1aa<eos>2", f"{CALL}<eos>", "37<eos>2", "e<eos>"], 0),
    "edited": (MARKED, CD, follows(content="cdc"), {}, ["1aa<eos>2cdc<eos>37<eos>2", "e<eos>"], 3),
    "cut": (MARKED, CUT, follows(), {"max_tokens": 2}, ["1aa<eos>2", "cd", "<eos>37<eos>2", "e<eos>"], 0),
    "continued": (MARKED, CUT, follows(content="cdc"), {}, ["1aa<eos>2", "cd", "c<eos>37<eos>2", "e<eos>"], 0),
    "system prompt": (
        MARKED, CD, lambda answer: [{"role": "developer", "content": "b"}, *follows()(answer)], {},
        ["0b<eos>1aa<eos>2cd<eos>37<eos>2", "e<eos>"], 3,
    ),
    "thoughts in one task": (FORGETFUL, THOUGHT, follows(), {}, ["1aa<eos>2", "c9d<eos>", "37<eos>2", "e<eos>"], 0),
    "thoughts dropped": (FORGETFUL, THOUGHT, follows("user"), {}, ["1aa<eos>2d<eos>17<eos>2", "e<eos>"], 4),
    "repeated": (MARKED, CD, lambda answer: [USER], {}, ["1aa<eos>2", "e<eos>"], 3),
    "stop": (
        MARKED, [4, 5, 6, 7, 1], follows(), {"stop": ["f", "e"]}, ["1aa<eos>2", "cde", "<eos>37<eos>2", "e<eos>"], 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_second_request_continues_the_tokens_or_starts_anew(case: str) -> None:
    template, first, change, keys, texts, dropped = CASES[case]
    engine, tokenizer = Scripted(first, E), chat_tokenizer(template)

    async def agent(prompt: str, base_url: str, api_key: str, seed: int) -> None:
        async with plain_http(base_url, api_key) as post:
            await post(change(answer_of(await post([USER], **keys))))

    (result,) = play_agents(engine, [request_of(5)], agent, LIMITS, SOME_STOPS, tokenizer)
    assert result.failure is None
    rollout = result.rollout
    starts = [0, *(np.flatnonzero(np.diff(rollout.loss_mask)) + 1).tolist(), rollout.num_tokens]
    pieces = [tokenizer.decode(rollout.tokens[a:b]) for a, b in pairwise(starts)]
    assert pieces == texts
    assert result.num_dropped == dropped
    if len(texts) == 4 and case != "stop":
        assert rollout.tokens[starts[1] : starts[2]].tolist() == first
    assert result.turn_ends == [end - 1 for end in starts[2::2]]
    logprobs, routes = Scripted.columns(rollout.tokens)  # of all tokens before: a shifted row has another
    np.testing.assert_allclose(rollout.rollout_logprobs, np.where(rollout.loss_mask, logprobs, 0), rtol=1e-6)
    assert np.array_equal(rollout.routed_experts[:-1], routes[:-1])
    assert rollout.routed_mask[:-1].all()
    assert [asked.seed for asked in engine.asked] == [5, turn_seed(5, 1)]
    assert engine.asked[1].known_rows == (0 if len(texts) == 2 else starts[2] - (case != "stop"))


def test_equal_answers_keep_their_own_tokens() -> None:
    """Although one text, without its special token, is the name of both."""
    engine, tokenizer = Scripted(CD, [0, *CD], E), chat_tokenizer(MARKED)

    async def agent(prompt: str, base_url: str, api_key: str, seed: int) -> None:
        messages: list[dict[str, Any]] = [USER]
        async with plain_http(base_url, api_key) as post:
            for _ in range(3):
                messages += [answer_of(await post(messages)), {"role": "tool", "content": "7"}]

    (result,) = play_agents(engine, [request_of(5)], agent, LIMITS, SOME_STOPS, tokenizer)
    assert result.rollout.tokens[result.rollout.loss_mask].tolist() == [*CD, 0, *CD, *E]
    assert result.num_dropped == 0


def test_an_agent_gets_the_rollouts_of_an_environment(engine: LocalEngine, oracle: Oracle) -> None:
    """Token for token, although the texts of turns and observations would merge to other tokens."""
    requests = unmerged(6)
    played = play_agents(engine, requests, observer, LIMITS, SOME_STOPS, texts=TEXTS)
    others = play_all(engine, requests, says(*TEXTS), LIMITS, SOME_STOPS)
    for result, other in zip(played, others, strict=True):
        assert result.failure is None
        check_equal(result.rollout, other.rollout)
        check_teacher_forced(result, oracle, 1e-5, same_order=True)
        assert (result.turn_ends, result.num_dropped) == (other.turn_ends, 0)


REFUSED: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({"n": 2}, 400, None, "n: found 2, expected one of [1]"),
    ({"response_format": {"type": "json_object"}}, 400, None, "response_format: found "),
    ({"messages": []}, 400, None, "cannot be read"),
    ({"messages": [USER | {"content": ""}]}, 400, None, "no text"),
    ({"messages": "aa"}, 400, None, "TypeError"),
    ({"messages": [{"content": "a"}]}, 400, None, "KeyError: 'role'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None, "KeyError: 'text'"),
    (
        {"messages": [USER | {"content": "a" * 70}]},
        400,
        "context_length_exceeded",
        "70 tokens in request 1, expected at most 62",
    ),
    ({"max_tokens": 0.5}, 400, None, "max_tokens below 1"),
    ({"max_tokens": "many"}, 400, None, "ValueError"),
]


@pytest.mark.parametrize(("keys", "status", "code", "told"), REFUSED)
def test_a_refused_request_costs_nothing(
    engine: LocalEngine, keys: dict[str, Any], status: int, code: str | None, told: str
) -> None:
    async def agent(prompt: str, base_url: str, api_key: str, seed: int) -> None:
        async with plain_http(base_url, api_key) as post:
            refused = await post(**({"messages": [USER]} | keys))
            error = refused.json()["error"]
            assert (refused.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
            assert told in error["message"]
            answer_of(await post([USER]))

    (result,) = play_agents(engine, [request_of(5)], agent, LIMITS, SOME_STOPS)
    assert result.failure is None
    (alone,) = play_agents(engine, [request_of(5)], observer, LIMITS, SOME_STOPS, texts=())
    assert len(alone.turn_ends) == 1
    assert result.rollout.tokens[:2].tolist() == [2, 2]
    assert result.rollout.finish_reason != "abort"


def test_keys_name_episodes_and_paths_are_those_of_openai(engine: LocalEngine) -> None:
    keys, urls = list[str](), list[str]()

    async def agent(prompt: str, base_url: str, api_key: str, seed: int) -> None:
        keys.append(api_key)
        urls.append(base_url)
        async with plain_http(base_url, api_key) as post, plain_http(base_url, "sk-guessed") as guess:
            client = httpx.AsyncClient(base_url=base_url, headers={"Authorization": f"Bearer {api_key}"})
            async with client:
                assert (await client.get("/models")).json()["data"][0]["id"] == "policy"
                assert (await client.get("/files")).status_code == 404
                assert (await client.post("/chat/completions", content=b"{")).status_code == 400
                for body in (b"[" * 5000, b'{"messages": ["\\ud800"]}', b"null"):
                    assert (await client.post("/chat/completions", content=body)).status_code == 400
                large = await client.post("/chat/completions", content=b"x" * (MOST_BYTES + 1))
                assert (large.status_code, large.json()["error"]["type"]) == (413, "invalid_request_error")
            assert (await guess([USER])).status_code == 401
            assert base_url.startswith("http://127.0.0.1:")
            chunks = (await post([USER], stream=True, stream_options={"include_usage": True}, max_tokens=3)).text
            *events, done = [line.removeprefix("data: ") for line in chunks.split("\n\n") if line]
            first, last, usage = map(json.loads, events)
            assert done == "[DONE]"
            content = first["choices"][0]["delta"]["content"]
            assert last["choices"][0]["finish_reason"] in ("stop", "length")
            assert 1 <= usage["usage"]["completion_tokens"] <= 3
            plain = (await post([USER], logprobs=True, max_tokens=3)).json()["choices"][0]
            sampled = "".join(t["token"] for t in plain["logprobs"]["content"] if t["token"][0] != "<")
            assert plain["message"]["content"] == sampled  # without special tokens
            assert content

    results = play_agents(engine, [request_of(5), request_of(6, 1)], agent, LIMITS, SOME_STOPS)
    assert [result.failure for result in results] == [None, None]
    assert (len({*keys}), len({*urls})) == (2, 1)
    with pytest.raises(httpx.ConnectError):  # the server ends with the session
        httpx.get(urls[0], trust_env=False)


async def crashes(prompt: str, base_url: str, api_key: str, seed: int) -> None:
    async with plain_http(base_url, api_key) as post:
        await post([USER])
    raise OSError("no disk")


async def hangs(prompt: str, base_url: str, api_key: str, seed: int) -> None:
    async with plain_http(base_url, api_key) as post:
        await post([USER])
        await asyncio.Event().wait()


async def asks_nothing(**_: Any) -> None:
    pass


async def never_ends(prompt: str, base_url: str, api_key: str, seed: int) -> None:
    async with plain_http(base_url, api_key) as post:
        messages = [USER]
        while True:
            messages += [answer_of(await post(messages, max_tokens=1)), USER]


FAILURES: dict[str, tuple[Any, dict[str, float], str | None, str]] = {
    # agent, limits -> failure, finish reason
    "crashes": (crashes, {}, "the agent failed: OSError: no disk", "abort"),
    "hangs": (hangs, {"step_s": 0.5}, "the agent is late: no request in 0.5 s", "abort"),
    "episode": (hangs, {"episode_s": 0.5}, "the agent is late: no request in 60 s, or no end in 0.5 s", "abort"),
    "asks nothing": (asks_nothing, {}, "the agent asked for no turn", ""),
    "too many turns": (never_ends, {"turns": 3}, None, "length"),
    "too many tokens": (never_ends, {"turns": 99}, None, "length"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failing_agent_costs_its_episode_alone(engine: LocalEngine, oracle: Oracle, case: str) -> None:
    """An agent that gives up for want of room has ended, and is judged as any response of full length."""
    agent, limits, failure, finish = FAILURES[case]

    async def either(prompt: str, seed: int, **place: str) -> None:
        await (observer(TEXTS, prompt, seed=seed, **place) if seed < 5 else agent(prompt=prompt, seed=seed, **place))

    requests = [request_of(4), request_of(5, 1)]
    good, bad = play_agents(engine, requests, either, replace(LIMITS, turn_tokens=4, **limits), SOME_STOPS)
    if not {"turns", "step_s", "episode_s"} & {*limits}:  # which hold for both
        assert good.failure is None
    assert str(bad.failure).startswith(str(failure))
    if bad.rollout is not None:
        assert bad.rollout.finish_reason == finish
        check_teacher_forced(bad, oracle, 1e-5, same_order=True)
    if case == "too many turns":
        assert len(bad.turn_ends) == 3
    if case == "too many tokens":
        assert bad.rollout.num_tokens >= 60


def test_errors_of_the_engine_end_the_session(engine: LocalEngine) -> None:
    class Broken(Scripted):
        def answer(self, request: SampleRequest) -> Rollout:
            if self.asked:
                raise RolloutError("the server is gone")
            return super().answer(request)

    async def stubborn(prompt: str, base_url: str, api_key: str, seed: int) -> None:
        async with plain_http(base_url, api_key) as post:
            while True:
                await post([USER])

    with pytest.raises(RolloutError, match="the server is gone"):
        play_agents(Broken(CD, E), [request_of(5), request_of(6, 1)], stubborn, LIMITS, SOME_STOPS)
    with pytest.raises(ConfigError, match="no such tool"):
        play_agents(engine, [request_of(5)], refuses, LIMITS, SOME_STOPS)


async def refuses(**_: Any) -> None:
    raise ConfigError("no such tool")
