"""A model learns to use a calculator: its task; episodes of several turns, replay, three objectives, two real ranks."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import preloaded
import pytest

from megarl.data.tiny import CHARACTERS

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


def test_products_are_right_different_and_partly_guessed(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("tool_use", TOOL)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tool.write_tool_task(tmp_path, num_train=50, num_heldout=20, num_demonstrations=200, guess_share=0.25)
    read = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.iterdir()}
    rows, demonstrations = read["train"] + read["heldout"], read["demonstrations"]
    for row in rows:
        a, b = row["prompt"].rstrip("=").split("*")
        assert row["answer"] == str(int(a) * int(b))
    assert len({row["prompt"] for row in rows + demonstrations}) == 270
    called = [row for row in demonstrations if row["response"].startswith("(")]
    assert len(called) == 150
    for row in demonstrations:
        expression = row["prompt"].rstrip("=")
        a, b = expression.split("*")
        answer = str(int(a) * int(b))
        right = tool.last_number(prompt=row["prompt"], response=row["response"], answer=answer)
        assert right == (row in called)
        assert row not in called or row["response"] == f"({expression}):{answer},{answer}"
        assert set(row["prompt"] + row["response"]) <= set(CHARACTERS)
