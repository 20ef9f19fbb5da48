"""Agents that speak OpenAI's chat completions, on the local engine: their requests become sequences as sampled."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from agent_worlds import answer_of, chat_tokenizer, plain_http, play_agents
from episode_worlds import check_teacher_forced, play_all, says
from rollout_oracle import Oracle, make_requests

from megarl.core.types import Rollout
from megarl.engines.local.engine import LocalEngine
from megarl.engines.player import EpisodeLimits
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
