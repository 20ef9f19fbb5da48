"""A model learns to use a calculator: its task; episodes of several turns, replay, three objectives, two real ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import preloaded
import pytest

TOOL = Path(__file__).parent.parent / "tools" / "tool_use.py"


@pytest.mark.slow(minutes=4)
@pytest.mark.multirank
def test_the_reward_selects_the_call_under_each_objective(tmp_path: Path) -> None:
    done = preloaded.run([sys.executable, str(TOOL), str(tmp_path / "out"), "--steps", "16"], timeout=3600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    table = re.findall(r"^(\w+) +([\d.]+)% -> +([\d.]+)% +([\d.]+) -> ([\d.]+)", done.stdout, re.MULTILINE)
    assert [row[0] for row in table] == ["ctpo", "grpo", "gspo"]
    for objective, before, after, first_turns, last_turns in table:
        assert 30 < float(before) < 60, objective
        assert float(after) > 75, objective
        assert float(first_turns) < 1.6 < float(last_turns), objective
    assert re.search(r"native flip \d", done.stdout)  # the experts of all turns were compared
