"""Older SGLang releases: each real server does what the table says of it, and what megarl needs.

The pinned release is what all other tests run; here it is only compared with the table.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from absent import SGLANG_PYTHON
from rollout_oracle import make_requests
from sglang_faulty import check_complete, in_background, kill_9
from sglang_fixtures import START_DEADLINE_S, forking, transport_fields
from sglang_oracle import CLOSE, Weights, check_nuclei, logprob_gap, noisy, oracle_of, same_sets

from megarl.core.types import SampleRequest
from megarl.engines.buckets import Bucket
from megarl.engines.protocol import SamplingParams
from megarl.engines.sglang import member as sglang_member
from megarl.engines.sglang.answers import parse_answer
from megarl.engines.sglang.client import ClientSettings
from megarl.engines.sglang.engine import SGLangEngine
from megarl.engines.sglang.fleet import Fleet
from megarl.engines.sglang.http import authorization
from megarl.engines.sglang.member import FleetSettings
from megarl.engines.sglang.plugin.compact import SEAL, make_header, seal
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec
from megarl.engines.sglang.transports.sender import WeightSender
from megarl.engines.sglang.transports.tensor import send_tensors
from megarl.engines.sglang.versions import NEWEST, can, parse_version
from megarl.engines.weights import WeightForm
from megarl.errors import ConfigError, RolloutError, WeightSyncError
from megarl.files.moe_shape import MoeShape

pytestmark = [pytest.mark.sglang, pytest.mark.slow(minutes=4)]

PARAMS = SamplingParams(max_response_tokens=8)
OVERLAP_IS_WRONG = "0.5.17"
KEY = "open-sesame"
RELEASES = (OVERLAP_IS_WRONG, "0.5.18", "0.5.21")


@dataclass(frozen=True)
class Served:
    release: str
    server: Server
    fleet: Fleet
    engine: SGLangEngine
    told: list[str]


def ask(server: Server, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    headers = authorization(server.spec.api_key)
    return httpx.post(f"{server.url}/{path}", json=body or {}, headers=headers, timeout=60.0)


def sample(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"input_ids": [5, 6, 7, 8], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    return ask(server, "generate", body | {"return_logprob": True} | fields).raise_for_status().json()["meta_info"]


def spec_of(release: str, base: ServerSpec, folder: Path, *arguments: str) -> ServerSpec:
    python = forking(SGLANG_PYTHON.parents[1] / "releases" / release / "python", folder)
    return replace(base, python=python, log_file=folder / f"{release}.log", api_key=KEY, extra_args=arguments)


@pytest.fixture(scope="module", params=RELEASES)
def served(
    request: pytest.FixtureRequest, sglang_spec: ServerSpec, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    release: str = request.param
    arguments = ("--disable-overlap-schedule",) if release == OVERLAP_IS_WRONG else ()
    spec = spec_of(release, sglang_spec, tmp_path_factory.mktemp("release"), *arguments)
    config = json.loads((Path(spec.model_path) / "config.json").read_text())
    told: list[str] = []
    fleet = Fleet([spec], api_key=KEY, settings=FleetSettings(START_DEADLINE_S, poll_s=0.1), tell=told.append)
    urls = fleet.start()
    engine = SGLangEngine(
        urls, config, fleet=fleet, settings=ClientSettings(concurrency=16, api_key=KEY), form=WeightForm(torch.float32)
    )
    server = fleet.members[0].process
    assert server is not None
    yield Served(release, server, fleet, engine, told)
    engine.close()


@pytest.fixture(scope="module")
def weights(sglang_model: Path) -> list[Weights]:
    return [noisy(sglang_model, seed) for seed in range(3)]


def test_the_server_is_of_this_release(served: Served):
    assert served.server.version == served.release
    assert served.told == []


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_routes_and_logprobs_are_those_of_transformers(
    served: Served, sglang_model: Path, weights: list[Weights], temperature: float
):
    served.engine.update_weights(weights[1].items(), 1)
    rollouts = served.engine.generate(make_requests(16, copies=2), replace(PARAMS, temperature=temperature))
    oracle = oracle_of(sglang_model, weights[1])
    assert same_sets(rollouts, oracle) == 1.0
    assert logprob_gap(rollouts, oracle, temperature) < CLOSE
    assert logprob_gap(rollouts, oracle, temperature + 0.3) > 1e-2
    assert same_sets(rollouts, oracle_of(sglang_model, weights[2])) < 0.9


def test_a_nucleus_is_recorded_as_it_is_drawn_from_or_refused(
    served: Served, sglang_model: Path, weights: list[Weights]
):
    if not can(parse_version(served.release), "sampling_masks"):
        refused = Fleet(urls=[served.server.url], api_key=KEY, source=sglang_model, nucleus=True)
        with pytest.raises(ConfigError, match=f"SGLang {served.release} does not record the ids that it draws from"):
            refused.start()
        refused.close()
        return
    served.engine.update_weights(weights[1].items(), 1)
    params = replace(PARAMS, top_p=0.8, max_kept_ids=10_000)
    check_nuclei(
        served.engine.generate(make_requests(8, copies=2), params), oracle_of(sglang_model, weights[1]), params
    )


@pytest.mark.parametrize("way", ["tensor", "distributed", "disk"])
def test_the_server_follows_the_weights(
    served: Served, way: str, sglang_model: Path, weights: list[Weights], tmp_path: Path
):
    fleet = Fleet(
        urls=[served.server.url],
        api_key=KEY,
        source=sglang_model,
        **transport_fields(way, tmp_path, checksums=can(parse_version(served.release), "checksums_on_cpu")),
    )
    engine = SGLangEngine(
        fleet.start(),
        json.loads((sglang_model / "config.json").read_text()),
        fleet=fleet,
        settings=ClientSettings(api_key=KEY),
        form=WeightForm(torch.float32),
    )
    for version in (1, 2):
        engine.update_weights(weights[version].items(), version)
        for _ in range(2):  # the second time from the prefix cache
            rollouts = engine.generate(make_requests(4, copies=2, seed=3), PARAMS)
            assert logprob_gap(rollouts, oracle_of(sglang_model, weights[version])) < CLOSE
            assert same_sets(rollouts, oracle_of(sglang_model, weights[version])) == 1.0
            assert logprob_gap(rollouts, oracle_of(sglang_model, weights[version - 1])) > 0.1
    engine.close()


def test_a_dropped_sync_is_seen(
    served: Served, sglang_model: Path, weights: list[Weights], monkeypatch: pytest.MonkeyPatch
):
    served.engine.update_weights(weights[1].items(), 1)
    with monkeypatch.context() as patch:
        patch.setattr(WeightSender, "send", lambda self, *what: None)
        patch.setattr(sglang_member, "DEATH_WAIT_S", 0.5)
        with pytest.raises(WeightSyncError, match="confirmed the update to weights 2 and did not make it"):
            served.engine.update_weights(weights[2].items(), 2)
    served.engine.update_weights(weights[2].items(), 3)
    assert logprob_gap(served.engine.generate(make_requests(4), PARAMS), oracle_of(sglang_model, weights[2])) < CLOSE


def test_weights_of_another_version_are_refused(
    served: Served, weights: list[Weights], monkeypatch: pytest.MonkeyPatch
):
    served.engine.update_weights(weights[0].items(), 3)
    assert sample(served.server)["weight_version"] == "3"
    ask(served.server, "update_weight_version", {"new_version": "4"}).raise_for_status()
    client = served.engine._client
    monkeypatch.setattr(client, "settings", replace(client.settings, recovery_s=1.0))
    with pytest.raises(RolloutError, match=r"down, the last failure: .* does not answer with weights 3$"):
        served.engine.generate(make_requests(1), PARAMS)


def check_table(server: Server) -> None:
    release = parse_version(server.version)
    session = [ask(server, path).status_code for path in ("begin_weight_update", "end_weight_update")]
    assert session == ([200, 200] if can(release, "update_session") else [404, 404])

    found = sample(server, return_routed_experts=True, routed_experts_start_len=2)
    assert can(release, "routed_experts")
    rows = len(base64.b64decode(found["routed_experts"])) / 4 / 3 / 2
    assert rows == (5 if can(release, "routed_experts_start_len") else 7)
    spans = found.get("weight_versions")
    version = found["weight_version"]
    checked = ask(server, "weights_checker", {"action": "checksum"}).status_code
    assert checked == (200 if can(release, "checksums_on_cpu") else 400)
    assert spans == ([{"version": version, "start": 0, "end": 4}] if can(release, "weight_versions") else None)
    assert sample(server, rid="of-ours")["id"] == "of-ours"
    body = {"input_ids": [5, 6, 7, 8], "return_prompt_token_ids": True, "sampling_params": {"max_new_tokens": 1}}
    assert ask(server, "generate", body).json()["prompt_token_ids"] == [5, 6, 7, 8]


def test_it_can_do_what_the_table_says(served: Served):
    check_table(served.server)


def test_the_pinned_release_can_do_what_the_table_says(sglang_server: Server):
    assert parse_version(sglang_server.version) == NEWEST
    check_table(sglang_server)


def test_its_answers_are_sealed_and_guarded_by_its_key(served: Served):
    header = make_header(MoeShape.of(json.loads((Path(served.server.spec.model_path) / "config.json").read_text())))
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}, "rid": "a"}
    url = f"{served.server.url}/generate"
    answer = httpx.post(url, json=body, headers=header | authorization(KEY), timeout=60.0).raise_for_status().json()
    assert answer["meta_info"][SEAL] == seal([5, 6, 7], answer)
    assert "prompt_token_ids" not in answer
    for path in ("generate", "update_weights_from_tensor", "server_info"):
        assert httpx.post(f"{served.server.url}/{path}", json=body, timeout=60.0).status_code == 401


def test_tensors_outside_of_a_session_are_refused_where_there_are_sessions(served: Served, weights: list[Weights]):
    sender = WeightSender(served.server.url, (0, 5, 18), api_key=KEY)  # which sends without
    name, tensor = next(iter(weights[0].items()))
    if can(parse_version(served.release), "update_session"):
        with pytest.raises(WeightSyncError, match="HTTP 400"):
            send_tensors(sender, Bucket([(name, tensor)]))
    else:
        send_tensors(sender, Bucket([(name, tensor)]))
    sender.close()


def test_a_killed_server_comes_back_with_the_current_weights(
    served: Served, sglang_model: Path, weights: list[Weights]
):
    served.engine.update_weights(weights[2].items(), 5)
    requests, finished = make_requests(30, copies=4), []
    wait = in_background(
        lambda: served.engine.generate(requests, replace(PARAMS, max_response_tokens=24), finished.append)
    )
    while len(finished) < 10:
        time.sleep(0.01)
    kill_9(served.server)
    rollouts = wait()
    check_complete(requests, rollouts, finished)
    print("\n".join(served.told))
    assert "is back with weights 5" in served.told[1]
    assert same_sets(rollouts, oracle_of(sglang_model, weights[2])) == 1.0
    assert logprob_gap(rollouts, oracle_of(sglang_model, weights[2])) < CLOSE


def test_the_release_whose_overlapped_routes_are_wrong_is_refused(
    sglang_spec: ServerSpec, sglang_model: Path, tmp_path: Path
):
    """Its log-probabilities are right, and every check of a single answer passes: nothing else would tell."""
    requests = make_requests(24, copies=2)
    shape = MoeShape.of(json.loads((sglang_model / "config.json").read_text()))
    with Server(spec_of(OVERLAP_IS_WRONG, sglang_spec, tmp_path)) as server:
        server.wait_ready(START_DEADLINE_S)
        with pytest.raises(ConfigError, match="or add --disable-overlap-schedule"):
            Fleet(urls=[server.url], api_key=KEY, source=sglang_model).start()

        def sampled(request: SampleRequest) -> Any:
            body = {
                "input_ids": request.prompt_tokens.tolist(),
                "sampling_params": {"max_new_tokens": 8, "ignore_eos": True, "temperature": 1.0, "top_p": 1.0},
                "return_logprob": True,
                "return_routed_experts": True,
            }
            answer = ask(server, "generate", body).raise_for_status().json()
            answer["meta_info"]["weight_version"] = "0"  # instead of "default"
            return parse_answer(request, answer, 0, shape)

        with ThreadPoolExecutor(16) as pool:
            rollouts = list(pool.map(sampled, requests))
    oracle = oracle_of(sglang_model, noisy(sglang_model, 0))
    assert logprob_gap(rollouts, oracle) < CLOSE
    share = same_sets(rollouts, oracle)
    print(f"{share:.0%} of the rows are right")
    assert share < 0.9
