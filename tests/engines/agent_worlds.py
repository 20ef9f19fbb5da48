"""What tests of agents share: a tokenizer with a chat template, sessions of agents, and agents over plain HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import numpy as np
from episode_worlds import merging_tokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from megarl.core.types import Rollout, SampleRequest
from megarl.data.judge import Judge
from megarl.data.prompts import ChatTemplate
from megarl.engines.agents import ForeignAgent
from megarl.engines.local.engine import BatchSession
from megarl.engines.player import EpisodeLimits, EpisodeResult, Player
from megarl.engines.protocol import Begin, Engine, OnFinish, SamplingParams, Session, run_session

ROLES = "{{ {'system': '0', 'user': '1', 'assistant': '2', 'tool': '3'}[m.role] }}"
CALLS = "{% for call in m.tool_calls or [] %}{{ call.function.arguments.x }}{% endfor %}"
MARKED = "{% for m in messages %}" + ROLES + "{{ m.content }}" + CALLS + "<eos>{% endfor %}2"
"""Each message has a digit before it and an end token behind it, as in ChatML."""
FORGETFUL = (
    "{% set ns = namespace(last=0) %}{% for m in messages if m.role == 'user' %}{% set ns.last = m %}{% endfor %}"
    "{% set ns.is_old = True %}{% for m in messages %}{% if m == ns.last %}{% set ns.is_old = False %}{% endif %}"
    + ROLES
    + "{{ m.content.split('9')[-1] if m.role == 'assistant' and ns.is_old else m.content }}<eos>{% endfor %}2"
)
"""Drops what an answer says up to its last 9, if a message of the user follows, as Qwen3 drops thoughts."""
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
"""Contents back to back."""
CALL = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
"""Text of token 31 in ``chat_tokenizer``."""
Post = Callable[..., Awaitable[httpx.Response]]
"""(messages, **other keys) -> answer."""


def chat_tokenizer(template: str = PLAIN) -> PreTrainedTokenizerFast:
    tokenizer = merging_tokenizer()
    if template != PLAIN:
        core = json.loads(tokenizer.backend_tokenizer.to_str().replace('"jb"', json.dumps(CALL)))
        core["model"]["merges"] = core["model"]["merges"][:-1]
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(json.dumps(core)), pad_token="<pad>", eos_token="<eos>"
        )
    tokenizer.chat_template = template
    return tokenizer


class Scripted(Engine):
    """Answers request i with ``answers[i]``; columns are functions of all tokens up to theirs."""

    def __init__(self, *answers: list[int]) -> None:
        self.answers, self.asked = answers, list[SampleRequest]()

    def converse(self, begin: Begin, params: SamplingParams, on_finish: OnFinish = None) -> None:
        run_session(BatchSession(lambda requests: [self.answer(request) for request in requests]).run_episodes(begin))

    def answer(self, request: SampleRequest) -> Rollout:
        answer = self.answers[len(self.asked)][: request.max_response_tokens]
        self.asked.append(request)
        tokens, num = np.append(request.prompt_tokens, answer).astype(np.int32), len(answer)
        mask, rows = np.arange(len(tokens)) >= len(tokens) - num, np.arange(len(tokens)) < len(tokens) - 1
        rows &= np.arange(len(tokens)) >= request.known_rows
        logprobs, routes = self.columns(tokens)
        finish = "stop" if answer[-1] == 1 else "length"
        return Rollout(
            request.group, request.sample, tokens, mask, np.where(mask, logprobs, 0).astype(np.float32),
            np.where(rows[:, None, None], routes, 0).astype(np.uint8), rows, np.full(len(tokens), 3, np.int32), finish,
        )  # fmt: skip

    @staticmethod
    def columns(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sums = np.cumsum(tokens.astype(np.int64) * (1 + np.arange(len(tokens))))
        return -1.0 - sums % 97 / 97, (sums % 251)[:, None, None]


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
