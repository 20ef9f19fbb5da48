"""Runs whose responses outlast a step: provenance, resumption, several ranks, every prompt exactly once."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from audit_reader import read_used
from forks import Ended, Job, run_jobs
from run_configs import records_of
from train_world import GROUP_SIZE, NUM_GROUPS, World

from megarl.run.samples import read_samples
from megarl.run.starts import read_starts

pytestmark = pytest.mark.multirank
STEPS = 5
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "k3": (1, {"rollout__max_staleness": 3}),
    "dp2": (2, {"rollout__max_staleness": 2, "rollout__window": 0.5}),
    "strict": (
        2,
        {"rollout__max_staleness": 1, "rollout__window": 0.0, "parallel__tp": 2, "train__replay_gates": True},
    ),
    "serving": (
        1,
        {"rollout__max_staleness": 2, "rollout__engine": "own_parts:serving", "rollout__fp8_rounding": False},
    ),
}
BOUNDS = {name: more["rollout__max_staleness"] for name, (_, more) in RUNS.items()}


def overrides(folder: Path, name: str, **more: Any) -> dict[str, Any]:
    return {
        "run__dir": str(folder / name), "run__steps": STEPS, "checkpoint__every": 2, "checkpoint__at_end": True,
        "eval__every": 3, "log__samples_per_step": "all", "rollout__max_response_tokens": 16,
        "train__max_k3": "off", "train__max_native_flip": "off", **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def runs(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Ended]]:
    folder = tmp_path_factory.mktemp("partial")

    def job(name: str, run_dir: str, of: str, **more: Any) -> Job:
        ranks, settings = RUNS[of]
        settings = overrides(folder, run_dir, **settings | more.pop("settings", {}))
        return Job(name, ranks, "train_jobs:run", {"world": world, "overrides": settings, **more})

    jobs = [job(name, name, name) for name in RUNS]
    for name in ("k3", "dp2"):
        jobs += [job(f"{name} killed", f"{name}_again", name, die_after=("minibatch", 4, 0))]
        if name == "dp2":
            copied = {"src": folder / "dp2_again", "dst": folder / "one_rank"}
            jobs += [Job("copied", 1, "shutil:copytree", copied)]
        jobs += [job(f"{name} resumed", f"{name}_again", name)]
    settings = overrides(folder, "one_rank", **RUNS["dp2"][1])
    jobs += [Job("one_rank", 1, "train_jobs:run", {"world": world, "overrides": settings})]
    return folder, run_jobs(jobs, folder / "jobs")


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [record for record in records_of(folder) if record["kind"] == "step"]


@pytest.mark.parametrize("name", [*RUNS, "one_rank"])
def test_every_prompt_trains_once_and_in_time(world: World, runs: tuple[Path, dict[str, Ended]], name: str) -> None:
    folder, ended = runs
    ended[name].checked()
    bound = BOUNDS.get(name, BOUNDS["dp2"])
    used = read_used(folder / name / "samples.jsonl")
    keys = [key for step in used.values() for key in step]
    assert len(set(keys)) == len(keys) == STEPS * NUM_GROUPS * GROUP_SIZE
    passed = [record["rollout/passed_over"] for record in steps_of(folder / name)]
    places = {place for place, _ in keys}
    assert len(places) == STEPS * NUM_GROUPS
    assert len(set(range(max(places) + 1)) - places) <= passed[-1] + NUM_GROUPS  # ranks have their own windows
    if name == "strict":
        assert not any(passed)
        assert [sorted({place for place, _ in used[step]}) for step in used] == [
            list(range(step * NUM_GROUPS, (step + 1) * NUM_GROUPS)) for step in range(STEPS)
        ]
    ages = [record["rollout/staleness_max"] for record in steps_of(folder / name)]
    assert ages[0] == 0
    assert max(ages) <= bound
    stale = [record["rollout/stale_tokens_fraction"] for record in steps_of(folder / name)]
    assert [share > 0 for share in stale] == [age > 0 for age in ages]
    assert name == "serving" or max(stale) > 0
    lines = [json.loads(line) for line in (folder / name / "samples.jsonl").read_text().splitlines()]
    oldest = {line["step"]: line["step"] - 1 - line["weights"] for line in lines if "step" in line}
    assert [oldest[step + 1] for step in range(STEPS)] == ages
    tasks = map(json.loads, (world.folder / "task" / "train.jsonl").read_text().splitlines())
    answers = {task["prompt"]: task["answer"] for task in tasks}
    stored = list(read_samples(folder / name))
    assert len(stored) == len(keys)
    assert [one["expected"] for one in stored] == [answers[one["prompt"]] for one in stored]


def test_parts_of_a_response_have_versions_of_their_own(runs: tuple[Path, dict[str, Ended]]) -> None:
    folder, _ = runs
    for name in RUNS.keys() - {"serving"}:  # timing decides there what is paused
        records = steps_of(folder / name)
        assert max(record["rollout/mixed_versions_fraction"] for record in records) > 0
        assert max(record["rollout/paused"] for record in records) > 0
        assert max(record["routes/stale_rows_fraction"] for record in records) == 0
        assert max(record["rollout/k3"] for record in records) < 0.1


@pytest.mark.parametrize("name", ["k3", "dp2"])
def test_a_killed_run_resumes_bit_for_bit(runs: tuple[Path, dict[str, Ended]], name: str) -> None:
    folder, ended = runs
    assert -signal.SIGKILL in ended[f"{name} killed"].exit_codes
    ended[f"{name} resumed"].checked()
    assert records_of(folder / f"{name}_again") == records_of(folder / name)
    assert read_used(folder / f"{name}_again" / "samples.jsonl") == read_used(folder / name / "samples.jsonl")
    assert [start["new"] for start in read_starts(folder / f"{name}_again")] == [True, False]
