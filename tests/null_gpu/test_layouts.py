"""One training step on every layout: over NCCL on the null GPU, and over gloo on the CPU.

Every rank has a GPU of its own. Both worlds are launched once for all tests of this file; each forks its ranks from a
process that has imported everything and has no CUDA context.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import Case, Outcome, case, read_outcome

TESTS = Path(__file__).parents[1]
STEP = "null_gpu.layout_cases:one_step"
CASES = [
    *(case(2, STEP, layout) for layout in ("", "tp2", "ep2", "cp2", "pp2", "pp2 vpp2")),
    case(2, STEP, "tp2", parallel__distributed_optimizer=False),
    case(2, STEP, "ep2", recompute="moe", parallel__dispatcher="allgather"),
    case(2, STEP, "pp2 vpp2", recompute="uniform"),
    *(case(4, STEP, layout) for layout in ("tp2 ep2 etp1 pp2", "cp2 pp2 vpp2", "ep2 pp2 vpp2")),
    case(8, STEP, "tp2 cp2 ep2 etp1 pp2"),
]
AGREEMENTS = case(4, "null_gpu.layout_cases:agreements", "cp2 tp2")
NO_TE = "import sys; sys.modules['transformer_engine'] = None; "
"""Megatron's local layers: Transformer Engine's kernels have no values on the null GPU."""


def run_world(folder: Path, program: str, **changes: str) -> None:
    """Run the plan in ``folder`` on ranks that see the devices which the environment's ``changes`` leave."""
    paths = [TESTS, TESTS / "megatron"]
    path = os.pathsep.join([*map(str, paths), os.environ["PYTHONPATH"]])
    code = f"{NO_TE}import pathlib, rank_worker, null_gpu.layout_cases; {program}"
    with (folder / "log.txt").open("wb") as log:
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, **changes},
            stdout=log,
            stderr=log,
            check=True,
        )


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Case], dict[str, Any]]:
    root = tmp_path_factory.mktemp("layouts")
    specs = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    selected = {one for spec in specs if spec for one in spec.params.values()}
    cases = [one for one in [*CASES, AGREEMENTS] if one in selected]
    run = "rank_worker.run_plan(pathlib.Path('.'))"
    write = "import tiny_world; tiny_world.write_models(pathlib.Path('../models')); "
    worlds = {
        "cpu": (write + run, {"LD_PRELOAD": "", "LD_LIBRARY_PATH": "", "CUDA_VISIBLE_DEVICES": "", "NULL_GPU": ""}),
        # NVML is asked for the devices, so that the process which forks the ranks needs no CUDA context.
        "gpu": (run, {"NULL_GPU_DEVICES": "8", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}),
    }
    plans = {"cpu": [one for one in cases if one.function == STEP], "gpu": cases}
    for name, (program, changes) in worlds.items():
        folder = root / name
        folder.mkdir()
        (folder / "models").symlink_to(root / "models")
        (folder / "plan.pkl").write_bytes(pickle.dumps(plans[name]))
        run_world(folder, program, EXPECTED_DEVICE=name, **changes)

    def outcome_of(world: str, one: Case) -> dict[str, Any]:
        found: Outcome = read_outcome(root / world, plans[world].index(one))
        if found.error is not None:
            pytest.fail(f"{world}: {found.error}", pytrace=False)
        return found.value

    return outcome_of


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_over_nccl_is_that_over_gloo(case: Case, outcomes: Callable[[str, Case], dict[str, Any]]) -> None:
    expected, found = outcomes("cpu", case), outcomes("gpu", case)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["norm"] == pytest.approx(expected["norm"], rel=1e-5)
    assert expected["norm"] == pytest.approx(292.086, rel=1e-4)  # of one rank
    assert sorted(found["weights"]) == sorted(expected["weights"])
    for name, weight in expected["weights"].items():
        error = float((found["weights"][name] - weight).abs().max())
        assert error <= 1e-5, f"{name}: off by {error}"


@pytest.mark.parametrize("case", [AGREEMENTS], ids=str)
def test_ranks_agree_without_the_gpu(case: Case, outcomes: Callable[[str, Case], dict[str, Any]]) -> None:
    for found in outcomes("gpu", case):
        assert found["objects"] == [{"rank": rank} for rank in range(4)]
        assert found["of_model"] == [0, 1, 2, 3]
        assert found["on_main"] == [0, 1, 2, 3]
        assert found["largest"] == 3
        assert found["of_model_largest"] == 0
        assert found["from_main"] == "from 0"
        assert found["failures"] == ["the test failed on 1 other ranks; their messages say why", ""]
        assert found["nccl_calls"] == [0] * 6
        assert found["counted"] == 1
