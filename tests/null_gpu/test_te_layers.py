"""Transformer Engine's layers against Megatron's local ones on the CPU, and every family's names and shapes in them.

On the null GPU, TE's Python code runs over reference maths (``te``). On a GPU it runs over its own kernels, which
compute fp32 products in TF32; the wider bound for that has not been measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import FAMILIES

from megarl.config.process_environment import process_environment

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "megatron"))  # of tiny_world, which imports Megatron: in fixtures only
NULL = "NULL_GPU" in os.environ
TOLERANCE = 1e-5 if NULL else 5e-3
"""Of fp32 gradients, relative to the largest entry of a tensor; of losses and norms."""
MODELS = ("base", *(model for model in FAMILIES if model != "qwen3_moe"))  # base is one
DENSE = ("llama", "qwen2", "qwen3")
ON_TWO = ("base", "qwen2_moe", "deepseek_v3", "moonlight", "gpt_oss")

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_world import write_models

    folder = tmp_path_factory.mktemp("te") / "models"
    write_models(folder)
    return folder


def _run(models: Path, name: str, cases: list[str], ranks: int = 1, **environment: str) -> Results:
    words = [str(HERE / "te_cases.py"), str(models), str(models / name), *cases]
    if ranks > 1:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *words]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return torch.load(models / name)


@pytest.fixture(scope="module")
def cpu(models: Path) -> Results:
    cases = [*(f"step/{model}/fp32/" for model in MODELS), "step/base/bf16/"]
    return _run(models, "cpu", cases, CUDA_VISIBLE_DEVICES="", WITHOUT_TE="1")


@pytest.fixture(scope="module")
def gpu(models: Path) -> Results:
    from tiny_world import config

    cases = [
        *(f"step/{model}/fp32/" for model in MODELS),
        *("step/base/bf16/", "recomputed/base/fp32/", "recomputed/deepseek_v3/fp32/", "deterministic/base/fp32/"),
        "resumed/base/bf16/",
    ]
    settings = config(models / "base", run__deterministic=True)
    return _run(models, "gpu", cases, **process_environment(settings, os.environ))


@pytest.fixture(scope="module")
def without_te(models: Path) -> Results:
    return _run(models, "without", ["step/base/fp32/", "step/kimi_k2/fp32/", "resumed/base/bf16/"], WITHOUT_TE="1")


@pytest.fixture(scope="module")
def two_gpus(models: Path) -> Results:
    if not NULL and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    cases = [f"{'step' if model in ON_TWO else 'names'}/{model}/fp32/{_layout(model)}" for model in MODELS]
    return _run(models, "two", cases, ranks=2, NULL_GPU_DEVICES="2")


def _layout(model: str) -> str:
    return "tp2" if model in DENSE else "tp2 ep2 etp1"


def _assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, wanted in expected["gradients"].items():
        largest = float(wanted.abs().max())
        assert float((found["gradients"][name] - wanted).abs().max()) <= TOLERANCE * largest, name
    assert expected["norm"] > 0
    assert found["norm"] == pytest.approx(expected["norm"], rel=TOLERANCE)
    assert found["losses"] == pytest.approx(expected["losses"], rel=10 * TOLERANCE)


@pytest.mark.parametrize("model", MODELS)
def test_a_step_with_te_is_the_cpu_step(model: str, cpu: Results, gpu: Results) -> None:
    found = gpu[f"step/{model}/fp32/"]
    # TE lacks norms over all heads and indexers, and up to 2.11 gpt-oss's sinks in packed sequences.
    local = ("olmoe", "deepseek_v32", "glm_moe_dsa")
    assert ("TEDotProductAttention" in found["layers"]) == (model not in (*local, "gpt_oss"))
    assert ("TEGroupedMLP" in found["layers"]) == (model not in (*DENSE, *local))
    _assert_same(found, cpu[f"step/{model}/fp32/"])


@pytest.mark.parametrize("case", ["recomputed/base", "recomputed/deepseek_v3", "deterministic/base"])
def test_recomputation_and_determinism_change_nothing(case: str, cpu: Results, gpu: Results) -> None:
    _assert_same(gpu[f"{case}/fp32/"], cpu[f"step/{case.partition('/')[2]}/fp32/"])


@pytest.mark.parametrize("model", ["base", "kimi_k2"])
def test_a_gpu_trains_without_te(model: str, cpu: Results, without_te: Results) -> None:
    found = without_te[f"step/{model}/fp32/"]
    assert not {name for name in found["layers"] if name.startswith("TE")}
    _assert_same(found, cpu[f"step/{model}/fp32/"])


@pytest.mark.parametrize("layers", ["gpu", "without_te"])
def test_a_run_resumes_on_a_gpu(layers: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue(layers)["resumed/base/bf16/"]
    assert len(found["resumed"]) == 2
    assert found["resumed"] == found["straight"][2:]
    assert found["same"] == [True, True]


def test_bf16_with_te_is_as_far_from_fp32_as_on_the_cpu(cpu: Results, gpu: Results) -> None:
    exact = cpu["step/base/fp32/"]["gradients"]

    def distance(results: Results) -> float:
        found = results["step/base/bf16/"]["gradients"]
        error = sum(float((found[name] - exact[name]).square().sum()) for name in exact)
        return (error / sum(float(exact[name].square().sum()) for name in exact)) ** 0.5

    assert 1e-3 < distance(cpu) < 3e-2
    assert 1e-3 < distance(gpu) < 1.5 * distance(cpu)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_weights_pass_te_bit_for_bit(model: str, ranks: int, request: pytest.FixtureRequest, models: Path) -> None:
    results = request.getfixturevalue("gpu" if ranks == 1 else "two_gpus")
    found = next(result for case, result in results.items() if case.split("/")[1] == model)
    assert [found["missing"], found["unknown"], found["different"]] == [[], [], []]
    config = json.loads((models / model / "config.json").read_text())
    own = config.get("text_config", config)["rms_norm_eps"]
    latent = {name for name in found["epsilons"] if name.endswith(("q_up_proj", "kv_up_proj"))}
    assert bool(latent) == (model in ("deepseek_v3", "moonlight", "kimi_k2"))
    assert {found["epsilons"][name] for name in latent} <= {1e-6}  # transformers' default, whatever the config says
    assert {eps for name, eps in found["epsilons"].items() if name not in latent} == {own}


@pytest.mark.parametrize("model", ON_TWO)
def test_two_ranks_with_te_are_the_cpu_step(model: str, cpu: Results, two_gpus: Results) -> None:
    _assert_same(two_gpus[f"step/{model}/fp32/{_layout(model)}"], cpu[f"step/{model}/fp32/"])
