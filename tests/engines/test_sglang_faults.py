"""Servers that fail: what is sampled stays complete and unique, or the run hears why it cannot be had."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from rollout_oracle import make_requests
from sglang_faulty import check_complete, in_background, kill_9
from sglang_fixtures import START_DEADLINE_S
from sglang_oracle import CLOSE, Weights, logprob_gap, noisy, oracle_of, same_sets

from megarl.core.types import SampleRequest
from megarl.engines.protocol import SamplingParams
from megarl.engines.sglang.client import ClientSettings
from megarl.engines.sglang.engine import SGLangEngine
from megarl.engines.sglang.fleet import Fleet, FleetSettings
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec
from megarl.engines.weights import WeightForm
from megarl.errors import RolloutError
from megarl.routes import decode, encode

pytestmark = [pytest.mark.sglang, pytest.mark.slow(minutes=2)]

PARAMS = SamplingParams(max_response_tokens=8)
SETTINGS = ClientSettings(concurrency=4, deadline_s=60.0, recovery_s=START_DEADLINE_S)


@dataclass
class Proxy:
    """Stands before a server, and spoils answers with rollouts: ``fault`` is asked with the answer's number."""

    upstream: str
    fault: Callable[[int], str | None] = lambda number: None
    seen: int = 0
    spoilt: Counter[str] = field(default_factory=Counter)
    url: str = ""
    earlier: list[bytes] = field(default_factory=list)
    """Whole answers to requests of before."""

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(60.0)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        listener = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        self._ready.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.1))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request per connection: the head says so to both sides."""
        try:
            head, body = await _message(reader)
            answer_head, answer = await self._ask_upstream(head, body)
            if b" /generate " in head.split(b"\r\n", 1)[0] and b'"rid"' in body:  # proofs of weights have none
                self.seen += 1
                fault = self.fault(self.seen)
                if fault is not None:
                    self.spoilt[fault] += 1
                    answer_head, answer = await _spoil(fault, answer_head, answer, self.earlier)
                self.earlier.append(answer)
            writer.write(_with_length(answer_head, len(answer) + (100 if answer_head.endswith(b"CUT") else 0)) + answer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _ask_upstream(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        address = urlsplit(self.upstream)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            writer.write(_with_length(head, len(body)) + body)
            await writer.drain()
            return await _message(reader)
        finally:
            writer.close()


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n"))[:-4]
    length = next((line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), b":0")
    return head, await reader.readexactly(int(length.split(b":")[1]))


def _with_length(head: bytes, length: int) -> bytes:
    names = (b"content-length:", b"connection:")
    lines = [line for line in head.removesuffix(b"CUT").split(b"\r\n") if not line.lower().startswith(names)]
    return b"\r\n".join([*lines, b"connection: close", b"content-length: %d" % length, b"", b""])


async def _spoil(fault: str, head: bytes, answer: bytes, earlier: Sequence[bytes]) -> tuple[bytes, bytes]:
    if fault == "hang":
        await asyncio.sleep(3600.0)
    if fault == "500":
        return b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: text/plain", b"out of luck"
    if fault == "json":
        return head, answer[: len(answer) // 2]
    if fault == "cut":  # fewer bytes than the head promises
        return head + b"CUT", answer[: len(answer) // 2]
    if fault == "replayed":
        return head, earlier[0]
    whole, other = json.loads(answer), json.loads(earlier[0]) if earlier else {}
    meta, text = whole["meta_info"], whole["meta_info"]["routed_experts"]
    if fault == "routes":
        meta["routed_experts"] = text[:-5]
    elif fault == "exchanged":  # a proxy that knows ids, and nothing else
        whole, other["meta_info"]["id"] = other, meta["id"]
    elif fault == "other routes":
        meta["routed_experts"] = other["meta_info"]["routed_experts"]
    elif fault == "late routes":
        trace = decode(base64.b64decode(text))
        late = replace(trace, experts=np.roll(trace.experts, 1, axis=0))
        meta["routed_experts"] = base64.b64encode(encode(late)).decode()
    else:
        assert fault == "no seal"
        del meta["megarl_seal"]
    return head, json.dumps(whole).encode()


@pytest.fixture(scope="module")
def weights(hostile_model: Path) -> Weights:
    return noisy(hostile_model, 5)


@pytest.fixture
def proxy(updated_server: Server) -> Iterator[Proxy]:
    proxy = Proxy(updated_server.url)
    yield proxy
    proxy.close()


@pytest.fixture
def engine(proxy: Proxy, hostile_model: Path, weights: Weights) -> Iterator[SGLangEngine]:
    engine = engine_of([proxy.url], hostile_model, urls=[proxy.url])
    engine.update_weights(weights.items(), 11)
    yield engine
    engine.close()


def engine_of(
    to: Sequence[str],
    model: Path,
    settings: ClientSettings = SETTINGS,
    fleet: Fleet | None = None,
    tell_client: Callable[[str], None] = print,
    **fields: Any,
) -> SGLangEngine:
    config = json.loads((model / "config.json").read_text())
    if fleet is None:
        fleet = Fleet(source=model, **fields)
        fleet.start()
    return SGLangEngine(to, config, fleet=fleet, settings=settings, form=WeightForm(torch.float32), tell=tell_client)


@pytest.mark.parametrize("fault", ["500", "json", "routes", "cut", "hang"])
def test_a_fault_that_passes_costs_nothing(
    engine: SGLangEngine, proxy: Proxy, fault: str, hostile_model: Path, weights: Weights
):
    proxy.fault = lambda number: fault if number in (2, 3, 7) else None
    if fault == "hang":
        engine._client.settings = replace(SETTINGS, deadline_s=10.0)
    requests, finished = make_requests(5, copies=3), []
    rollouts = engine.generate(requests, PARAMS, finished.append)
    assert proxy.spoilt == {fault: 3}
    assert proxy.seen == len(requests) + 3  # only what was lost is asked for again
    check_complete(requests, rollouts, finished)
    assert same_sets(rollouts, oracle_of(hostile_model, weights)) == 1.0
    assert logprob_gap(rollouts, oracle_of(hostile_model, weights)) < CLOSE


# Without the plugin's seal only ids and prompts are compared.
@pytest.mark.parametrize(
    ("fault", "compact_routes"),
    [
        *((fault, True) for fault in ("replayed", "exchanged", "other routes", "late routes", "no seal")),
        *((fault, False) for fault in ("replayed", "exchanged")),
    ],
)
def test_no_part_of_another_answer_is_taken(
    proxy: Proxy, fault: str, compact_routes: bool, hostile_model: Path, weights: Weights
):
    """All requests are for the same prompt, so that every answer has the right shape."""
    told: list[str] = []
    settings = replace(SETTINGS, compact_routes=compact_routes)
    engine = engine_of([proxy.url], hostile_model, settings, urls=[proxy.url], tell_client=told.append)
    engine.update_weights(weights.items(), 11)
    first = make_requests(1)[0] if fault != "exchanged" or compact_routes else make_requests(2)[1]
    requests = [replace(make_requests(1)[0], sample=sample) for sample in range(8)]
    engine.generate([first], PARAMS)
    assert not engine.answer_counts
    proxy.fault = lambda number: fault if number in (3, 6) else None
    finished: list[int] = []
    rollouts = engine.generate(requests, PARAMS, finished.append)
    assert proxy.spoilt == {fault: 2}
    assert engine.answer_counts == {"wrong_answers": 2}
    assert proxy.seen == 1 + len(requests) + 2
    check_complete(requests, rollouts, finished)
    assert same_sets(rollouts, oracle_of(hostile_model, weights)) == 1.0
    assert logprob_gap(rollouts, oracle_of(hostile_model, weights)) < CLOSE
    expected = {"replayed": "to another request: its id is", "no seal": "without the seal"}.get(fault)
    expected = expected or ("does not fit its seal" if compact_routes else "to another prompt")
    assert [expected in line for line in told] == [True]
    engine.close()


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("replayed", "the answer is to another request"),
        ("500", "HTTP 500: out of luck"),
        ("json", "holds no JSON"),
        ("routes", "the answer was cut short"),
        ("hang", "no answer within 0.5 s"),
    ],
)
def test_a_fault_that_stays_names_the_request_and_the_last_failure(
    engine: SGLangEngine, proxy: Proxy, fault: str, told: str
):
    engine.generate(make_requests(1), PARAMS)
    proxy.fault = lambda number: fault
    engine._client.settings = replace(SETTINGS, attempts=2, deadline_s=0.5 if fault == "hang" else 60.0)
    finished: list[int] = []
    with pytest.raises(RolloutError, match=rf"group \d sample \d: 2 attempts failed, the last: .*{told}"):
        engine.generate(make_requests(2, copies=2), PARAMS, finished.append)
    assert not any(finished)


def test_a_connection_that_is_cut_every_time_is_no_endless_loop(engine: SGLangEngine, proxy: Proxy):
    """The server is healthy between the cuts, as one that dies of a request and is started again."""
    proxy.fault = lambda number: "cut"
    engine._client.settings = replace(SETTINGS, losses=3)
    with pytest.raises(RolloutError, match=r"lost 3 times with its connection, the last: .*Error"):
        engine.generate(make_requests(1), PARAMS)


def test_what_the_server_refuses_is_not_asked_again(engine: SGLangEngine, proxy: Proxy):
    too_long = SampleRequest(np.arange(61, dtype=np.int32) % 28 + 2, 0, 0, 0)
    with pytest.raises(RolloutError, match="refuses the request, HTTP 400"):
        engine.generate([too_long], PARAMS)
    assert proxy.seen == 1


def test_a_killed_server_comes_back_with_the_current_weights(
    sglang_spec: ServerSpec, hostile_model: Path, weights: Weights, tmp_path: Path
):
    """Killed as a whole between its answers, then its scheduler alone in the middle of an update."""
    spec = replace(sglang_spec, model_path=hostile_model, log_file=tmp_path / "log", api_key="open-sesame")
    told: list[str] = []
    patience = FleetSettings(START_DEADLINE_S, poll_s=0.1)
    fleet = Fleet([spec], api_key="open-sesame", settings=patience, tell=told.append)
    engine = engine_of(fleet.start(), hostile_model, replace(SETTINGS, api_key="open-sesame"), fleet)
    try:
        engine.update_weights(noisy(hostile_model, 6).items(), 20)
        engine.update_weights(weights.items(), 21)
        (member,) = fleet.members
        assert member.process is not None
        requests, finished = make_requests(40, copies=4), []
        wait = in_background(
            lambda: engine.generate(requests, replace(PARAMS, max_response_tokens=24), finished.append)
        )
        while len(finished) < 10:
            time.sleep(0.01)
        assert len(finished) < 150, "the requests were over before the server could be killed"
        kill_9(member.process)
        rollouts = wait()
        print("\n".join(told))
        check_complete(requests, rollouts, finished)
        assert member.restarts == 1
        assert "is dead: starting it again (restart 1)" in told[0]
        assert "is back with weights 21" in told[1]
        oracle = oracle_of(hostile_model, weights)
        assert logprob_gap(rollouts, oracle) < CLOSE
        assert logprob_gap(rollouts, oracle_of(hostile_model, noisy(hostile_model, 6))) > 0.1

        def dying() -> Iterator[tuple[str, torch.Tensor]]:
            yield from noisy(hostile_model, 6).items()
            kill_9(member.process, "scheduler")

        engine.update_weights(dying(), 22)
        rollouts = engine.generate(make_requests(6), PARAMS)
        print("\n".join(told))
        assert member.restarts == 2
        assert {int(version) for rollout in rollouts for version in rollout.weight_versions} == {22}
        assert logprob_gap(rollouts, oracle_of(hostile_model, noisy(hostile_model, 6))) < CLOSE
    finally:
        engine.close()
    assert not member.process.members()


def test_another_server_takes_over_from_one_that_is_given_up(
    sglang_spec: ServerSpec, updated_server: Server, hostile_model: Path, weights: Weights, tmp_path: Path
):
    spec = replace(sglang_spec, model_path=hostile_model, log_file=tmp_path / "log")
    told: list[str] = []
    patience = FleetSettings(START_DEADLINE_S, max_restarts=0, poll_s=0.1)
    fleet = Fleet([spec], urls=[updated_server.url], source=hostile_model, settings=patience, tell=told.append)
    settings = replace(SETTINGS, recovery_s=1.0)
    urls = fleet.start()
    engine = engine_of(urls, hostile_model, settings, fleet)
    try:
        engine.update_weights(weights.items(), 30)
        process = fleet.members[1].process
        assert process is not None
        requests, finished = make_requests(40, copies=4), []
        wait = in_background(
            lambda: engine.generate(requests, replace(PARAMS, max_response_tokens=24), finished.append)
        )
        while len(finished) < 10:
            time.sleep(0.01)
        kill_9(process)
        check_complete(requests, wait(), finished)
        assert any("died 1 times and is given up" in line for line in told)
        assert urls[1] == fleet.members[1].url

        alone = SGLangEngine([urls[1]], json.loads((hostile_model / "config.json").read_text()), fleet=None)
        alone._client.settings = settings
        alone._version, alone._complete = 30, True
        with pytest.raises(RolloutError, match=r"all 1 SGLang servers are down, the last failure: http://127\.0\.0\.1"):
            alone.generate(make_requests(2), PARAMS)

        # A server that has been given up takes no weights, and must not keep the other from them.
        engine.update_weights(noisy(hostile_model, 6).items(), 31)
        found = engine.generate(make_requests(4), PARAMS)
        assert logprob_gap(found, oracle_of(hostile_model, noisy(hostile_model, 6))) < CLOSE
    finally:
        engine.close()
    assert updated_server.alive
