"""FP8 weights in a real server, whose own loader takes them; its kernels are replaced, for they need a GPU or AMX."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from rollout_oracle import make_requests
from safetensors.torch import load_file
from sglang_fixtures import START_DEADLINE_S, transport_fields
from sglang_oracle import CLOSE, Weights, logprob_gap, noisy, oracle_of, same_sets

from megarl.convert.job import Options
from megarl.convert.quantization import quantize
from megarl.data.tiny import write_tiny_model
from megarl.engines.protocol import SamplingParams
from megarl.engines.sglang.engine import SGLangEngine
from megarl.engines.sglang.fleet import Fleet
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec
from megarl.engines.sglang.transports.folder import write_empty_model
from megarl.engines.weights import Bucket, WeightForm

PLUGIN = Path(__file__).parents[1] / "fp8_without_kernels"
PARAMS = SamplingParams(max_response_tokens=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of several blocks; a server takes only whole ones."""
    sizes = {"hidden_size": 256, "num_layers": 2, "num_kv_heads": 4, "num_experts": 8, "expert_width": 128}
    return write_tiny_model(tmp_path_factory.mktemp("fp8") / "model", initializer_range=0.08, **sizes)


@contextmanager
def serving(spec: ServerSpec) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(PLUGIN))
        with Server(spec) as server:
            server.wait_ready(START_DEADLINE_S)
            yield server


@pytest.fixture(scope="module")
def server(sglang_spec: ServerSpec, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    served = write_empty_model(model, folder / "model", fp8=True)
    arguments = ("--load-format", "dummy")
    with serving(replace(sglang_spec, model_path=served, log_file=folder / "log", extra_args=arguments)) as server:
        yield server


def rounded(weights: Weights) -> Weights:
    return dict(Bucket(weights.items(), form=WeightForm(torch.float32, "rounded")).tensors())


@pytest.mark.sglang
@pytest.mark.parametrize("way", ["tensor", "deltas", "distributed", "ipc", "disk"])
def test_a_server_computes_with_the_blocks_that_were_sent(
    way: str, server: Server, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("megarl.engines.weights.BUCKET_BYTES", 1 << 18)  # several, with FP8 and float32 in most
    fleet = Fleet(
        urls=[server.url],
        source=model,
        served=Path(server.spec.model_path),
        **transport_fields(way, tmp_path / "sent", fp8=True),
    )
    config = json.loads((model / "config.json").read_text())
    engine = SGLangEngine(fleet.start(), config, fleet=fleet, form=WeightForm(torch.float32, "blocks"))
    for version in (1, 2):
        weights = noisy(model, version, scale=0.03)
        engine.update_weights(weights.items(), version)
        rollouts = engine.generate(make_requests(4, copies=2), PARAMS)
        oracle = oracle_of(model, rounded(weights))
        assert logprob_gap(rollouts, oracle) < CLOSE
        assert same_sets(rollouts, oracle) == 1.0
        assert logprob_gap(rollouts, oracle_of(model, weights)) > 100 * CLOSE  # FP8 was not left out
    engine.close()


def test_the_folder_of_an_fp8_model_has_no_weights_and_says_what_comes(model: Path, tmp_path: Path):
    folder = write_empty_model(model, tmp_path / "served", fp8=True)
    found = json.loads((folder / "config.json").read_text())
    assert found.pop("quantization_config")["weight_block_size"] == [128, 128]
    assert found == json.loads((model / "config.json").read_text())
    assert not list(folder.glob("*.safetensors*"))
    assert (folder / "tokenizer.json").exists()
    assert load_file(model / "model.safetensors")  # those of the source stay
    again = write_empty_model(folder, tmp_path / "again", fp8=False)
    assert json.loads((again / "config.json").read_text()) == found


@pytest.fixture(scope="module")
def folder_server(sglang_spec: ServerSpec, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    options = Options(shard_bytes=1 << 20)
    quantize(model, folder / "fp8", options)
    assert len([*(folder / "fp8").glob("*.safetensors")]) > 1
    with serving(replace(sglang_spec, model_path=folder / "fp8", log_file=folder / "log")) as server:
        yield server


def prompt_logprobs(url: str, tokens: list[int]) -> np.ndarray:
    body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
    answer = httpx.post(f"{url}/generate", json={**body, "logprob_start_len": 0}, timeout=600.0)
    answer.raise_for_status()
    found = answer.json()["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in found] == tokens
    return np.array([entry[0] for entry in found[1:]])


def gap(found: list[np.ndarray], sequences: list[list[int]], model: Path, weights: Weights) -> float:
    oracle = oracle_of(model, weights)
    worst = 0.0
    for logprobs, tokens in zip(found, sequences, strict=True):
        expected = oracle.logits(np.array(tokens))[:-1].log_softmax(-1)
        expected = expected.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()
        worst = max(worst, float(np.abs(expected - logprobs).max()))
    return worst


@pytest.mark.sglang
def test_a_server_computes_with_what_the_folder_holds(folder_server: Server, model: Path) -> None:
    # Servers tell the last id of a vocabulary as 0 in this list.
    sequences = np.random.default_rng(0).integers(2, 24, (4, 24)).tolist()
    found = [prompt_logprobs(folder_server.url, tokens) for tokens in sequences]
    weights = load_file(model / "model.safetensors")
    assert gap(found, sequences, model, rounded(weights)) < CLOSE
    assert gap(found, sequences, model, weights) > 10 * CLOSE
