"""verl's whole trainer (main_ppo: ray, TransferQueue, agent loop, FSDP2 worker) with a row of megarl, on a CPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="runs in .venv-verl: make test-verl")

EXAMPLE = Path(__file__).parents[2] / "examples" / "verl_grpo.py"


@pytest.mark.slow(minutes=3)
def test_verls_trainer_learns_by_minirl(tmp_path: Path) -> None:
    """The reward of a random model is 0.02, and 0.97 after ten steps."""
    words = [sys.executable, "-W", "ignore", str(EXAMPLE), "megarl_minirl", str(tmp_path), "6"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rewards = [float(value) for value in re.findall(r"critic/score/mean:([\d.]+)", done.stdout)]
    assert len(rewards) == 6
    assert rewards[0] < 0.1 < 0.4 < rewards[-1]
    assert "actor/megarl/tis/weight_mean" in done.stdout
