"""``megarl eval`` on a real SGLang server: the responses of the local engine, from both kinds of weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from megarl import cli
from megarl.data.tiny import write_sort_task
from megarl.engines.sglang.server import Server
from megarl.megatron import distributed

pytestmark = pytest.mark.sglang


def drawn(out: Path) -> list[dict[str, Any]]:
    text = (out / "heldout" / "responses.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def test_both_engines_and_both_kinds_of_weights_answer_alike(
    updated_server: Server, hostile_model: Path, tmp_path: Path
) -> None:
    """Greedy, fp32; the model's own sampling defaults (top_k 1, a repetition penalty) must not show."""
    write_sort_task(tmp_path / "task", num_train=16, num_heldout=12, num_demonstrations=0, digits=3)
    table = {
        "run": {"steps": 1, "dir": str(tmp_path / "run")},
        "model": {"path": str(hostile_model), "dtype": "fp32"},
        "data": {
            "train": str(tmp_path / "task" / "train.jsonl"),
            "heldout": str(tmp_path / "task" / "heldout.jsonl"),
            "max_prompt_tokens": 8,
        },
        "reward": {"function": "train_rewards:digit_share"},
        "rollout": {"prompts_per_step": 8, "group_size": 4, "max_response_tokens": 12, "dtype": "fp32"},
        "sglang": {"urls": [updated_server.url]},
        "train": {"micro_batch_tokens": 256},
        "optim": {"lr": 3e-2},
        "checkpoint": {"every": 1},
        "log": {"sinks": []},
    }
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(table))

    def run(*words: str | Path) -> int:
        distributed.shutdown()
        return cli.main([str(word) for word in words])

    def evaluate(name: str, *words: str | Path) -> list[dict[str, Any]]:
        assert run("eval", path, "--out", tmp_path / name, *words) == 0
        return drawn(tmp_path / name)

    assert run("train", path) == 0
    greedy, sglang = ["--eval.temperature", "0"], ["--rollout.engine", "sglang"]
    checkpoint = ["--checkpoint", tmp_path / "run"]
    before, after = evaluate("before", *greedy), evaluate("after", *greedy, *checkpoint)
    assert before != after  # the step of training shows
    assert evaluate("server before", *greedy, *sglang) == before
    assert evaluate("server after", *greedy, *sglang, *checkpoint) == after
    sampled = evaluate("sampled", *sglang, "--samples", "8")
    assert [(line["prompt"], line["sample"]) for line in sampled] == [(i, j) for i in range(12) for j in range(8)]
    texts = [{line["response"] for line in sampled[8 * i : 8 * i + 8]} for i in range(12)]
    assert all(len(different) > 1 for different in texts)
