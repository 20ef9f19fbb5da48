"""The files of routes that a run writes say what its metrics say, in every layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from forks import Job, run_jobs
from train_world import World

from megarl.core.metrics import finalize, merge
from megarl.routes import Disagreement, RoutingTrace, compare
from megarl.routes.trace_file import TraceFile, read_traces

SETTINGS = {"run__steps": 2, "log__traces_every": 2, "eval__every": 0, "checkpoint__every": 0}
LAYOUTS = {
    "one": (1, {}),
    "cp2": (2, {"parallel__cp": 2}),
    "tp2 pp2": (4, {"parallel__tp": 2, "parallel__pp": 2}),
    "pp4": (4, {"parallel__pp": 4}),
}


@pytest.fixture(scope="module")
def folders(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("dumps")
    jobs = []
    for name, (ranks, layout) in LAYOUTS.items():
        overrides = {**SETTINGS, **layout, "run__dir": str(base / name)}
        jobs.append(Job(name, ranks, "train_jobs:run", {"world": world, "overrides": overrides}))
    for ended in run_jobs(jobs, base / "jobs").values():
        ended.checked()
    return {name: base / name for name in LAYOUTS}


def files(folder: Path, kind: str, step: int = 2) -> list[TraceFile]:
    found = sorted((folder / "traces").glob(f"step_{step:07d}.{kind}.rank*.safetensors"))
    return [read_traces(path) for path in found]


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_difference_of_the_files_is_the_native_disagreement_of_the_step(
    folders: dict[str, Path], layout: str
) -> None:
    sampled, trained = files(folders[layout], "rollout"), files(folders[layout], "training")
    assert len(sampled) == len(trained) == LAYOUTS[layout][0]
    found = list[Disagreement]()
    for engine, trainer in zip(sampled, trained, strict=True):
        assert engine.names == trainer.names
        for name in engine.names:
            assert np.array_equal(engine[name].tokens, trainer[name].tokens)
            found.append(compare(engine[name].trace, trainer[name].trace))
            assert set(trainer[name].row_versions.tolist()) == {1}  # training begins step 2 with these
    flips = merge(disagreement.stats() for disagreement in found)
    records = [json.loads(line) for line in (folders[layout] / "metrics.jsonl").read_text().splitlines()]
    (step,) = [record for record in records if record["kind"] == "step" and record["step"] == 2]
    total = finalize(flips)["router/flip"]
    assert total == pytest.approx(step["router/native/flip"], abs=1e-12)
    assert total > 0
    assert sum(disagreement.num_tokens for disagreement in found) == step["sampling/tokens"]


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_files_of_all_ranks_together_hold_what_one_rank_writes(folders: dict[str, Path], layout: str) -> None:
    def by_name(folder: Path, kind: str) -> dict[str, RoutingTrace]:
        return {name: one[name].trace for one in files(folder, kind, step=1) for name in one.names}

    alone, found = by_name(folders["one"], "rollout"), by_name(folders[layout], "rollout")
    assert alone.keys() == found.keys()
    assert all(np.array_equal(found[name].experts, alone[name].experts) for name in alone)
    alone, found = by_name(folders["one"], "training"), by_name(folders[layout], "training")
    differing = sum(int(compare(found[name], alone[name]).flips.sum()) for name in alone)
    assert differing <= 2  # equal weights, but two experts may be a rounding apart
