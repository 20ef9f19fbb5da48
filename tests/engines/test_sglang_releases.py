"""Older SGLang releases: each real server does what the table says of it, and what megarl needs.

The pinned release is what all other tests run; here it is only compared with the table.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from absent import SGLANG_PYTHON
from rollout_oracle import make_requests
from sglang_fixtures import START_DEADLINE_S, forking, transport_fields
from sglang_oracle import CLOSE, Weights, logprob_gap, noisy, oracle_of, pause_after, same_sets

from megarl.config.tables.rollout import SGLangConfig
from megarl.engines.protocol import SamplingParams
from megarl.engines.sglang.engine import SGLangEngine
from megarl.engines.sglang.fleet import Fleet
from megarl.engines.sglang.http import authorization, server_info
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec
from megarl.engines.sglang.versions import NEWEST, UPDATE_SESSIONS, parse_version
from megarl.engines.weights import WeightForm

pytestmark = [pytest.mark.sglang, pytest.mark.slow(minutes=4)]

CHECKSUMS_ON_CPU = (0, 5, 23)
PARAMS = SamplingParams(max_response_tokens=8)
LONG = SamplingParams(max_response_tokens=480)
KEY = "open-sesame"
OVERLAP_IS_WRONG = "0.5.17"
RELEASES = (OVERLAP_IS_WRONG, "0.5.18", "0.5.21")


@dataclass(frozen=True)
class Served:
    release: str
    server: Server
    fleet: Fleet
    engine: SGLangEngine
    told: list[str]


def release_of(server: Server) -> str:
    return str(server_info(server.url, server.spec.api_key)["version"])


def ask(server: Server, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    headers = authorization(server.spec.api_key)
    return httpx.post(f"{server.url}/{path}", json=body or {}, headers=headers, timeout=600.0)


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
    settings = SGLangConfig(concurrency=16, start_deadline_s=START_DEADLINE_S, checksums=False)
    fleet = Fleet([spec], api_key=KEY, settings=settings, poll_s=0.1, tell=told.append)
    urls = fleet.start()
    engine = SGLangEngine(urls, config, fleet=fleet, settings=settings, api_key=KEY, form=WeightForm(torch.float32))
    server = fleet.members[0].process
    assert server is not None
    yield Served(release, server, fleet, engine, told)
    engine.close()


@pytest.fixture(scope="module")
def weights(sglang_model: Path) -> list[Weights]:
    return [noisy(sglang_model, seed) for seed in range(3)]


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


@pytest.mark.parametrize("way", ["tensor", "deltas", "distributed", "disk"])
def test_the_server_follows_the_weights(
    served: Served, way: str, sglang_model: Path, weights: list[Weights], tmp_path: Path
):
    fleet = Fleet(
        urls=[served.server.url],
        api_key=KEY,
        source=sglang_model,
        **transport_fields(way, tmp_path, checksums=parse_version(served.release) >= CHECKSUMS_ON_CPU),
    )
    engine = SGLangEngine(
        fleet.start(),
        json.loads((sglang_model / "config.json").read_text()),
        fleet=fleet,
        api_key=KEY,
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


def test_a_paused_response_has_what_it_has_so_far(served: Served, sglang_model: Path, weights: list[Weights]):
    served.engine.update_weights(weights[1].items(), 1)
    requests = [replace(request, max_response_tokens=480) for request in make_requests(4)]
    parts = pause_after(served.engine, requests, 8, LONG)
    assert [len(part.response_tokens) for part in parts[4:]] == [8]
    paused = [part for part in parts if part.finish_reason == "pause"]
    assert any(part.loss_mask.any() for part in paused)
    oracle = oracle_of(sglang_model, weights[1])
    assert logprob_gap(paused, oracle) < CLOSE
    assert same_sets([part for part in paused if part.loss_mask.any()], oracle) == 1.0


def check_table(server: Server) -> None:
    release = parse_version(release_of(server))
    session = [ask(server, path).status_code for path in ("begin_weight_update", "end_weight_update")]
    assert session == ([200, 200] if release >= UPDATE_SESSIONS else [404, 404])

    found = sample(server, return_routed_experts=True, routed_experts_start_len=2)
    rows = len(base64.b64decode(found["routed_experts"])) / 4 / 3 / 2
    assert rows == 5
    spans = found.get("weight_versions")
    version = found["weight_version"]
    checked = ask(server, "weights_checker", {"action": "checksum"}).status_code
    assert checked == (200 if release >= CHECKSUMS_ON_CPU else 400)
    assert spans == ([{"version": version, "start": 0, "end": 4}] if release >= (0, 5, 19) else None)
    assert found["num_retractions"] == 0
    assert sample(server, rid="of-ours")["id"] == "of-ours"
    body = {"input_ids": [5, 6, 7, 8], "return_prompt_token_ids": True, "sampling_params": {"max_new_tokens": 1}}
    assert ask(server, "generate", body).json()["prompt_token_ids"] == [5, 6, 7, 8]


def test_it_can_do_what_the_table_says(served: Served):
    assert release_of(served.server) == served.release
    assert served.told == []
    check_table(served.server)
    for path in ("generate", "update_weights_from_tensor", "server_info"):
        assert httpx.post(f"{served.server.url}/{path}", json={}, timeout=600.0).status_code == 401


def test_the_pinned_release_can_do_what_the_table_says(sglang_server: Server):
    assert parse_version(release_of(sglang_server)) == NEWEST
    check_table(sglang_server)
