"""The same tests of replay on other releases of Megatron-Core that have the hook, unpatched.

A release is installed beside the environment, without its dependencies, and comes first on the path of a pytest of its
own. What is run covers replay's order, group-limited top-k, sigmoid with bias, recomputation, refusals and two ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_releases import installed

VERSIONS = ["0.16.0"]
TESTS = [
    "test_megatron_known_bugs.py",
    "test_megatron_replay_semantics.py",
    "test_megatron_replay_errors.py",
    "test_megatron_matrix.py::test_acceptance_replay_holds_at_every_point_of_the_layout[single]",
    "test_megatron_matrix.py::test_acceptance_replay_holds_at_every_point_of_the_layout[tp2-ep2-etp1]",
    "test_megatron_matrix.py::test_acceptance_replay_holds_at_every_point_of_the_layout[pp2-vpp2]",
]


@pytest.mark.multirank
@pytest.mark.parametrize("version", VERSIONS)
def test_replay_works_unchanged_with_another_release(version: str) -> None:
    here = Path(__file__).parent
    folder = installed(version)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    told = subprocess.run(
        [sys.executable, "-c", "import megatron.core as m; print(m.__version__, m.__file__)"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert told.stdout.split()[0] == version, told.stderr
    assert told.stdout.split()[1].startswith(str(folder))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(here / test) for test in TESTS)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        cwd=here.parent.parent,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
