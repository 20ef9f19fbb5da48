"""`megarl plan` against CUDA's caching allocator and the calls of torch.distributed: ranks of recipes at real size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not os.environ.get("NULL_GPU"), reason="a real GPU has not the memory of every recipe")
STATES, PEAK = 0.03, 0.05
RANKS = {
    "latent attention": ("moonlight-16b-a3b.toml",),
    "last stage": ("glm-4.5-air.toml", "--rank", "31"),
    "no recomputation": ("qwen3-30b-a3b-64gpu.toml", "--rank", "5", "--set", "recompute={}"),
}
"""Arguments of ``plan_rank.py``. All recipes: by hand, docs/plan.md."""


@pytest.mark.parametrize("case", RANKS)
def test_a_rank_of_a_recipe(case: str) -> None:
    command = [sys.executable, Path(__file__).parent / "plan_rank.py", *RANKS[case]]
    done = subprocess.run(command, env={**os.environ, "NULL_GPU_GB": "400"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name, within in {"weights": 1e-5, "gradients": 1e-3, "optimizer": 1e-3, "states": STATES, "peak": PEAK}.items():
        measured, planned = found["memory"][name]
        assert planned == pytest.approx(measured, rel=within), name
