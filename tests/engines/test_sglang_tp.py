"""A server of two tensor-parallel ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rollout_oracle import make_requests
from sglang_fixtures import START_DEADLINE_S
from sglang_oracle import CLOSE, logprob_gap, noisy, oracle_of, same_sets

from megarl.engines.protocol import SamplingParams
from megarl.engines.sglang.engine import SGLangEngine
from megarl.engines.sglang.fleet import Fleet
from megarl.engines.sglang.member import FleetSettings
from megarl.engines.sglang.spec import ServerSpec
from megarl.engines.weights import WeightForm

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def engine(sglang_spec: ServerSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    spec = replace(sglang_spec, tp=2, log_file=tmp_path_factory.mktemp("tp") / "log")
    with pytest.MonkeyPatch.context() as patch:
        # With it a server leaves the temperature out of log-probabilities: it must not get so far.
        patch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
        fleet = Fleet([spec], tp=2, settings=FleetSettings(START_DEADLINE_S))
        urls = fleet.start()
    config = json.loads((Path(spec.model_path) / "config.json").read_text())
    engine = SGLangEngine(urls, config, fleet=fleet, form=WeightForm(torch.float32))
    yield engine
    engine.close()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_both_ranks_follow_the_weights(engine: SGLangEngine, sglang_model: Path, temperature: float):
    params = SamplingParams(max_response_tokens=8, temperature=temperature)
    for version in (1, 2):
        engine.update_weights(noisy(sglang_model, version).items(), version)
        rollouts = engine.generate(make_requests(8, copies=2, seed=version), params)
        oracle = oracle_of(sglang_model, noisy(sglang_model, version))
        assert same_sets(rollouts, oracle) == 1.0
        assert logprob_gap(rollouts, oracle, temperature) < CLOSE
        assert logprob_gap(rollouts, oracle, temperature + 0.3) > 1e-2
        assert logprob_gap(rollouts, oracle_of(sglang_model, noisy(sglang_model, version - 1)), temperature) > 0.1
