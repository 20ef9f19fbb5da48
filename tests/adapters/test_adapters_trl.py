"""Rows as the loss of real TRL: TRL's own gradients, the same for any split, refusals, and a learned task."""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.data.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from environments import trl_release  # noqa: E402

TRL = "1.16.0"
WORLD = Path(__file__).with_name("trl_world.py")
ROWS = ("grpo", "dapo", "dr_grpo", "gspo", "luspo", "cispo", "sapo", "vespo", "deepseek_v32", "kl_k3", "kl_unbiased")
SPLITS = ("minirl", "dapo", "reinforce_pp", "reinforce_rej_signed")

pytestmark = pytest.mark.gate


def start(*words: object, **more: str) -> subprocess.Popen[str]:
    own = {"PYTHONPATH": str(trl_release(TRL)), "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "CI": "1"}
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *map(str, words)], env={**os.environ, **own, **more}, **streams)


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err[-3000:]
    return out


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What trl_world.py found: one process compares with TRL, one splits a step, two share it."""
    folder = tmp_path_factory.mktemp("trl")
    small = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "expert_width": 8}
    model = write_tiny_model(folder / "model", **small, initializer_range=0.3, family="qwen3")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    ranks = [{**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    started = [start(WORLD, model, folder / "rows", "rows"), start(WORLD, model, folder / "split", "splits")]
    started += [start(WORLD, model, folder / f"rank{own['RANK']}", "splits", **own) for own in ranks]
    for process in started:
        finish(process)
    return {path.name: torch.load(path) for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("row", ROWS)
def test_gradients_are_those_of_trl(found, row):
    differences = found["rows"][row]
    assert len(differences) == 4
    assert max(differences) < 1e-8
    assert abs(found["rows"][f"{row} ratio"] - 1) > 1e-4  # every second update is off-policy


@pytest.mark.parametrize("row", SPLITS)
def test_a_step_does_not_depend_on_its_split(found, row):
    whole, log = found["split"][row]["whole"]
    for other, other_log in (found["split"][row]["accumulated"], found["rank0"][row]["whole"]):
        for a, named in zip(whole, other, strict=True):
            b = {name.removeprefix("module."): gradient for name, gradient in named.items()}
            largest = max(float(each.abs().max()) for each in a.values())
            assert largest > 0
            # The model's norms compute in fp32, and round otherwise in another batch.
            assert max(float((b[name] - a[name]).abs().max()) for name in a) < 1e-5 * largest
        for a, b in zip(log[:-1], other_log[:-1], strict=True):
            names = [name for name in a if name.startswith("megarl/") and name != "megarl/ratio/p50"]
            assert len(names) > 10
            assert [b[name] for name in names] == pytest.approx([a[name] for name in names], rel=1e-4, abs=1e-6)


def test_what_a_row_lacks_is_refused_by_name(found):
    refused = found["rows"]["refused"]
    assert len(refused) == 6
    for expected, message in refused.items():
        assert expected in message


@pytest.mark.slow(minutes=3)
@pytest.mark.parametrize("objective", ["minirl", "grpo"])
def test_the_task_of_the_quickstart_is_learned(objective):
    from bench_trl import quickstart_model

    folder = quickstart_model()
    words = (folder / "model", folder / "task", "--objective", objective, "--steps", 20)
    told = ast.literal_eval(finish(start(ROOT / "examples" / "trl_grpo.py", *words)).splitlines()[-1])
    before, after = told["heldout"]
    assert before < 0.5
    assert after > 0.8
