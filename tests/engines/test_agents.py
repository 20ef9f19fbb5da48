"""Agents that speak OpenAI's chat completions, on the local engine: their requests become sequences as sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from agent_worlds import CALL, FORGETFUL, MARKED, Scripted, answer_of, chat_tokenizer, plain_http, play_agents
from episode_worlds import check_teacher_forced, play_all, says
from rollout_oracle import Oracle, make_requests

from megarl.core.types import Rollout, SampleRequest
from megarl.engines.local.engine import LocalEngine
from megarl.engines.player import EpisodeLimits, turn_seed
from megarl.engines.protocol import SamplingParams

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
    "other arguments": (MARKED, CALLED, follows(**calls('{"x": 8}')), {"tools": [{}]}, ["1aa<eos>28<eos>37<eos>2", "e<eos>"], 2),
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
    "stop": (MARKED, [4, 5, 6, 7, 1], follows(), {"stop": ["f", "e"]}, ["1aa<eos>2", "cde", "<eos>37<eos>2", "e<eos>"], 0),
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
    pieces = [tokenizer.decode(rollout.tokens[a:b]) for a, b in zip(starts, starts[1:], strict=False)]
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
