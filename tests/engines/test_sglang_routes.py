"""Routes from a real SGLang server: the plugin's short form says what the plain one says, and turns add up."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from rollout_oracle import make_requests
from sglang_oracle import CLOSE, Weights, logprob_gap, noisy, oracle_of, same_sets

from megarl.config.tables.rollout import SGLangConfig
from megarl.core.types import SampleRequest
from megarl.engines.protocol import SamplingParams
from megarl.engines.sglang.engine import SGLangEngine
from megarl.engines.sglang.fleet import Fleet
from megarl.engines.sglang.plugin.compact import HEADER, make_header
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec, environment
from megarl.engines.weights import WeightForm
from megarl.files.hf_config import MoeShape
from megarl.routes.answers import decode_routes, is_compact
from megarl.routes.turns import join, known_rows

pytestmark = pytest.mark.sglang

PARAMS = SamplingParams(max_response_tokens=8)
PROMPTS = [[5, 6, 7, 8] * 6, [9, 6, 7, 8] * 6]
OUTPUT = 30
NUM_ROWS = len(PROMPTS[0]) + OUTPUT - 1


@pytest.fixture(scope="module")
def weights(hostile_model: Path) -> Weights:
    return noisy(hostile_model, 7)


@pytest.fixture(scope="module")
def fleet(updated_server: Server, hostile_model: Path, weights: Weights) -> Iterator[Fleet]:
    fleet = Fleet(urls=[updated_server.url], source=hostile_model)
    fleet.start()
    yield fleet
    fleet.close()


@pytest.fixture(scope="module", params=[True, False], ids=["compact", "plain"])
def engine(fleet: Fleet, hostile_model: Path, weights: Weights, request: pytest.FixtureRequest) -> SGLangEngine:
    config = json.loads((hostile_model / "config.json").read_text())
    settings = SGLangConfig(concurrency=16, deadline_s=600.0)
    engine = SGLangEngine(fleet.urls, config, fleet=fleet, settings=settings, form=WeightForm(torch.float32))
    if not request.param:
        del engine._client.headers[HEADER]
    engine.update_weights(weights.items(), 0)
    return engine


def texts(server: Server, headers: dict[str, str], changes: dict[str, Any]) -> list[str]:
    """The traces of a greedy request, one for each sample, in the order of prompts and samples."""
    sampling = {"temperature": 0.0, "max_new_tokens": OUTPUT, "ignore_eos": True} | changes.pop("sampling", {})
    body = {"input_ids": PROMPTS[0], "sampling_params": sampling, "return_routed_experts": True} | changes
    answer = httpx.post(f"{server.url}/generate", json=body, headers=headers, timeout=600.0)
    answer.raise_for_status()
    if not body.get("stream"):
        found = answer.json()
        return [one["meta_info"]["routed_experts"] for one in (found if isinstance(found, list) else [found])]
    parts = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    last = {part.get("index", 0): part["meta_info"].get("routed_experts") for part in parts}
    assert sum("routed_experts" in part["meta_info"] for part in parts) == len(last) < len(parts)
    return [text for _, text in sorted(last.items())]


KINDS: dict[str, dict[str, Any]] = {
    "one": {},
    "two samples": {"sampling": {"n": 2}},
    "two prompts": {"input_ids": PROMPTS},
    "stream": {"stream": True},
    "stream of two samples": {"stream": True, "sampling": {"n": 2}},
    "stream of two prompts": {"stream": True, "input_ids": PROMPTS},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_short_form_says_what_the_plain_one_says(sglang_server: Server, sglang_model: Path, kind: str):
    changes = KINDS[kind]
    shape = MoeShape.of(json.loads((sglang_model / "config.json").read_text()))
    plain = texts(sglang_server, {}, dict(changes))
    short = texts(sglang_server, make_header(shape), dict(changes))
    assert len(short) == len(plain)
    for one, other in zip(plain, short, strict=True):
        assert not is_compact(base64.b64decode(one))
        assert is_compact(base64.b64decode(other))
        assert len(one) / len(other) >= 4.0
        expected = decode_routes(one, NUM_ROWS, shape, "plain").experts
        assert np.array_equal(decode_routes(other, NUM_ROWS, shape, "short").experts, expected)
    if "input_ids" in changes:
        assert short[0] != short[1]


PLACES = [[3, 1, 7, 0, 5, 2, 6, 4, 3, 7], [6, 2, 0, 1, 4, 7, 5, 3, 0, 1], [7, 6, 5, 4, 3, 2, 1, 0, 7, 6]]


def test_moved_and_redundant_experts_keep_their_numbers_and_get_all_updates(
    sglang_spec: ServerSpec, hostile_model: Path, weights: Weights, tmp_path: Path
):
    """By layer, which expert each of ten places holds: the server answers with experts, not with places."""
    (tmp_path / "places.json").write_text(json.dumps({"physical_to_logical_map": PLACES}))
    more = ["--ep-num-redundant-experts", "2", "--init-expert-location", str(tmp_path / "places.json")]
    arguments = (*more, "--ep-dispatch-algorithm", "dynamic")
    spec = replace(sglang_spec, model_path=hostile_model, log_file=tmp_path / "log", extra_args=arguments)
    config = json.loads((hostile_model / "config.json").read_text())
    assert config["num_hidden_layers"] == len(PLACES)
    with Server(spec) as server:
        server.wait_ready(1200.0)
        assert httpx.get(f"{server.url}/server_info", timeout=600.0).json()["ep_num_redundant_experts"] == 2
        fleet = Fleet(urls=[server.url], source=hostile_model)
        fleet.start()
        settings = SGLangConfig(concurrency=16, deadline_s=600.0)
        engine = SGLangEngine(fleet.urls, config, fleet=fleet, settings=settings, form=WeightForm(torch.float32))
        engine.update_weights(weights.items(), 0)
        rollouts = engine.generate(make_requests(4, copies=2), PARAMS)
        fleet.close()
    oracle = oracle_of(hostile_model, weights)
    assert same_sets(rollouts, oracle) == 1.0
    assert logprob_gap(rollouts, oracle) < CLOSE
    moved = np.array(PLACES)[np.arange(3)[:, None], rollouts[0].routed_experts]
    assert not np.array_equal(np.sort(moved), np.sort(rollouts[0].routed_experts))  # places would be seen


LOADED = (
    "from sglang.srt.plugins import load_plugins; load_plugins(); "
    "from sglang.srt.managers.tokenizer_manager import TokenizerManager as T; "
    "hooked = T.generate_request; depth = 0\n"
    "while hasattr(hooked, '__wrapped__'): hooked, depth = hooked.__wrapped__, depth + 1\n"
    "print('depth', depth)"
)


def test_a_server_has_the_plugin_once(sglang_spec: ServerSpec, tmp_path: Path):
    """Where megarl is installed beside SGLang it announces the plugin too."""
    installed = tmp_path / "megarl-0.1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: megarl\nVersion: 0.1\n")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (entry,) = project["entry-points"]["sglang.srt.plugins"].items()
    (installed / "entry_points.txt").write_text("[sglang.srt.plugins]\n{} = {}\n".format(*entry))
    (tmp_path / "megarl").symlink_to(Path(__file__).parents[2] / "megarl")
    env = environment(sglang_spec)
    env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    done = subprocess.run(
        [str(sglang_spec.python), "-c", LOADED], env=env, capture_output=True, text=True, timeout=1200
    )
    assert "depth 1" in done.stdout, done.stderr[-2000:]


def test_a_second_turn_asks_for_the_rows_that_the_first_one_lacks(
    engine: SGLangEngine, hostile_model: Path, weights: Weights
):
    """The server sends no others, and both turns together are one sequence with all rows."""
    oracle = oracle_of(hostile_model, weights)
    first = engine.generate(make_requests(4, copies=2), PARAMS)
    more = np.array([4, 9, 11], np.int32)
    requests = [
        SampleRequest(np.concatenate([turn.tokens, more]), turn.group, turn.sample, 0, known_rows=known_rows(turn))
        for turn in first
    ]
    assert [request.known_rows for request in requests] == [turn.num_tokens - 1 for turn in first]
    second = engine.generate(requests, PARAMS)
    for request, before, after in zip(requests, first, second, strict=True):
        known = request.known_rows
        assert after.routed_mask.tolist() == [False] * known + [True] * (after.num_tokens - 1 - known) + [False]
        whole = join(before, after)
        assert same_sets([whole], oracle) == 1.0  # and a row for every token but the last
        assert logprob_gap([whole], oracle) < CLOSE
        assert whole.loss_mask.sum() == before.loss_mask.sum() + after.loss_mask.sum()
