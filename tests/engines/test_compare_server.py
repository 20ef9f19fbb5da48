"""tools/compare_server.py on a real server: equal in fp32, and spoiled weights are found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.data.tiny import write_sort_task, write_tiny_model

pytestmark = pytest.mark.sglang
TOOL = Path(__file__).parents[2] / "tools/compare_server.py"


def test_a_server_is_compared_with_transformers(sglang_python: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    write_sort_task(tmp_path / "task", num_train=16, num_heldout=4, num_demonstrations=0)
    words = [tmp_path / "model", "--prompts", tmp_path / "task/train.jsonl", "--tokens", "12"]
    words += ["--rollout.dtype", "fp32", "--sglang.python", sglang_python, "--sglang.mem_fraction", "0.05"]
    words += ["--sglang.max_total_tokens", "4096", "--json", tmp_path / "found.json"]
    command = [sys.executable, "-W", "ignore", TOOL, *words]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["precision"] == "fp32"
    assert found["tokens"] >= 16
    assert 0 < found["mean"] < 1e-5
    assert found["same_sets"] == 1
    # The oracle in another precision is another model: the tool says so.
    text = TOOL.read_text().replace("DTYPES[config.rollout.dtype]", 'DTYPES["bf16"]')
    (tmp_path / "other.py").write_text(text.replace("Path(__file__).parent))", f"{str(TOOL.parent)!r}))"))
    command[3] = tmp_path / "other.py"
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stdout + done.stderr[-2000:]
    assert "fp32: " in done.stdout
