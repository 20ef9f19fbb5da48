"""Responses that end before they are complete, and go on: what servers answer, and what is kept of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from generate_server import SamplingServer, serving
from safetensors.torch import load_file, save_file
from sglang_fixtures import START_DEADLINE_S
from sglang_oracle import CLOSE, logprob_gap, noisy, oracle_of, pause_after, same_sets

from megarl.config.tables.rollout import SGLangConfig
from megarl.core.metrics import finalize
from megarl.core.types import Rollout, SampleRequest
from megarl.data.tiny import EOS_ID, write_tiny_model
from megarl.engines.protocol import SamplingParams, go_on
from megarl.engines.sglang import client as client_module
from megarl.engines.sglang.engine import SGLangEngine
from megarl.engines.sglang.fleet import Fleet
from megarl.engines.sglang.spec import ServerSpec
from megarl.engines.weights import WeightForm
from megarl.errors import RequestError, RolloutError
from megarl.routes.turns import join, known_rows, provenance_metrics, row_versions

SHAPE = {"layers": 3, "experts": 16, "top_k": 2}
END, LIMIT, DRAWN = 39, 8, 4
CONFIG = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": SHAPE["layers"],
    "num_experts": SHAPE["experts"],
    "num_experts_per_tok": SHAPE["top_k"],
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "eos_token_id": END,
}
PARAMS = SamplingParams(max_response_tokens=LIMIT, stop_token_ids=(END,))
PROMPT = np.arange(2, 14, dtype=np.int32)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "BACKOFF_S", 0.01)
    monkeypatch.setattr(client_module, "STOP_AGAIN_S", 0.01)


def engine_of(servers: Sequence[SamplingServer], reread: Any = "replay", **settings: Any) -> SGLangEngine:
    urls = [server.url for server in servers]
    engine = SGLangEngine(urls, CONFIG, fleet=None, settings=SGLangConfig(**settings), reread=reread, tell=print)
    engine.weight_version, engine._complete = 0, True
    return engine


def pause_when(engine: SGLangEngine, ready: Callable[[], bool], requests: Sequence[SampleRequest], **changes: Any):
    """The parts of the responses when the engine is paused as soon as ``ready`` holds, and of one asked for later."""
    parts: dict[int, Rollout] = {}

    def begin(session: Any) -> None:
        async def sample(index: int) -> None:
            parts[index] = await session.sample(requests[index])

        async def pause() -> None:
            while not ready():
                await asyncio.sleep(0.002)
            session.pause()
            parts[len(requests)] = await session.sample(requests[0])

        for index in range(len(requests)):
            session.start(sample(index))
        session.start(pause())

    engine.converse(begin, replace(PARAMS, **changes))
    return [parts[index] for index in sorted(parts)]


def requests_of(groups: int, **changes: Any) -> list[SampleRequest]:
    return [replace(SampleRequest(PROMPT, group, 0, 0), **changes) for group in range(groups)]


def check_alone(part: Rollout) -> None:
    assert (part.tokens.tolist(), part.finish_reason) == (PROMPT.tolist(), "pause")
    assert not (part.loss_mask | (part.rollout_logprobs != 0)).any()
    assert part.routed_experts is None
    assert known_rows(part) == 0
    assert set(part.weight_versions) == {0}


@pytest.mark.parametrize(
    ("last", "limit", "expected"), [(5, 8, "pause"), (END, 8, "stop"), (5, DRAWN + 1, "length")], ids=str
)
def test_a_running_request_ends_with_what_it_has_and_goes_on_elsewhere(last: int, limit: int, expected: str) -> None:
    """The server draws one more token after the call: it may be the response's last."""
    with serving(SamplingServer(DRAWN, last=last, **SHAPE)) as (server,):
        server.deaf = 1
        engine = engine_of([server])
        part, later = pause_when(engine, lambda: server.running == 1, requests_of(1), max_response_tokens=limit)
        check_alone(later)
        assert (part.response_tokens.tolist(), part.finish_reason) == ([7] * DRAWN + [last], expected)
        assert part.routed_mask.tolist() == [True] * (part.num_tokens - 1) + [False]
        assert part.rollout_logprobs[part.loss_mask].tolist() == [-1.0] * (DRAWN + 1)
        assert engine.answer_counts["lost_parts"] == 0
        server.version = engine.weight_version = 1
        (rest,) = engine.generate([go_on(requests_of(1)[0], part, DRAWN + 1 + 3)], PARAMS)
    whole = join(part, rest)
    assert whole.weight_versions.tolist() == [0] * part.num_tokens + [1] * 3
    assert row_versions(whole).tolist() == [0] * (part.num_tokens - 1) + [1] * 4
    assert whole.loss_mask.sum() == DRAWN + 1 + 3
    assert whole.routed_mask.tolist() == [True] * (whole.num_tokens - 1) + [False]
    assert whole.finish_reason == "length"


def test_requests_that_wait_come_back_with_the_prompt_alone() -> None:
    """In the server's queue, here, and between two attempts."""
    with serving(SamplingServer(DRAWN, places=1, **SHAPE)) as (server,):
        engine = engine_of([server], concurrency=2)
        running, *others = pause_when(engine, lambda: server.asked == 2, requests_of(4))
    assert len(running.response_tokens) == DRAWN + 1
    assert len(others) == 4
    for part in others:
        check_alone(part)
    assert engine.answer_counts["lost_parts"] == 0


class Busy(SamplingServer):
    async def generate(self, body: Any) -> web.Response:
        self.asked += 1
        return web.Response(status=503, headers={"Retry-After": "30"})


class Odd(SamplingServer):
    """Answers calls to end with the routes of another request."""

    def _answer(self, body: Any, output: list[int], reason: dict[str, Any]) -> dict[str, Any]:
        return super()._answer(body | {"rid": "another"}, output, reason)


class Retracted(SamplingServer):
    """Its memory is full, and the request waits to be read again: SGLang answers with 50 of its tokens, or 100, ..."""

    def _answer(self, body: Any, output: list[int], reason: dict[str, Any]) -> dict[str, Any]:
        answer = super()._answer(body, output, {"type": "abort", "message": "Abort in waiting queue"})
        for name in ("prompt_tokens", "routed_experts", "num_retractions"):
            del answer["meta_info"][name]
        return answer


class Dying(SamplingServer):
    async def abort(self, body: Any) -> web.Response:
        self._loop.call_soon(self._loop.stop)
        raise web.HTTPInternalServerError


@pytest.mark.parametrize(
    ("kind", "deaf", "lost"), [(Busy, 0, 0), (Odd, 0, 1), (Retracted, 0, 1), (Dying, 0, 1), (SamplingServer, 10**9, 1)]
)
def test_no_server_delays_a_pause(
    kind: type[SamplingServer],
    deaf: int,
    lost: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One that is busy, answers nonsense, retracts, dies, or does not answer in time: a part is lost, and counted."""
    monkeypatch.setattr(client_module, "PAUSE_S", 0.2 if deaf else 600.0)
    with serving(kind(DRAWN, **SHAPE)) as (server,):
        server.deaf = deaf
        engine = engine_of([server])
        for part in pause_when(engine, lambda: server.asked == 1, requests_of(1)):
            check_alone(part)
    assert engine.answer_counts["lost_parts"] == lost
    assert ("lost the tokens so far" in capsys.readouterr().out) == bool(lost)


class Ending(SamplingServer):
    """Ends each request by itself, as a foreign pause of the server does."""

    async def generate(self, body: Any) -> web.Response:
        self._loop.call_later(0.001, lambda: self.ends[body["rid"]].set())
        return await super().generate(body)


def test_an_end_that_nobody_asked_for_stays_an_error() -> None:
    with serving(Ending(DRAWN, **SHAPE)) as (server,):
        engine = engine_of([server], attempts=2)
        with pytest.raises(RolloutError, match=r"2 attempts failed, .* finished with abort, expected stop or"):
            engine.generate(requests_of(1), PARAMS)


@pytest.mark.parametrize("reread", ["replay", "drop", "ask"])
def test_retracted_answers(reread: str) -> None:
    """Replayed with the rows of the second reading, without them, or asked for again, up to a number of attempts."""
    retracted, calm = (SamplingServer(LIMIT, retractions=number, **SHAPE) for number in (2, 0))
    with serving(retracted, calm) as servers:
        engine = engine_of(servers, reread)
        (rollout,) = engine.generate(requests_of(1), PARAMS)
        counts = dict(engine.answer_counts)
        if reread == "ask":
            with pytest.raises(RequestError, match=r"2 attempts failed.* read it again; lower sglang\.concurrency"):
                engine_of([retracted], reread, attempts=2).generate(requests_of(1), PARAMS)
    assert counts["retractions"] == 2
    assert counts.get("retracted_answers", 0) == (reread == "ask")
    generated = [False] * len(PROMPT) + [True] * (LIMIT - 1) + [False]
    found = None if rollout.reread_mask is None else rollout.reread_mask.tolist()
    assert found == (None if reread == "ask" else generated)
    rows = np.arange(rollout.num_tokens) < rollout.num_tokens - 1
    assert rollout.routed_mask.tolist() == (rows & ~np.array(generated) if reread == "drop" else rows).tolist()
    share = finalize(provenance_metrics([rollout], 0))["routes/reread_rows_fraction"]
    assert share == pytest.approx(0.0 if reread == "ask" else (LIMIT - 1) / rollout.num_tokens)


def test_the_idle_share_is_that_of_slots_without_a_request() -> None:
    """One server gives its answer a while after the other has given both of its."""
    finished: list[int] = []

    class Slow(SamplingServer):
        async def generate(self, body: Any) -> web.Response:
            while sum(finished) < 2:
                await asyncio.sleep(0.002)
            await asyncio.sleep(0.3)
            return await super().generate(body)

    with serving(SamplingServer(LIMIT, **SHAPE), Slow(LIMIT, **SHAPE)) as servers:
        engine = engine_of(servers)
        engine.generate(requests_of(3), PARAMS, finished.append)
    slots, busy = (engine.answer_counts[name] for name in ("slot_ms", "busy_slot_ms"))
    assert slots >= 3 * 300
    assert 300 <= busy <= slots - 2 * 300


def write_endless(folder: Path, positions: int) -> Path:
    """A model whose end token is hardly ever drawn: its logit is 0 among large ones."""
    write_tiny_model(
        folder, hidden_size=64, num_experts=8, expert_width=32, initializer_range=0.3, max_positions=positions
    )
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] *= 2.5
    tensors["lm_head.weight"][EOS_ID] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def real(request: pytest.FixtureRequest, tmp_path: Path, sglang_python: Path) -> Iterator[tuple[Path, SGLangEngine]]:
    """A model, and an engine on a server with its checkpoint."""
    positions, memory, *words = request.param
    model = write_endless(tmp_path / "model", positions)
    log = tmp_path / "log"
    spec = ServerSpec(model, sglang_python, "float32", log, max_total_tokens=memory, extra_args=tuple(words))
    fleet = Fleet(specs=[spec], settings=SGLangConfig(start_deadline_s=START_DEADLINE_S))
    settings = SGLangConfig(concurrency=32, start_deadline_s=START_DEADLINE_S)
    config, form = json.loads((model / "config.json").read_text()), WeightForm(torch.float32)
    engine = SGLangEngine(fleet.start(), config, fleet=fleet, settings=settings, form=form)
    yield model, engine
    engine.close()


@pytest.mark.sglang
@pytest.mark.parametrize("real", [(20_000, 20_000)], indirect=True)
def test_a_real_server_ends_requests_and_they_go_on_under_new_weights(real: tuple[Path, SGLangEngine]) -> None:
    """Some responses of 4000 tokens run, and others wait in the server, until one of 24 tokens is complete."""
    model, engine = real
    weights = [noisy(model, seed) for seed in range(2)]
    oracles = [oracle_of(model, each) for each in weights]
    engine.update_weights(weights[0].items(), 0)
    requests = [SampleRequest(PROMPT + group, group, 0, 0) for group in range(7)]
    params = SamplingParams(max_response_tokens=4000)
    parts = pause_after(engine, requests, 24, params)
    assert parts[7].finish_reason == "length"
    running = [part for part in parts if part.finish_reason == "pause" and part.loss_mask.any()]
    queued = [part for part in parts if not part.loss_mask.any()]
    assert len(running) >= 2
    assert len(queued) == 7 - len(running) >= 1  # SGLang keeps room for all 4000 tokens of each
    assert all(8 <= len(part.response_tokens) < 4000 for part in running)
    assert engine.answer_counts["lost_parts"] == 0
    assert logprob_gap(running, oracles[0]) < CLOSE
    assert same_sets(running, oracles[0]) == 1.0

    engine.update_weights(weights[1].items(), 1)
    more = [go_on(requests[part.group], part, len(part.response_tokens) + 16) for part in [*running, queued[0]]]
    rests = engine.generate(more, params)
    assert logprob_gap(rests, oracles[1]) < CLOSE  # as of a prefill under the new weights alone
    assert logprob_gap(rests, oracles[0]) > 1e-2
    assert same_sets(rests[-1:], oracles[1]) == 1.0
    for part, rest in zip(running, rests, strict=False):
        whole = join(part, rest)
        known = known_rows(part)
        assert row_versions(whole).tolist() == [0] * known + [1] * (whole.num_tokens - known)
        assert np.array_equal(whole.routed_experts[:known], part.routed_experts[:known])
        expected = np.sort(oracles[1].routes(whole.tokens)[known : oracles[1].clear(whole.tokens)][:-1], -1)
        found = np.sort(whole.routed_experts[known:-1].astype(int), -1)
        assert np.array_equal(found[: len(expected)], expected)


@pytest.mark.sglang
@pytest.mark.parametrize("real", [(512, 400, "--schedule-conservativeness", "0.1")], indirect=True)
def test_a_real_server_that_runs_out_of_memory_retracts_requests(real: tuple[Path, SGLangEngine]) -> None:
    """It admits requests for less than all their tokens. What it has read twice is right, and marked."""
    model, engine = real
    weights = noisy(model, 0)
    engine.update_weights(weights.items(), 0)
    params = SamplingParams(max_response_tokens=150, stop_token_ids=(EOS_ID,))
    rollouts = engine.generate([SampleRequest(PROMPT + group, group, 0, 0) for group in range(5)], params)
    retracted = [rollout for rollout in rollouts if rollout.reread_mask is not None]
    assert 1 <= len(retracted) < 5
    assert engine.answer_counts["retractions"] >= len(retracted)
    for rollout in retracted:
        assert np.array_equal(rollout.reread_mask, rollout.loss_mask & rollout.routed_mask)
    oracle = oracle_of(model, weights)
    assert logprob_gap(rollouts, oracle) < CLOSE
    assert same_sets(rollouts, oracle) == 1.0
