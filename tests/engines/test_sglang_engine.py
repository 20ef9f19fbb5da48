"""The SGLang engine on a real server: what it reports is true, and it follows the trainer's weights."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from rollout_oracle import make_requests
from sglang_fixtures import START_DEADLINE_S, transport_fields
from sglang_oracle import CLOSE, Weights, check_nuclei, logprob_gap, noisy, oracle_of, same_sets

from megarl.config.tables.rollout import SGLangConfig
from megarl.core.types import Rollout, SampleRequest
from megarl.engines.local.decode import sampling_logprobs
from megarl.engines.protocol import SamplingParams
from megarl.engines.sglang.engine import SGLangEngine
from megarl.engines.sglang.fleet import Fleet
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec
from megarl.engines.sglang.transports.protocol import send_tensors
from megarl.engines.sglang.transports.sender import WeightSender
from megarl.engines.weights import Bucket, WeightForm
from megarl.errors import MegarlError, RolloutError, WeightSyncError

pytestmark = pytest.mark.sglang

EXACT = 2e-5
FORM = WeightForm(torch.float32)
PARAMS = SamplingParams(max_response_tokens=8)


@pytest.fixture(scope="module")
def config(hostile_model: Path) -> dict[str, Any]:
    return json.loads((hostile_model / "config.json").read_text())


@pytest.fixture
def fleet(updated_server: Server, hostile_model: Path) -> Iterator[Fleet]:
    """Of one test: two fleets with keepers would both send their weights to a server that has lost them."""
    fleet = Fleet(urls=[updated_server.url], source=hostile_model)
    fleet.start()
    yield fleet
    fleet.close()


@pytest.fixture
def engine(fleet: Fleet, config: dict[str, Any], updated_server: Server) -> SGLangEngine:
    settings = SGLangConfig(concurrency=16, deadline_s=600.0)
    return SGLangEngine([updated_server.url], config, fleet=fleet, settings=settings, form=FORM)


@pytest.fixture(scope="module")
def weights(hostile_model: Path) -> list[Weights]:
    return [noisy(hostile_model, seed) for seed in range(3)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_routes_and_logprobs_are_those_of_transformers(
    engine: SGLangEngine, hostile_model: Path, weights: list[Weights], temperature: float
):
    # Smaller than the checkpoint's, with which float32 itself is up to 2.3e-5 from float64.
    calm = {name: tensor if "norm" in name else 0.3 * tensor for name, tensor in weights[0].items()}
    engine.update_weights(calm.items(), 0)
    requests = make_requests(6, copies=4)
    finished: list[int] = []
    rollouts = engine.generate(requests, replace(PARAMS, temperature=temperature), finished.append)
    assert sum(finished) == len(requests)
    for request, rollout in zip(requests, rollouts, strict=True):
        assert (rollout.group, rollout.sample) == (request.group, request.sample)
        assert np.array_equal(rollout.tokens[: len(request.prompt_tokens)], request.prompt_tokens)
        assert len(rollout.response_tokens) == PARAMS.max_response_tokens
        assert (rollout.finish_reason, set(rollout.weight_versions)) == ("length", {0})
    oracle = oracle_of(hostile_model, calm)
    assert same_sets(rollouts, oracle) == 1.0
    assert logprob_gap(rollouts, oracle, temperature) < EXACT
    assert logprob_gap(rollouts, oracle, temperature + 0.3) > 1e-2  # so that the check above can fail
    assert same_sets(rollouts, oracle_of(hostile_model, weights[1])) < 0.9


def test_defaults_of_the_model_folder_change_nothing(engine: SGLangEngine, weights: list[Weights]):
    """generation_config.json asks for top_k = 1, top_p = 0.1, temperature 0.1 and a repetition penalty."""
    engine.update_weights(weights[0].items(), 0)
    rollouts = engine.generate(make_requests(1, copies=64), PARAMS)
    assert len({tuple(rollout.response_tokens) for rollout in rollouts}) >= 32  # at a temperature of 0.1 there are four


@pytest.mark.parametrize("way", ["tensor", "deltas", "distributed", "ipc", "disk"])
def test_the_server_follows_the_weights(
    way: str,
    updated_server: Server,
    hostile_model: Path,
    config: dict[str, Any],
    weights: list[Weights],
    tmp_path: Path,
):
    fields = transport_fields(way, tmp_path, checksums=True)
    fleet = Fleet(urls=[updated_server.url], source=hostile_model, **fields)
    engine = SGLangEngine(fleet.start(), config, fleet=fleet, form=FORM)
    requests = make_requests(4, copies=2, seed=3)
    for version in (1, 2):
        engine.update_weights(weights[version].items(), version)
        rollouts = engine.generate(requests, PARAMS)
        assert logprob_gap(rollouts, oracle_of(hostile_model, weights[version])) < CLOSE
        assert same_sets(rollouts, oracle_of(hostile_model, weights[version])) == 1.0
        assert logprob_gap(rollouts, oracle_of(hostile_model, weights[version - 1])) > 0.1
    engine.close()
    assert updated_server.alive  # a server that was given by URL is left alone


@pytest.mark.parametrize("fault", ["lacks one", "unknown", "shape"])
def test_a_wrong_update_keeps_the_server_and_the_next_one_is_good(
    engine: SGLangEngine, hostile_model: Path, weights: list[Weights], fault: str
):
    """A server would answer success to the first two, and die of the third."""
    items = list(weights[1].items())
    name, tensor = items[-1]
    wrong = {
        "lacks one": items[:-1],
        "unknown": [*items, ("model.layers.0.nothing.weight", tensor)],
        "shape": [*items[:-1], (name, tensor.flatten()[:-1])],
    }[fault]
    with pytest.raises(WeightSyncError, match=r"missing|unknown|has shape"):
        engine.update_weights(iter(wrong), 5)
    with pytest.raises(WeightSyncError, match="no complete weights"):
        engine.generate(make_requests(1), PARAMS)
    engine.update_weights(weights[1].items(), 6)
    assert logprob_gap(engine.generate(make_requests(2), PARAMS), oracle_of(hostile_model, weights[1])) < CLOSE


def test_a_half_update_of_a_trainer_that_is_gone_is_no_obstacle(
    engine: SGLangEngine, hostile_model: Path, weights: list[Weights], updated_server: Server
):
    """It has left the server paused, with some new tensors, and with an open session where there are any."""
    assert engine.weight_version == -1
    with pytest.raises(WeightSyncError, match="update_weights first"):
        engine.generate(make_requests(1), PARAMS)
    gone = WeightSender(updated_server.url)
    gone.begin()
    send_tensors(gone, Bucket(list(weights[2].items())[:20]))
    gone.close()
    engine.update_weights(weights[1].items(), 1)
    assert logprob_gap(engine.generate(make_requests(2), PARAMS), oracle_of(hostile_model, weights[1])) < CLOSE


def test_what_the_prefix_cache_holds_of_old_weights_is_flushed(
    engine: SGLangEngine, hostile_model: Path, weights: list[Weights], updated_server: Server
):
    request = SampleRequest(np.arange(40, dtype=np.int32) % 28 + 2, 0, 0, 0)
    oracles = [oracle_of(hostile_model, each) for each in weights]
    for version in (1, 2, 1):
        engine.update_weights(weights[version].items(), version)
        for _ in range(2):  # the second time from the cache
            rollouts = engine.generate([request], PARAMS)
            assert same_sets(rollouts, oracles[version]) == 1.0
            assert logprob_gap(rollouts, oracles[version]) < CLOSE
    sender = WeightSender(updated_server.url)
    sender.begin()
    send_tensors(sender, Bucket(weights[2].items()))
    if sender._in_session:
        sender.post("end_weight_update", {})
    sender.post("continue_generation", {})
    sender.close()
    rollouts = engine.generate([request], PARAMS)  # as without the flush
    assert same_sets(rollouts, oracles[2]) < 0.9
    assert logprob_gap(rollouts, oracles[2]) > 1e-2


def test_the_ids_that_tokens_are_drawn_from_are_those_of_transformers(
    engine: SGLangEngine, hostile_model: Path, weights: list[Weights]
):
    """Their log-probabilities are within these ids. Without max_kept_ids they are the same, and the ids are dropped."""
    engine.update_weights(weights[0].items(), 0)
    params = replace(PARAMS, temperature=1.3, top_p=0.8)
    rollouts = engine.generate(make_requests(6, copies=4), replace(params, max_kept_ids=10_000))
    sizes = check_nuclei(rollouts, oracle_of(hostile_model, weights[0]), params)
    assert len(set(sizes)) > 3
    (bare,) = engine.generate(make_requests(1), params)
    assert (bare.kept_counts, bare.kept_ids) == (None, None)
    distribution = sampling_logprobs(oracle_of(hostile_model, weights[0]).logits(bare.tokens), 1.3, 0.8)[:-1]
    expected = distribution.gather(1, torch.tensor(bare.tokens[1:, None]).long())[bare.prompt_length - 1 :, 0]
    np.testing.assert_allclose(bare.rollout_logprobs[bare.prompt_length :], expected.numpy(), atol=CLOSE)
    with pytest.raises(RolloutError, match=r"more than the 9 of max_kept_ids: lower rollout\.top_p"):
        engine.generate(make_requests(1), replace(params, max_kept_ids=9))


def test_a_prompt_that_cannot_be_served_is_an_error_at_once(
    engine: SGLangEngine, hostile_model: Path, weights: list[Weights], updated_server: Server
):
    engine.update_weights(weights[0].items(), 0)
    for prompt, message in (
        (np.arange(63) % 28 + 2, "a prompt of 63 tokens leaves no room in 63 positions"),
        (np.arange(61) % 28 + 2, "refuses the request, HTTP 400"),
        (np.array([3, 32]), r"token outside of 0\.\.31"),
        (np.array([], np.int32), r"the prompt is int32 \(0,\), expected integers"),
    ):
        with pytest.raises(RolloutError, match=message):
            engine.generate([*make_requests(3), SampleRequest(prompt.astype(np.int32), 3, 0, 0)], PARAMS)
        assert updated_server.alive
    long = SampleRequest(np.arange(50, dtype=np.int32) % 28 + 2, 0, 0, 0)  # and one whose response ends it
    (rollout,) = engine.generate([long], replace(PARAMS, max_response_tokens=1000))
    assert 60 <= rollout.num_tokens <= 64
    assert rollout.finish_reason == "length"
    assert logprob_gap([rollout], oracle_of(hostile_model, weights[0])) < CLOSE


def test_a_rollout_of_another_version_is_refused(engine: SGLangEngine, weights: list[Weights], updated_server: Server):
    """Somebody else has updated the server behind our back."""
    engine.update_weights(weights[0].items(), 3)
    httpx.post(f"{updated_server.url}/update_weight_version", json={"new_version": "4"}).raise_for_status()
    engine._client.settings = engine._client.settings.model_copy(update={"start_deadline_s": 1.0})
    with pytest.raises(RolloutError, match=r"down, the last failure: .* does not answer with weights 3$"):
        engine.generate(make_requests(1), PARAMS)


def test_an_update_waits_for_ranks_that_still_sample(
    fleet: Fleet, config: dict[str, Any], weights: list[Weights], updated_server: Server
):
    """Two ranks share the server; the one that sends the weights is through with its own responses first."""
    met = threading.Barrier(2, timeout=600.0)

    def agree(failure: MegarlError | None) -> None:
        met.wait()
        if failure is not None:
            raise failure

    settings = SGLangConfig(concurrency=16, deadline_s=600.0)
    sender, other = (
        SGLangEngine([updated_server.url], config, fleet=owned, agree=agree, settings=settings, form=FORM)
        for owned in (fleet, None)
    )
    found: list[Rollout] = []
    begun = threading.Event()

    def until_asked(_: int) -> None:
        """Hold the responses back until the sender waits in its update."""
        end = time.monotonic() + 600.0
        while met.n_waiting == 0 and time.monotonic() < end:
            time.sleep(0.01)

    def other_rank() -> None:
        other.update_weights(weights[0].items(), 0)
        begun.set()
        params = replace(PARAMS, max_response_tokens=40)
        found.extend(other.generate(make_requests(8, copies=4), params, until_asked))
        other.update_weights(weights[1].items(), 1)

    thread = threading.Thread(target=other_rank)
    thread.start()
    sender.update_weights(weights[0].items(), 0)
    assert begun.wait(600.0)
    sender.update_weights(weights[1].items(), 1)
    thread.join()
    assert len(found) == 32
    assert {int(version) for rollout in found for version in rollout.weight_versions} == {0}


def test_servers_that_have_given_their_memory_back_sample_again_after_an_update(
    engine: SGLangEngine, fleet: Fleet, weights: list[Weights]
):
    engine.update_weights(weights[0].items(), 0)
    requests = make_requests(2, copies=2)
    before = engine.generate(requests, PARAMS)
    assert {int(v) for rollout in before for v in rollout.weight_versions} == {0}
    engine.rest()
    assert engine.weight_version == -1
    with pytest.raises(WeightSyncError, match="no complete weights"):
        engine.generate(requests, PARAMS)
    engine.update_weights(weights[1].items(), 1)
    after = engine.generate(requests, PARAMS)
    assert {int(v) for rollout in after for v in rollout.weight_versions} == {1}
    engine.update_weights(weights[0].items(), 2)  # and one that was not resting
    assert len(engine.generate(requests, PARAMS)) == len(requests)


@pytest.fixture(scope="module")
def engine_of_two_ranks(sglang_spec: ServerSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    spec = replace(sglang_spec, tp=2, log_file=tmp_path_factory.mktemp("tp") / "log")
    with pytest.MonkeyPatch.context() as patch:
        # With it a server leaves the temperature out of log-probabilities: it must not get so far.
        patch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
        fleet = Fleet([spec], settings=SGLangConfig(tp=2, start_deadline_s=START_DEADLINE_S))
        urls = fleet.start()
    config = json.loads((Path(spec.model_path) / "config.json").read_text())
    engine = SGLangEngine(urls, config, fleet=fleet, form=FORM)
    yield engine
    engine.close()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_both_ranks_follow_the_weights(engine_of_two_ranks: SGLangEngine, sglang_model: Path, temperature: float):
    params = SamplingParams(max_response_tokens=8, temperature=temperature)
    for version in (1, 2):
        engine_of_two_ranks.update_weights(noisy(sglang_model, version).items(), version)
        rollouts = engine_of_two_ranks.generate(make_requests(8, copies=2, seed=version), params)
        oracle = oracle_of(sglang_model, noisy(sglang_model, version))
        assert same_sets(rollouts, oracle) == 1.0
        assert logprob_gap(rollouts, oracle, temperature) < CLOSE
        assert logprob_gap(rollouts, oracle, temperature + 0.3) > 1e-2
        assert logprob_gap(rollouts, oracle_of(sglang_model, noisy(sglang_model, version - 1)), temperature) > 0.1


def test_one_message_of_deltas_reaches_both_ranks(engine_of_two_ranks: SGLangEngine, sglang_model: Path):
    urls = [member.url for member in engine_of_two_ranks._fleet.members]
    fleet = Fleet(urls=urls, source=sglang_model, settings=SGLangConfig(tp=2, deltas=True))
    config = json.loads((sglang_model / "config.json").read_text())
    engine = SGLangEngine(fleet.start(), config, fleet=fleet, form=FORM)
    for version in (1, 2):
        engine.update_weights(noisy(sglang_model, version).items(), version)
        rollouts = engine.generate(make_requests(8, copies=2, seed=version), PARAMS)
        assert logprob_gap(rollouts, oracle_of(sglang_model, noisy(sglang_model, version))) < CLOSE
        assert fleet.members[0].sender.takes_deltas
