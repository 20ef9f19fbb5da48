"""Runs that are killed with SIGKILL and started again go on as if nothing had happened."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from forks import Ended, Job, run_jobs
from run_configs import records_of
from train_world import World

from megarl.config.tables.health import HealthConfig
from megarl.run.metrics_log import read_metrics
from megarl.watch.health import judge_run

KILLS: dict[str, tuple[str, int, int | None]] = {
    "mid_step": ("minibatch", 3, 0),
    "before_first_checkpoint": ("minibatch", 1, 1),
    "after_step_before_its_checkpoint": ("step", 4, None),
}
pytestmark = pytest.mark.multirank


def overrides(folder: Path, name: str, **more: Any) -> dict[str, Any]:
    return {
        "run__dir": str(folder / name),
        "run__steps": 4,
        "checkpoint__every": 2,
        "eval__every": 2,
        "train__replay": "r3",
        "optim__warmup_steps": 2,
        "optim__decay_style": "linear",
        "health__truncated_share": [0.0],  # every step is beyond it
        **more,
    }


@pytest.fixture(scope="module")
def runs(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Ended]]:
    """All runs of this module: the folder that holds them, and how each ended."""
    folder = tmp_path_factory.mktemp("runs")

    def job(name: str, ranks: int, run_dir: str, function: str = "run", **more: Any) -> Job:
        settings = overrides(folder, run_dir, parallel__ep=ranks)
        return Job(name, ranks, f"train_jobs:{function}", {"world": world, "overrides": settings, **more})

    jobs = [job("whole", 1, "whole"), job("whole_ep2", 2, "whole_ep2")]
    for name, record in KILLS.items():
        jobs += [job(f"{name} killed", 1, name, die_after=record), job(f"{name} resumed", 1, name)]
    jobs += [job("saving killed", 1, "saving", "dies_while_saving", step=4), job("saving resumed", 1, "saving")]
    jobs += [job("ep2 killed", 2, "ep2", die_after=("minibatch", 3, 0)), job("ep2 resumed", 2, "ep2")]
    rows = (world.folder / "task" / "train.jsonl").read_text().splitlines(True)
    (folder / "reordered.jsonl").write_text("".join(reversed(rows)))
    others = {"data__train": str(folder / "reordered.jsonl")}
    for name, ranks, more in (("copied", 2, {}), ("one_rank", 1, {}), ("other_inputs", 2, others)):
        jobs += [Job(f"{name} made", 1, "shutil:copytree", {"src": folder / "whole_ep2", "dst": folder / name})]
        settings = overrides(folder, name, parallel__ep=ranks, run__steps=5, **more)
        jobs += [Job(name, ranks, "train_jobs:run", {"world": world, "overrides": settings})]
    return folder, run_jobs(jobs, folder / "jobs")


def test_an_uninterrupted_run_writes_every_record_once(runs: tuple[Path, dict[str, Ended]]) -> None:
    folder, ended = runs
    ended["whole"].checked()
    found = [(r["kind"], r["step"], r["minibatch"]) for r in records_of(folder / "whole")]
    expected: list[tuple[str, int, int | None]] = [("eval", 0, None)]
    for step in (1, 2, 3, 4):
        expected += [("minibatch", step, 0), ("minibatch", step, 1), ("step", step, None)]
        expected += [("eval", step, None)] if step % 2 == 0 else []
    assert found == expected
    rates = [r["lr"] for r in records_of(folder / "whole") if r["kind"] == "minibatch"]
    assert len(set(rates)) > 4  # a schedule that the resumed runs have to meet


@pytest.mark.parametrize("name", [*KILLS, "saving"])
def test_acceptance_a_killed_run_resumes_bit_for_bit(runs: tuple[Path, dict[str, Ended]], name: str) -> None:
    folder, ended = runs
    assert ended[f"{name} killed"].exit_codes == (-signal.SIGKILL,)
    ended[f"{name} resumed"].checked()
    if name == "before_first_checkpoint":
        assert "resumed from" not in ended[f"{name} resumed"].output
    else:
        assert "resumed from" in ended[f"{name} resumed"].output
        assert "after step 2" in ended[f"{name} resumed"].output
    assert records_of(folder / name) == records_of(folder / "whole")


@pytest.mark.parametrize("name", [*KILLS, "saving", "ep2"])
def test_verdicts_know_the_steps_before_a_resumption(runs: tuple[Path, dict[str, Ended]], name: str) -> None:
    folder, ended = runs
    ended[f"{name} resumed"].checked()
    verdicts = judge_run(read_metrics(folder / name / "metrics.jsonl"), HealthConfig(truncated_share=[0.0]))
    assert ("truncated_share", 1) in [(verdict.check, verdict.since) for verdict in verdicts]
    found = json.loads((folder / name / "status.json").read_text())["health"]
    assert found == [asdict(verdict) for verdict in verdicts]


def test_a_killed_run_on_two_ranks_resumes(runs: tuple[Path, dict[str, Ended]]) -> None:
    folder, ended = runs
    assert all(ended["ep2 killed"].exit_codes)
    ended["ep2 resumed"].checked()
    whole, resumed = records_of(folder / "whole_ep2"), records_of(folder / "ep2")
    assert [list(r) for r in resumed] == [list(r) for r in whole]
    for one, two in zip(whole, resumed, strict=True):
        assert one["kind"] == two["kind"]
        numbers = {key: value for key, value in one.items() if isinstance(value, float)}
        assert {key: two[key] for key in numbers} == pytest.approx(numbers, rel=1e-5, abs=1e-5)


def test_a_run_that_was_copied_continues_also_in_another_layout(runs: tuple[Path, dict[str, Ended]]) -> None:
    """Two ranks with ep 2 become one rank: experts, optimizer state, schedule and the order of prompts move along."""
    folder, ended = runs
    for name in ("copied", "one_rank"):
        ended[name].checked()
        assert f"resumed from {folder / name}" in ended[name].output.replace("\n", "")
        assert records_of(folder / name)[:-4] == records_of(folder / "whole_ep2")
    assert "the layout was" not in ended["copied"].output
    assert "ep 2 etp 1 on 2 ranks and is tp 1 pp 1 cp 1 ep 1 etp 1 on 1 ranks" in ended["one_rank"].output
    for one, two in zip(records_of(folder / "copied")[-4:], records_of(folder / "one_rank")[-4:], strict=True):
        assert (one["kind"], one["step"]) == (two["kind"], 5)
        for key in (key for key in ("loss", "grad_norm", "lr", "reward/mean", "entropy") if key in one):
            assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-5), key


def test_a_run_does_not_go_on_with_other_inputs(runs: tuple[Path, dict[str, Ended]]) -> None:
    """On two ranks both end: the main one says why, and none waits for it."""
    folder, ended = runs
    assert all(ended["other_inputs"].exit_codes)
    assert "began with other inputs: data.train" in ended["other_inputs"].output
    assert records_of(folder / "other_inputs") == records_of(folder / "whole_ep2")


def test_two_ranks_train_like_one(runs: tuple[Path, dict[str, Ended]]) -> None:
    """The first step: later ones sample with weights that float noise has moved, so tokens may differ."""
    folder, ended = runs
    ended["whole_ep2"].checked()
    alone, two = ([r for r in records_of(folder / name) if r["step"] <= 1] for name in ("whole", "whole_ep2"))
    assert alone[0] == two[0]
    for one, other in zip(alone[1:], two[1:], strict=True):
        for key in (key for key in ("loss", "grad_norm", "reward/mean", "router/flip", "entropy") if key in one):
            assert other[key] == pytest.approx(one[key], rel=1e-4, abs=1e-5)
