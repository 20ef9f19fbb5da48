"""Every benchmark that computes on a GPU, on the null GPU: it runs to its end, and its figures are complete."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.data.tiny import write_sort_task, write_tiny_model

HERE = Path(__file__).parent
TOOLS = HERE.parents[1] / "tools"
pytestmark = pytest.mark.skipif(not os.environ.get("NULL_GPU"), reason="users run them on a real GPU")
SHORT = "--model {model} --prompts {prompts} --repeats 1 --rollout.prompts_per_step 4 --rollout.group_size 2 "
SHORT += "--rollout.max_response_tokens 3"
CASES = {
    "checkpoints": ("values", "--experts 2 --repeats 1", 0),
    "coefficients": ("values", "--tokens 2000 --repeats 1 --rows grpo ctpo --json {json}", 2),
    "host": ("shapes", "--layers 2 --micros 2 --repeats 1 --json {json}", 2),
    "logprobs": ("values", "--tokens 64 --hidden 32 --vocab 500 --repeats 1 --json {json}", 2),
    "loss_layer": ("shapes", "--tokens 96 --hidden 32 --vocab 500 --repeats 1 --json {json}", 14),
    "old_pass": ("values", f"{SHORT} --json {{json}}", 3),
    "plain": ("values", f"{SHORT} --json {{json}}", 3),
    "step": ("values", f"{SHORT} --json {{json}}", 4),
    "sync": ("values", "--rounds 1 --json {json}", 50),
    "update": (
        "values",
        "--layers 2 --vocab 300 --tokens 64 --length 32 --repeats 1 --shape tiny --json {json}",
        3,
    ),
}
"""Benchmark -> (whether operations have values, arguments, figures at least)."""
NOT_ON_A_GPU = {"quickstart", "rows", "sampling", "scale", "sglang", "traces", "trl"}


def test_every_benchmark_is_here() -> None:
    names = {path.stem.removeprefix("bench_") for path in TOOLS.glob("bench_*.py")}
    assert names == CASES.keys() | NOT_ON_A_GPU


@pytest.mark.parametrize("name", CASES)
def test_a_benchmark_runs_on_a_gpu(name: str, tmp_path: Path) -> None:
    mode, words, num_figures = CASES[name]
    paths = {"model": tmp_path / "model", "prompts": tmp_path / "task/train.jsonl", "json": tmp_path / "figures.json"}
    if "{model}" in words:
        write_tiny_model(paths["model"])
        write_sort_task(tmp_path / "task")
    script = TOOLS / f"bench_{name}.py"
    command = [sys.executable, "-W", "ignore", str(HERE / "run_script.py"), mode, str(script)]
    command += [word.format(**paths) for word in words.split()]
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), os.environ["PYTHONPATH"]])
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
    text = done.stdout + done.stderr
    assert "Traceback" not in text, text[-3000:]
    broken = done.stdout.count("BROKEN: ")  # a figure of a device without kernels may break its budget
    assert done.returncode == bool(broken), text[-3000:]
    if num_figures:
        assert len(json.loads(paths["json"].read_text())) >= num_figures
