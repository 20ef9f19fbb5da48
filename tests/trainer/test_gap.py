"""``megarl gap`` with real engines: precisions, transformers' log-probabilities, spoiled weights, checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from tampered_engine import FROM_VERSION
from tiny_families import write_family
from transformers import AutoModelForCausalLM

from megarl import cli
from megarl.config.file import parse
from megarl.core.packing import pack
from megarl.data.tiny import write_sort_task, write_tiny_model
from megarl.megatron import distributed
from megarl.ops.evaluate import gap
from megarl.ops.evaluate.gap import TrainingEngine, draw
from megarl.trainer.loop import train
from megarl.trainer.mini_batch import split

SHORT = ("--responses", "12", "--tokens", "12")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gap")
    small: dict[str, Any] = {"hidden_size": 64, "num_layers": 2, "num_experts": 16, "expert_width": 32}
    write_tiny_model(folder / "moe", initializer_range=0.15, **small)
    write_tiny_model(folder / "dense", family="qwen3", **small)
    write_sort_task(folder / "task", num_train=16, num_heldout=4, num_demonstrations=4)
    return folder


def table(home: Path, engine: str = "local", dtype: str = "fp32") -> dict[str, Any]:
    return {
        "run": {"steps": 1, "dir": str(home / "run")},
        "model": {"path": str(home / "moe"), "dtype": dtype},
        "data": {"train": str(home / "task" / "train.jsonl"), "max_prompt_tokens": 8},
        "reward": {"function": "train_rewards:digit_share"},
        "rollout": {"engine": engine, "dtype": dtype}
        | {"prompts_per_step": 2, "group_size": 2, "max_response_tokens": 12},
        "train": {"micro_batch_tokens": 40},
        "checkpoint": {"every": 1},
        "optim": {"lr": 1e-4},
    }


def gaps(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, dict[str, Any]]:
    status = cli.main(["gap", *map(str, words), *SHORT, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_precisions_of_a_moe_and_what_replay_removes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = gaps(capsys, home / "moe", "--prompts", home / "task" / "train.jsonl")
    rows = {(row["rollout"], row["training"]): row for row in found["gaps"]}
    rounded = ["fp8 weights", "fp8", "fp8 with cache"]
    assert list(rows) == [("bf16", "bf16"), ("fp32", "bf16"), *((name, "bf16") for name in rounded), ("fp32", "fp32")]
    assert [name for name, row in rows.items() if row["is_configured"]] == [("bf16", "bf16")]
    control, fp8, bf16 = rows["fp32", "fp32"], rows["fp8", "bf16"], rows["bf16", "bf16"]
    assert control["native"]["k3"] < 1e-9
    assert control["flips"] == [0.0, 0.0]
    assert fp8["native"]["k3"] > 10 * bf16["native"]["k3"] > 1e3 * control["native"]["k3"]
    assert fp8["replayed"]["k3"] < 0.8 * fp8["native"]["k3"]
    assert min(fp8["flips"]) > bf16["flip"] > 0
    assert fp8["native"]["k3"] > rows["fp8 weights", "bf16"]["native"]["k3"] > 3 * bf16["native"]["k3"]
    assert rows["fp8 with cache", "bf16"]["native"] != fp8["native"]
    assert status == (0 if found["healthy"] else 1)


@pytest.mark.parametrize(
    ("family", "rounded"), [("deepseek_v3", ["fp8 weights", "fp8"]), ("gpt_oss", [])], ids=["latents", "stacks"]
)
def test_what_no_engine_rounds_is_not_rounded(family: str, rounded: list[str], home: Path, tmp_path: Path) -> None:
    model = {"path": str(write_family(tmp_path / "model", family)), "dtype": "fp32"}
    names = [name for name, _, _ in gap._pairs(parse({**table(home), "model": model}))]
    assert names == ["fp32", "bf16", *rounded]


def test_the_gap_is_that_of_transformers(home: Path) -> None:
    """The rollouts' log-probabilities are replaced; micro-batches put sequences into another order."""
    config = parse(table(home))
    distributed.initialize(config)
    model = TrainingEngine(config, None)
    rollouts = draw(config, model, 12)
    micros = split(config, pack(rollouts, np.zeros(12)))
    assert [index for micro in micros for index in micro.sequences] != list(range(12))
    oracle = AutoModelForCausalLM.from_pretrained(home / "moe", dtype=torch.float32)
    rng, log_rho = np.random.default_rng(0), []
    for rollout in rollouts:
        with torch.no_grad():
            logprobs = oracle(torch.tensor(rollout.tokens[None].astype(np.int64))).logits[0].log_softmax(-1)
        places = np.flatnonzero(rollout.loss_mask)
        shift = rng.uniform(0.5, 1.5, len(places)).astype(np.float32)  # of each token, so that no two may be exchanged
        rollout.rollout_logprobs[places] = logprobs[places - 1, rollout.tokens[places]].numpy() - shift
        log_rho += shift.tolist()
    measured = model.compare(rollouts, "fp32", True)
    assert measured.num_tokens == len(log_rho)
    assert measured.native.k1 == pytest.approx(-np.mean(log_rho), rel=1e-4)
    assert measured.native.k3 == pytest.approx(np.mean(np.expm1(log_rho) - np.array(log_rho)), rel=1e-4)
    assert measured.replayed is not None
    assert measured.replayed.k3 == pytest.approx(measured.native.k3, rel=1e-4)


def test_spoiled_weights_in_the_engine_are_bad(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FROM_VERSION[0] = 0
    config = tmp_path / "gap.toml"
    config.write_text(tomli_w.dumps(table(home, "tampered_engine:other_weights")))
    status, found = gaps(capsys, home / "moe", "--config", config)
    assert status == 1
    assert not found["healthy"]
    assert "disagree even in fp32" in found["findings"][0]
    assert found["gaps"][0]["replayed"]["k3"] > 0.1


def test_a_dense_model_has_a_gap_and_no_routes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--prompts", str(home / "task" / "train.jsonl"))
    status = cli.main(["gap", str(home / "dense"), *words, *SHORT])
    shown = capsys.readouterr().out
    assert status == 0
    assert "healthy: " in shown
    assert "\nfp8 " in shown
    assert " r3 " not in shown


def test_a_run_brings_its_checkpoint_and_its_configuration(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(parse(table(home)))
    distributed.shutdown()
    capsys.readouterr()
    status, found = gaps(capsys, home / "run")
    assert status == 0
    assert found["gaps"][0]["training"] == "fp32"
    again = gaps(capsys, home / "run" / "checkpoints" / "step_0000001")[1]
    assert again == found
    before = gaps(capsys, home / "moe", "--config", home / "run" / "config.toml")[1]
    assert before["gaps"] != found["gaps"]  # the step has moved the weights


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere", "--prompts", "p.jsonl"), "nowhere is not a folder; expected a Hugging Face folder"),
        (("moe",), "is a model without a run: give --prompts FILE, or --config FILE"),
        (("task", "--prompts", "p.jsonl"), "holds no complete checkpoint"),
        (("moe", "--prompts", "p.jsonl", "--max-k3", "-1"), "--max-k3"),
        (("moe", "--prompts", "p.jsonl", "--rollout.dtype", "fp33"), "--rollout.dtype: found 'fp33'"),
    ],
)
def test_mistakes_are_one_line(
    words: tuple[str, ...], message: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(home)
    assert cli.main(["gap", *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("megarl: error: ")
    assert message in error
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["gap", str(home / "moe")]) == 2
    assert "runs in one process" in capsys.readouterr().err
