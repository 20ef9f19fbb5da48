"""One run on two servers that are killed again and again, and then one of them hangs."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from rollout_oracle import make_requests
from sglang_faulty import check_complete, hang, in_background, kill_9
from sglang_fixtures import START_DEADLINE_S
from sglang_oracle import CLOSE, logprob_gap, noisy, oracle_of, same_sets

from megarl.engines.protocol import SamplingParams
from megarl.engines.sglang.client import ClientSettings
from megarl.engines.sglang.engine import SGLangEngine
from megarl.engines.sglang.fleet import Fleet, FleetSettings
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec
from megarl.engines.weights import WeightForm

pytestmark = [pytest.mark.sglang, pytest.mark.slow(minutes=7)]

KILLS = 10
PARAMS = SamplingParams(max_response_tokens=24)
DEADLINE_S = 10.0


@dataclass(frozen=True)
class Pair:
    engine: SGLangEngine
    fleet: Fleet
    servers: list[Server]
    told: list[str]

    def update(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        """Both servers have these weights then, whatever was killed last, and nothing has been told since."""
        self.engine.update_weights(tensors.items(), version)
        end = time.monotonic() + START_DEADLINE_S
        while not all(
            member.holds is not None and member.holds.version == version and server.healthy()
            for member, server in zip(self.fleet._members, self.servers, strict=True)
        ):
            assert time.monotonic() < end, self.told
            time.sleep(0.1)
        self.told.clear()

    def num_backs(self, server: Server) -> int:
        return sum(f"{server.url} is back" in line for line in self.told)

    def wait_for(self, line: str) -> None:
        end = time.monotonic() + START_DEADLINE_S
        while not any(line in told for told in self.told):
            assert time.monotonic() < end, self.told
            time.sleep(0.1)


@pytest.fixture(scope="module")
def pair(sglang_spec: ServerSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    logs = tmp_path_factory.mktemp("pair")
    specs = [replace(sglang_spec, log_file=logs / f"{index}.log") for index in range(2)]
    told: list[str] = []
    patience = FleetSettings(START_DEADLINE_S, hang_s=1.0, max_restarts=2 * KILLS, poll_s=0.1, health_s=1.0)
    fleet = Fleet(specs, settings=patience, tell=told.append)
    settings = ClientSettings(concurrency=8, deadline_s=DEADLINE_S, attempts=8, losses=100, recovery_s=START_DEADLINE_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_HEALTH_CHECK_TIMEOUT", "3")  # seconds until a server says that its scheduler is silent
        urls = fleet.start()
        config = json.loads((Path(sglang_spec.model_path) / "config.json").read_text())
        engine = SGLangEngine(urls, config, fleet=fleet, settings=settings, form=WeightForm(torch.float32))
        yield Pair(engine, fleet, [member.process for member in fleet._members if member.process], told)
        engine.close()


def test_ten_kills_at_random_moments_lose_and_double_nothing(pair: Pair, sglang_model: Path):
    """In the midst of responses and of weight updates; the weights change all the time."""
    rng = random.Random(0)
    ended, through = threading.Event(), threading.Event()

    def kill() -> int:
        """Ten of the servers that serve, and what they generate or load at that moment."""
        served_before: dict[Server, int] = {}
        killed = 0
        try:
            while killed < KILLS and not ended.wait(rng.uniform(0.0, 2.0)):
                serving = [s for s in pair.servers if pair.num_backs(s) > served_before.get(s, -1)]
                if serving:
                    server = rng.choice(serving)
                    served_before[server] = pair.num_backs(server)
                    kill_9(server)
                    killed += 1
            return killed
        finally:
            through.set()

    weights = [noisy(sglang_model, index) for index in (1, 2)]
    oracles = [oracle_of(sglang_model, tensors) for tensors in weights]
    wait = in_background(kill)
    try:
        seen: set[tuple[int, int, int]] = set()
        version, after_the_last = 0, 0
        while after_the_last < 2:
            after_the_last += through.is_set()
            version += 1
            pair.engine.update_weights(weights[version % 2].items(), version)
            requests, finished = make_requests(25, copies=4, seed=version), []
            rollouts = pair.engine.generate(requests, PARAMS, finished.append)
            check_complete(requests, rollouts, finished)
            assert {int(v) for rollout in rollouts for v in rollout.weight_versions} == {version}
            some = rollouts[:: len(rollouts) // 10]
            assert same_sets(some, oracles[version % 2]) == 1.0
            assert logprob_gap(some, oracles[version % 2]) < CLOSE
            seen |= {(version, rollout.group, rollout.sample) for rollout in rollouts}
    finally:
        ended.set()
        assert wait() == KILLS
        print("\n".join(pair.told))
    print(f"{len(seen)} responses of {version} versions")
    assert len(seen) == 100 * version


def test_a_hung_server_trips_the_deadline_and_is_started_again(pair: Pair, sglang_model: Path):
    weights = noisy(sglang_model, 1)
    pair.update(weights, 1000)
    requests, finished = make_requests(60, copies=4), []
    wait = in_background(lambda: pair.engine.generate(requests, PARAMS, finished.append))
    while len(finished) < 10:
        time.sleep(0.01)
    assert len(finished) < 200, "the requests were over before the server could hang"
    hang(pair.servers[0])
    rollouts = wait()
    check_complete(requests, rollouts, finished)
    assert logprob_gap(rollouts, oracle_of(sglang_model, weights)) < CLOSE
    pair.wait_for(f"{pair.servers[0].url} has not answered for 1 s: killed")
    pair.wait_for(f"{pair.servers[0].url} is back with weights 1000")
    print("\n".join(pair.told))
    assert len(pair.engine.generate(make_requests(10), PARAMS)) == 10


def test_a_server_that_hangs_when_weights_come_is_started_again(pair: Pair, sglang_model: Path):
    """It would answer no request for an update either, and the run has another one."""
    pair.update(noisy(sglang_model, 1), 2000)
    hang(pair.servers[0])
    weights = noisy(sglang_model, 2)
    pair.engine.update_weights(weights.items(), 2001)
    assert any(line.startswith(f"{pair.servers[0].url} is late in a weight update") for line in pair.told)
    pair.wait_for(f"{pair.servers[0].url} is back with weights 2001")
    print("\n".join(pair.told))
    rollouts = pair.engine.generate(make_requests(20), PARAMS)
    assert logprob_gap(rollouts, oracle_of(sglang_model, weights)) < CLOSE
