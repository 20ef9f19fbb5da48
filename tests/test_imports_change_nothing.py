"""Importing megarl leaves torch, Megatron, Transformer Engine, warnings and the environment as they were."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def seen() -> tuple[dict[str, list[str]], list[str], dict[str, list[str]]]:
    """(what changed by module, all modules, what ``megarl.enable_cpu()`` changes); in fresh processes, not forks."""
    done = subprocess.run(
        [sys.executable, HERE / "import_snapshot.py"], stdout=subprocess.PIPE, text=True, check=True, cwd=HERE.parent
    )
    return json.loads(done.stdout.rpartition("CHANGES")[2])


def test_no_import_of_megarl_changes_the_process(seen):
    assert seen[0] == {}


def test_all_rooms_were_imported(seen):
    doors = {"megarl.plugin", "megarl.replay", "megarl.routes", "megarl.core.objectives", "megarl.trainer.loop"}
    assert doors <= {*seen[1]}


def test_the_snapshot_sees_what_enable_cpu_changes(seen):
    changed = {*seen[2]["enable_cpu"]}
    assert {
        "torch.cuda.current_device",
        "torch.cuda.Stream",
        "Tensor.cuda",
        "torch.distributed.distributed_c10d.ProcessGroupGloo",
        "megatron.core.tensor_parallel.mappings._gather_along_first_dim",
        "warnings.filters",
    } <= changed
    assert any(name.endswith("__code__") and name.startswith("megatron.core.pipeline_parallel") for name in changed)
