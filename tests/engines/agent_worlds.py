"""What tests of agents share: a tokenizer with a chat template, sessions of agents, and agents over plain HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
from episode_worlds import merging_tokenizer
from transformers import PreTrainedTokenizerFast

from megarl.core.types import SampleRequest
from megarl.data.judge import Judge
from megarl.data.prompts import ChatTemplate
from megarl.engines.agents import ForeignAgent
from megarl.engines.player import EpisodeLimits, EpisodeResult, Player
from megarl.engines.protocol import Engine, SamplingParams, Session

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
"""Contents back to back."""
CALL = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
"""Text of token 31 in ``chat_tokenizer``."""
Post = Callable[..., Awaitable[httpx.Response]]
"""(messages, **other keys) -> answer."""


def chat_tokenizer(template: str = PLAIN) -> PreTrainedTokenizerFast:
    tokenizer = merging_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@asynccontextmanager
async def plain_http(base_url: str, api_key: str) -> AsyncIterator[Post]:
    headers = {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=600.0, trust_env=False) as client:

        async def post(messages: Sequence[Mapping[str, Any]], headers: Any = None, **keys: Any) -> httpx.Response:
            body = {"messages": messages, **keys}
            return await client.post("/chat/completions", json=body, headers=headers)

        yield post


def answer_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


def play_agents(
    engine: Engine,
    requests: Sequence[SampleRequest],
    agent: Callable[..., Awaitable[object]],
    limits: EpisodeLimits,
    params: SamplingParams,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **options: Any,
) -> list[EpisodeResult]:
    """The episodes of all requests in one session; each agent gets the text of its request's tokens."""
    tokenizer = tokenizer or chat_tokenizer()
    player = Player(tokenizer, cast(Judge, None), limits, ForeignAgent(agent, options, ChatTemplate(tokenizer, {})))
    played: dict[int, EpisodeResult] = {}

    def begin(session: Session) -> None:
        async def one(i: int) -> None:
            prompt = tokenizer.decode(requests[i].prompt_tokens)
            played[i] = await player.play_episode(session, requests[i], prompt)

        for i in range(len(requests)):
            session.start(one(i))

    engine.converse(begin, params)
    return [played[i] for i in range(len(requests))]
