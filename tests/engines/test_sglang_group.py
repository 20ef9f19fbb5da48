"""Weights through a process group: who does not come is noticed, and who dies meanwhile gets them when it is back."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from ports import has_ipv6_loopback
from rollout_oracle import make_requests
from sglang_fixtures import START_DEADLINE_S
from sglang_oracle import CLOSE, logprob_gap, noisy, oracle_of

from megarl.config.tables.rollout import SGLangConfig
from megarl.engines.protocol import SamplingParams
from megarl.engines.sglang.engine import SGLangEngine
from megarl.engines.sglang.fleet import Fleet
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec
from megarl.engines.sglang.transports import sender as sglang_sync
from megarl.engines.sglang.transports.broadcast import Broadcast, BroadcastGroup, broadcast
from megarl.engines.sglang.transports.protocol import send_tensors
from megarl.engines.sglang.transports.sender import WeightSender
from megarl.engines.weights import Bucket, WeightForm
from megarl.errors import WeightSyncError

PARAMS = SamplingParams(max_response_tokens=8)


def engine_of(server: Server, model: Path, tell: list[str] | None = None, **fields: Any) -> SGLangEngine:
    fleet = Fleet(urls=[server.url], source=model, tell=(tell if tell is not None else []).append, **fields)
    config = json.loads((model / "config.json").read_text())
    return SGLangEngine(fleet.start(), config, fleet=fleet, form=WeightForm(torch.float32))


def check_update(engine: SGLangEngine, model: Path, seed: int) -> None:
    engine.update_weights(noisy(model, seed).items(), 1)
    oracle = oracle_of(model, noisy(model, seed))
    assert logprob_gap(engine.generate(make_requests(2), PARAMS), oracle) < CLOSE
    engine.close()


def test_a_server_that_refuses_to_join_is_not_waited_for_and_one_that_does_not_come_is_named():
    refused: Future[None] = Future()
    refused.set_exception(WeightSyncError("the server says no"))
    for join, timeout_s in ((refused, 36_000.0), (Future[None](), 1.0)):
        group = BroadcastGroup("http://127.0.0.1:9", tp=1, device=torch.device("cpu"), timeout_s=timeout_s)
        told = rf"the server says no|the gloo group at 127\.0\.0\.1:{group.port} failed"
        with pytest.raises(WeightSyncError, match=told):
            group.join(join)
        group.close()


@pytest.mark.sglang
def test_a_server_with_another_number_of_ranks_is_an_error_and_stays_usable(
    updated_server: Server, hostile_model: Path, monkeypatch: pytest.MonkeyPatch
):
    sender = WeightSender(updated_server.url, tp=2)
    sender.begin()
    with monkeypatch.context() as patch:
        patch.setattr(sglang_sync, "CONTROL_S", 30.0)
        with pytest.raises(WeightSyncError, match="group"):
            broadcast([sender], Bucket(noisy(hostile_model, 1).items()))
    sender.close()
    check_update(engine_of(updated_server, hostile_model, transport=Broadcast()), hostile_model, 2)


@pytest.mark.sglang
@pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no address ::1")
def test_a_server_at_an_ipv6_address_samples_and_gets_weights_through_a_group(
    sglang_spec: ServerSpec, hostile_model: Path, tmp_path: Path
):
    spec = replace(sglang_spec, model_path=hostile_model, host="::1", log_file=tmp_path / "ipv6.log")
    with Server(spec) as server:
        server.wait_ready(START_DEADLINE_S)
        assert server.url.startswith("http://[::1]:")
        check_update(engine_of(server, hostile_model, transport=Broadcast()), hostile_model, 2)


@pytest.mark.sglang
def test_weights_that_somebody_else_has_sent_are_found_and_replaced(updated_server: Server, hostile_model: Path):
    """Under the same name, and with keys and values of the old weights in the cache."""
    told: list[str] = []
    engine = engine_of(updated_server, hostile_model, told, settings=SGLangConfig())
    weights = noisy(hostile_model, 1)
    engine.update_weights(weights.items(), 1)
    assert not engine.prove_weights()
    engine.generate(make_requests(8, copies=4), PARAMS)
    assert not engine.prove_weights()
    foreign = WeightSender(updated_server.url)
    foreign.begin()
    send_tensors(foreign, Bucket((name, tensor * 1.02) for name, tensor in weights.items()))
    foreign.post("end_weight_update", {})
    foreign.resume()
    assert foreign.weight_version() == "1"
    assert engine.prove_weights()
    assert f"{updated_server.url} does not compute with the weights that it was sent" in told[-2]
    assert not engine.prove_weights()
    assert logprob_gap(engine.generate(make_requests(3), PARAMS), oracle_of(hostile_model, weights)) < CLOSE
    foreign.close()
    engine.close()


@pytest.mark.sglang
def test_a_server_that_somebody_has_started_again_is_met_anew(updated_server: Server, hostile_model: Path):
    """It is in no group, and names its weights as a fresh one does."""
    fleet = Fleet(urls=[updated_server.url], source=hostile_model, transport=Broadcast())
    fleet.start()
    (member,) = fleet.members
    fleet.update(noisy(hostile_model, 1).items(), 1, WeightForm(torch.float32))
    name = member.sender.group.name
    for path, body in (
        ("destroy_weights_update_group", {"group_name": name}),
        ("update_weight_version", {"new_version": "default"}),
    ):
        httpx.post(f"{updated_server.url}/{path}", json=body, timeout=600.0).raise_for_status()
    fleet.update(noisy(hostile_model, 2).items(), 2, WeightForm(torch.float32))
    assert member.sender.weight_version() == "2"
    assert member.sender.group.name != name
    fleet.update(noisy(hostile_model, 3).items(), 3, WeightForm(torch.float32))
    fleet.close()
