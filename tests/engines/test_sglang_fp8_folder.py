"""A real server that starts from a written FP8 folder: its own loader; kernels replaced, for they need a GPU or AMX."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sglang_fixtures import START_DEADLINE_S
from sglang_oracle import CLOSE, Weights, oracle_of

from megarl.convert.job import Options
from megarl.convert.quantization import quantize
from megarl.core.fp8 import is_fp8_weight, round_through_fp8
from megarl.data.tiny import write_tiny_model
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec

PLUGIN = Path(__file__).parents[1] / "fp8_without_kernels"
KEEP = ("*.layers.0.self_attn.*", "*.layers.1.mlp.experts.*")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of several blocks; a server takes only whole ones."""
    sizes = {"hidden_size": 256, "num_layers": 2, "num_kv_heads": 4, "num_experts": 8, "expert_width": 128}
    return write_tiny_model(tmp_path_factory.mktemp("fp8") / "model", initializer_range=0.08, **sizes)


@pytest.fixture(scope="module")
def server(sglang_spec: ServerSpec, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With attention of one layer and experts of the other in high precision."""
    folder = tmp_path_factory.mktemp("served")
    options = Options(shard_bytes=1 << 20)
    assert quantize(model, folder / "fp8", options).num_files > 1
    spec = replace(sglang_spec, model_path=folder / "fp8", log_file=folder / "log")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(PLUGIN))
        with Server(spec) as server:
            server.wait_ready(START_DEADLINE_S)
            yield server


def prompt_logprobs(url: str, tokens: list[int]) -> np.ndarray:
    body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
    answer = httpx.post(f"{url}/generate", json={**body, "logprob_start_len": 0}, timeout=120.0)
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
def test_a_server_computes_with_what_the_folder_holds(server: Server, model: Path) -> None:
    # Servers tell the last id of a vocabulary as 0 in this list.
    sequences = np.random.default_rng(0).integers(2, 24, (4, 24)).tolist()
    found = [prompt_logprobs(server.url, tokens) for tokens in sequences]
    weights = load_file(model / "model.safetensors")
    kept = {name for name in weights if any(fnmatch.fnmatch(name, glob) for glob in KEEP)}
    all_rounded = {name: round_through_fp8(one) if is_fp8_weight(name) else one for name, one in weights.items()}
    written = {name: weights[name] if name in kept else one for name, one in all_rounded.items()}
    assert gap(found, sequences, model, written) < CLOSE
    for other in (weights, all_rounded):
        assert gap(found, sequences, model, other) > 10 * CLOSE
