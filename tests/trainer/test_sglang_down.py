"""A training run whose only server is killed for good: it says so, keeps its steps, and goes on when called again."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import preloaded
import psutil
import pytest
import tomli_w
from sglang_fixtures import START_DEADLINE_S

from megarl.data.tiny import write_sort_task, write_tiny_model
from megarl.run.metrics_log import read_metrics

pytestmark = [pytest.mark.sglang, pytest.mark.slow(minutes=2)]

STEPS = 6


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory, sglang_python: Path) -> Path:
    folder = tmp_path_factory.mktemp("down")
    sizes = {"hidden_size": 64, "num_layers": 2, "num_experts": 8, "expert_width": 32}
    write_tiny_model(folder / "model", **sizes, initializer_range=0.1)
    write_sort_task(folder / "task", num_train=64, num_heldout=16, num_demonstrations=16, digits=3)
    settings = {
        "run": {"steps": STEPS, "dir": str(folder / "run")},
        "model": {"path": str(folder / "model"), "dtype": "fp32"},
        "data": {"train": str(folder / "task" / "train.jsonl"), "max_prompt_tokens": 8},
        "rollout": {"engine": "sglang", "dtype": "fp32"}
        | {"prompts_per_step": 8, "group_size": 4, "max_response_tokens": 6},
        "sglang": {"python": str(sglang_python), "mem_fraction": 0.1, "max_total_tokens": 8192}
        | {"max_restarts": 0, "start_deadline_s": START_DEADLINE_S},
        "train": {"mini_batches": 2, "micro_batch_tokens": 256},
        "optim": {"lr": 1e-3},
        "checkpoint": {"every": 100},
        "log": {"sinks": []},
    }
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(settings))
    return path


def train(run_file: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, "-m", "megarl.cli", "train", str(run_file)]
    return preloaded.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def server_of(run: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that its reaper has started; others of the run share its memory, or compute rewards."""
    for process in psutil.Process(run.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "reaper" in str(process.cmdline()):
                return process.children(recursive=True)
    return []


def steps_of(run_file: Path) -> list[int]:
    log = run_file.parent / "run" / "metrics.jsonl"
    return [record["step"] for record in read_metrics(log) if record["kind"] == "step"] if log.exists() else []


def test_a_run_without_a_server_ends_with_a_checkpoint_and_continues(run_file: Path):
    run = train(run_file)
    try:
        while len(steps_of(run_file)) < 2:
            assert run.poll() is None, run.communicate()
            time.sleep(0.02)
        killed = server_of(run)
        for process in killed:
            with contextlib.suppress(psutil.NoSuchProcess):  # one may end with another one
                process.kill()
        out, err = run.communicate(timeout=900.0)
    finally:
        run.kill()
    print(out[-1500:], err[-1500:])
    assert killed
    assert run.returncode == 2
    done = steps_of(run_file)
    assert done[:2] == [1, 2]
    assert len(done) < STEPS, "all steps were over before the server could be killed"
    assert "died 1 times and is given up" in out
    assert f"/checkpoints/step_{len(done):07d}" in out[out.rindex("saved ") :]
    assert "megarl: error: all 1 SGLang servers are down, the last failure: http://127.0.0.1:" in err
    assert "Traceback" not in err
    assert [path.name for path in (run_file.parent / "run" / "checkpoints").iterdir()] == [f"step_{len(done):07d}"]

    again = train(run_file)
    try:
        out, err = again.communicate(timeout=2 * START_DEADLINE_S)
    finally:
        again.kill()
    assert again.returncode == 0, err[-3000:]
    assert f"after step {len(done)}; dropped 0 later records" in out
    assert steps_of(run_file) == list(range(1, STEPS + 1))
