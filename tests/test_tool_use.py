"""A model learns to use a calculator: its task; episodes of several turns, replay, three objectives, two real ranks."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import numpy as np
import preloaded
import pytest

from megarl.config import EnvironmentConfig
from megarl.config import file as config_file
from megarl.data.tiny import CHARACTERS
from megarl.engines.tools.protocol import ModelTurn, Observation
from megarl.trainer.sampling.evaluation import make_environment

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


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tool_use", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("ranks", [0, 1, 2, 3, 4, 512])
def test_ranks_that_do_not_fit_are_refused_before_a_file_is_written(
    ranks: int, tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    commands: list[tuple[object, ...]] = []
    monkeypatch.setattr(tool, "write_tool_task", lambda folder: folder.mkdir(exist_ok=True))
    monkeypatch.setattr(tool, "megarl", lambda *words: commands.append(words) or sys.exit(7))
    for _ in range(2):  # the second time over what an interrupted start has left
        monkeypatch.setattr(sys, "argv", ["tool_use.py", str(out), "--ranks", str(ranks)])
        with pytest.raises(SystemExit) as ended:
            tool.main()
        assert ended.value.code == (2 if ranks in (0, 3, 512) else 7)
        assert out.exists() == (ranks not in (0, 3, 512))
    for found, command, path, *overrides in commands:
        assert (found, command, overrides[0]) == (ranks, "sft", "--model.path")
        config_file.load(path).check_world_size(ranks)


def test_steps_that_no_run_has_are_refused_too(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["tool_use.py", str(tmp_path / "out"), "--steps", "0"])
    with pytest.raises(SystemExit) as ended:
        tool.main()
    assert ended.value.code == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("call", "output"), [("12*3", "36"), ("12*", "?"), ("", "?"), ("1/0", "?"), ("a", "?"), ("9**9**9", "?")]
)
def test_a_malformed_call_is_answered_in_the_models_own_vocabulary(
    call: str, output: str, tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tomllib.loads(tool.CONFIG.replace("{ep}", "1"))["environment"]
    monkeypatch.syspath_prepend(str(TOOL.parent))
    environment = make_environment(EnvironmentConfig.model_validate(settings))
    assert environment is not None
    turn = ModelTurn(0, np.zeros(1, np.int32), f"({call})", "stop")
    found = asyncio.run(environment.begin("", 0).step(turn))
    assert found == Observation(f":{output},", done=False)
    assert set(found.text) <= set(CHARACTERS)
    assert tool.last_number(prompt="12*3=", response=f"({call}){found.text}36", answer="37") == 0


def test_products_are_right_different_and_partly_guessed(tool: ModuleType, tmp_path: Path) -> None:
    tool.write_tool_task(tmp_path, num_train=50, num_heldout=20, num_demonstrations=200, guess_share=0.25)
    read = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.glob("*.jsonl")
    }
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
