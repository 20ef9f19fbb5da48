"""The testbed of docs/evidence.md: its task, its noise, and a run of its grids, stopped and begun again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import evidence
from trials import grids, testbed
from trials.grids import make_cell
from trials.outcomes import Outcome, from_line, read_outcome, to_line

from megarl.config.file import parse

ROOT = Path(__file__).parents[2]


def walk(prompt: str, choice: int) -> str:
    """A right walk that takes the same choice at each step, from the table alone."""
    symbols = prompt[1:]
    for _ in range(64):
        symbols += str(sorted(testbed.ALLOWED[int(symbols[-2]), int(symbols[-1])].tolist())[choice])
    return symbols[2:]


def is_right(prompt: str, response: str) -> float:
    return testbed.is_right(prompt=prompt, response=response, answer="")


@pytest.mark.parametrize("choice", range(3))
def test_a_walk_of_64_allowed_steps_is_right(choice: int) -> None:
    response = walk("=07", choice)
    assert is_right("=07", response) == 1
    assert is_right("=07", response[:-1]) == 0
    assert is_right("=07", response + response[0]) == 0
    for place in (0, 1, 40, 63):
        allowed = testbed.ALLOWED[tuple(int(s) for s in ("07" + response)[place : place + 2])]
        wrong = next(str(symbol) for symbol in range(10) if symbol not in allowed)
        assert is_right("=07", response[:place] + wrong + response[place + 1 :]) == 0
        assert is_right("=07", response[:place] + "a" + response[place + 1 :]) == 0


def test_the_task_is_the_same_for_a_seed_and_holds_prompts_out(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        testbed.write_task(tmp_path / name, seed)

    def prompts(name: str, file: str) -> list[str]:
        return [json.loads(line)["prompt"] for line in (tmp_path / name / f"{file}.jsonl").read_text().splitlines()]

    assert prompts("a", "train") == prompts("b", "train") != prompts("c", "train")
    assert not {*prompts("a", "train")} & {*prompts("a", "heldout")}
    assert len({*prompts("a", "train"), *prompts("a", "heldout")}) == 100
    shown = [json.loads(line) for line in (tmp_path / "a" / "demonstrations.jsonl").read_text().splitlines()]
    assert {row["prompt"] for row in shown} == {*prompts("a", "train")}
    assert all(is_right(row["prompt"], row["response"]) for row in shown[:200])
    counts = np.bincount([int(row["response"][0]) for row in shown if row["prompt"] == prompts("a", "train")[0]])
    assert np.count_nonzero(counts) == 3


@pytest.mark.parametrize("grid", grids.TABLES["grids"])
def test_every_run_has_a_configuration_and_a_name_of_its_own(grid: str, tmp_path: Path) -> None:
    runs = grids.runs_of([grid])
    assert len({(cell.name, seed) for cell, seed in runs}) == len(runs)
    assert [seed for _, seed in runs] == sorted(seed for _, seed in runs)
    for cell, seed in runs:
        table = testbed.tables_of(tmp_path, tmp_path / "run", cell, seed)
        objective = parse(table).train.resolved_objective
        assert objective.advantage == "group_mean"


def test_arms_of_a_pair_differ_in_the_anchor_alone() -> None:
    for at_mu, at_old in (("grpo_mu", "minirl"), ("dppo_tv_mu", "dppo_tv_old"), ("dppo_kl_mu", "dppo_kl_old")):
        objectives = [
            parse(testbed.tables_of(Path(), Path("run"), make_cell(arm, "r3"), 0)).train.resolved_objective
            for arm in (at_mu, at_old)
        ]
        masks = [objective.masks[0] for objective in objectives]
        assert [mask.policies for mask in masks] == ["theta_mu", "theta_old"]
        as_table = [
            json.dumps(str(objective)).replace("theta_mu", "").replace("theta_old", "") for objective in objectives
        ]
        assert as_table[0] == as_table[1]


SCRIPT = """
import sys
sys.path[:0] = [{tools!r}, {root!r}]
from pathlib import Path
import evidence
from trials import grids
grids.TABLES["grids"]["tiny"] = [
    dict(arms=["minirl"], replays=["none", "r2", "r3"], gap="strong_noise", budget=4, cold_start=2, seeds=1)
]
evidence.train_grids(Path({folder!r}), ["tiny"])
"""


@pytest.mark.slow
@pytest.mark.gate
def test_runs_replay_the_noisy_routes_and_finished_runs_stay(tmp_path: Path) -> None:
    script = SCRIPT.format(tools=str(ROOT / "tools"), root=str(ROOT), folder=str(tmp_path))
    options: dict = {"capture_output": True, "text": True, "timeout": 600, "cwd": tmp_path}
    first_call, second_call = (subprocess.run([sys.executable, "-c", script], **options) for _ in range(2))
    assert first_call.returncode == second_call.returncode == 0, first_call.stderr + second_call.stderr
    assert first_call.stdout.count("minirl.") == 3
    assert second_call.stdout == ""  # nothing was left to train
    outcomes = {o.cell.replay: o for o in (from_line(p.read_text()) for p in (tmp_path / "outcomes").glob("*.seed*"))}
    assert all(not outcome.broke_off and len(outcome.scores) == 2 for outcome in outcomes.values())
    [first] = {tuple(outcome.rewards) for outcome in outcomes.values()}  # one seed: the same responses
    assert len(first) == 1
    flips = {replay: outcome.series["flip"][0] for replay, outcome in outcomes.items()}
    natives = {replay: outcome.series["native_flip"][0] for replay, outcome in outcomes.items()}
    assert flips["r3"] == 0 < flips["none"] == flips["r2"]
    assert natives["r3"] == pytest.approx(flips["none"], rel=0.05)  # behind replayed layers
    k3 = {replay: outcome.series["k3"][0] for replay, outcome in outcomes.items()}
    assert k3["r3"] < k3["none"] == k3["r2"]


def test_a_run_that_did_not_finish_is_no_outcome(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="not begun, expected a finished run"):
        read_outcome(tmp_path, make_cell("minirl", "none"), 0, "digest")


def test_outcomes_of_another_testbed_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = make_cell("minirl", "none")
    path = evidence.outcome_path(tmp_path, cell, 0)
    path.parent.mkdir()
    outcome = Outcome(cell, 0, testbed.fingerprint(cell, 0), False, {"reward": [0.5] * 40}, [])
    path.write_text(to_line(outcome))
    assert evidence.is_stored(tmp_path, cell, 0)
    assert not evidence.is_stored(tmp_path, cell, 1)
    monkeypatch.setitem(testbed.ROUTER_NOISE, "strong", 0.4)
    with pytest.raises(SystemExit, match="of another testbed"):
        evidence.is_stored(tmp_path, cell, 0)


def test_the_fingerprint_names_all_that_decides_a_run() -> None:
    cells = [make_cell("minirl", "none"), make_cell("minirl", "r2"), make_cell("minirl_c5", "none")]
    cells += [make_cell("minirl", "none", gap="bf16"), make_cell("minirl", "none", updates=8)]
    digests = {testbed.fingerprint(cell, seed) for cell in cells for seed in (0, 1)}
    assert len(digests) == 2 * len(cells)
