"""Servers that fail: what is sampled stays complete and unique, or the run hears why it cannot be had."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_oracle import make_requests
from sglang_faulty import check_complete, in_background, kill_9
from sglang_fixtures import START_DEADLINE_S
from sglang_oracle import CLOSE, Weights, logprob_gap, noisy, oracle_of

from megarl.engines.protocol import SamplingParams
from megarl.engines.sglang.client import ClientSettings
from megarl.engines.sglang.engine import SGLangEngine
from megarl.engines.sglang.fleet import Fleet
from megarl.engines.sglang.member import FleetSettings
from megarl.engines.sglang.spec import ServerSpec
from megarl.engines.weights import WeightForm

pytestmark = [pytest.mark.sglang, pytest.mark.slow(minutes=2)]

PARAMS = SamplingParams(max_response_tokens=8)
SETTINGS = ClientSettings(concurrency=4, deadline_s=60.0, recovery_s=START_DEADLINE_S)


@pytest.fixture(scope="module")
def weights(hostile_model: Path) -> Weights:
    return noisy(hostile_model, 5)


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
