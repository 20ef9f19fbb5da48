"""Episodes on a real SGLang server: their joined columns, and sessions in which something is slow, dead or unwanted."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from agent_worlds import MARKED, answer_of, chat_tokenizer, plain_http, play_agents
from episode_worlds import (
    Script,
    check_joined,
    check_teacher_forced,
    for_ever,
    play_all,
    player_of,
    says,
)
from rollout_oracle import make_requests
from sglang_fixtures import START_DEADLINE_S
from sglang_oracle import CLOSE, Weights, noisy, oracle_of

from megarl.config.tables.rollout import SGLangConfig
from megarl.core.types import Rollout, SampleRequest
from megarl.data.tiny import write_tiny_model
from megarl.engines.player import EpisodeLimits
from megarl.engines.protocol import SamplingParams, Session
from megarl.engines.sglang import engine as sglang_engine
from megarl.engines.sglang.engine import SGLangEngine
from megarl.engines.sglang.fleet import Fleet
from megarl.engines.sglang.plugin.compact import HEADER
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec
from megarl.engines.weights import WeightForm

pytestmark = pytest.mark.sglang

POSITIONS = 4096
LAYERS, TOP_K = 3, 2
SOME_STOPS = SamplingParams(max_response_tokens=100, stop_token_ids=tuple(range(1, 6)))
LIMITS = EpisodeLimits(response_tokens=40, turns=4, turn_tokens=8, positions=POSITIONS)


@dataclass(frozen=True)
class Served:
    """One server that is started again when it dies, of a model with room for long responses."""

    engine: SGLangEngine
    plain: SGLangEngine
    """The same without the short form of routes."""
    server: Server
    model: Path
    weights: Weights
    told: list[str]

    def running(self) -> int:
        """Requests that the server works on, or that wait in it."""
        loads = httpx.get(f"{self.server.url}/v1/loads", params={"include": "core"}, timeout=600.0).json()["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)

    async def running_becomes(self, num: int) -> None:
        async with asyncio.timeout(600.0):
            while await asyncio.to_thread(self.running) != num:
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def served(sglang_spec: ServerSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("episodes")
    sizes = {"hidden_size": 64, "num_layers": LAYERS, "num_experts": 8, "top_k": TOP_K, "expert_width": 32}
    model = write_tiny_model(folder / "model", max_positions=POSITIONS, initializer_range=0.3, **sizes)
    spec = replace(sglang_spec, model_path=model, log_file=folder / "server.log", max_total_tokens=4 * POSITIONS)
    told: list[str] = []
    settings = SGLangConfig(concurrency=16, start_deadline_s=START_DEADLINE_S, max_restarts=9, checksums=False)
    fleet = Fleet([spec], settings=settings, poll_s=0.1, health_s=3600.0, tell=told.append)
    config, form = json.loads((model / "config.json").read_text()), WeightForm(torch.float32)
    urls = fleet.start()
    engine = SGLangEngine(urls, config, fleet=fleet, settings=settings, form=form)
    weights = noisy(model, 7)
    engine.update_weights(weights.items(), 3)
    plain = SGLangEngine(urls, config, fleet=None, settings=settings, form=form)
    del plain._client.headers[HEADER]
    plain.weight_version, plain._complete = 3, True  # those of the other, on the same server
    (server,) = [member.process for member in fleet.members if member.process]
    yield Served(engine, plain, server, model, weights, told)
    engine.close()


@pytest.mark.parametrize("form", ["engine", "plain"])
def test_the_joined_turns_are_what_one_pass_over_the_text_says(served: Served, form: str) -> None:
    """Of transformers, and of the server itself with an empty cache."""
    requests = make_requests(6, copies=2)
    engine, oracle = getattr(served, form), oracle_of(served.model, served.weights)
    joined = check_joined(engine, requests, oracle, SOME_STOPS, LIMITS, close=CLOSE, is_local=False)
    httpx.post(f"{served.server.url}/flush_cache", timeout=600.0).raise_for_status()
    for request, whole in zip(requests, joined, strict=True):
        assert set(whole.weight_versions.tolist()) == {3}
        (again,) = engine.generate(
            [replace(request, prompt_tokens=whole.tokens)], replace(SOME_STOPS, max_response_tokens=1)
        )
        rows = slice(0, min(whole.num_tokens - 1, oracle.clear(whole.tokens)))  # in another batch, ties end otherwise
        assert np.array_equal(np.sort(whole.routed_experts[rows], -1), np.sort(again.routed_experts[rows], -1))


def test_an_agent_gets_what_one_pass_over_the_text_says(served: Served) -> None:
    """Over HTTP, in two branches of a conversation: the later branch is the rollout, and has its tokens' own routes."""
    oracle, branches = oracle_of(served.model, served.weights), []

    async def agent(prompt: str, base_url: str, api_key: str, seed: int) -> None:
        async with plain_http(base_url, api_key) as post:
            messages = [{"role": "user", "content": prompt}]
            messages.append(answer_of(await post(messages)))
            for text in ("b0", "bb7"):
                branches.append((await post([*messages, {"role": "tool", "content": text}])).json()["usage"])

    requests = make_requests(4)
    limits = replace(LIMITS, response_tokens=100)
    tokenizer = chat_tokenizer(MARKED)  # its template writes the end token, with which some answers stop
    for result in play_agents(served.engine, requests, agent, limits, SOME_STOPS, tokenizer):
        assert result.failure is None
        assert len(result.turn_ends) == 2
        assert result.num_dropped >= 1
        check_teacher_forced(result, oracle, CLOSE, same_order=False)
        assert result.rollout.routed_mask[:-1].all()
    assert len(branches) == 2 * len(requests)


def test_later_turns_are_not_sent_the_rows_that_are_known(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[SampleRequest, Any]] = []
    original = sglang_engine.parse_answer

    def recording(request: SampleRequest, answer: Any, *known: Any) -> Rollout:
        seen.append((request, answer))
        return original(request, answer, *known)

    monkeypatch.setattr(sglang_engine, "parse_answer", recording)
    play_all(served.plain, make_requests(4), says("b0", "bb7", "b"), LIMITS, SOME_STOPS)
    later = 0
    for request, answer in seen:
        rows = len(base64.b64decode(answer["meta_info"]["routed_experts"])) / (4 * LAYERS * TOP_K)
        assert rows == len(request.prompt_tokens) + len(answer["output_ids"]) - 1 - request.known_rows
        later += request.known_rows > 0
    assert later >= 4
    known = {(request.group, request.known_rows) for request, _ in seen}
    assert len(known) == len(seen)  # more from turn to turn


def test_a_cancelled_episode_ends_on_the_server_too(served: Served) -> None:
    """Two ask for thousands of tokens, are decoded together and would end together: one that runs alone shows that the
    other was aborted."""
    script, counts = Script(for_ever), []
    limits = EpisodeLimits(response_tokens=POSITIONS, turns=2, positions=POSITIONS)

    def begin(session: Session) -> None:
        async def one(i: int) -> None:
            request = SampleRequest(np.full(8, 3 + i, np.int32), i, 0, i)
            await player_of(script, limits).play_episode(session, request, "")

        async def cancels() -> None:
            for running in (2, 1, 0):
                await served.running_becomes(running)
                counts.append(running)
                if running:
                    tasks[running - 1].cancel()

        tasks = [session.start(one(i)) for i in range(2)]
        session.start(cancels())

    assert served.running() == 0
    served.engine.converse(begin, SamplingParams(max_response_tokens=POSITIONS))
    assert counts == [2, 1, 0]
    assert script.closed == [1, 1]
    assert script.turns == []
