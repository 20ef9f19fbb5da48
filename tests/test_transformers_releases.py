"""The local engine on the oldest and the newest release of transformers that it is tested on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from environments import transformers_release

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow(minutes=2)

CHECKS = (
    "test_local.py::test_logprobs_and_routes_equal_a_full_forward",
    "test_local.py::test_every_single_tensor_reaches_the_logits",
    "test_architectures.py::test_agrees_with_a_full_forward",
    "test_local_fp8.py::test_the_engine_computes_what_is_written_by_hand",
    "test_local_fp8.py::test_other_families",
)
NUM_CHECKS = 6 + 1 + 3 + 3 + 3


@pytest.mark.parametrize("release", [("5.3.0",), ("5.24.0", "tokenizers==0.23.3")], ids=lambda release: release[0])
def test_routes_and_logprobs_are_those_of_the_model(release: tuple[str, ...]) -> None:
    """In a child process, whose every test must have run; it says which release it imported."""
    folder = transformers_release(*release)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    files = [str(HERE / "engines" / check) for check in CHECKS]
    code = "import pytest, sys, transformers; print(transformers.__version__, transformers.__file__); "
    code += "sys.exit(pytest.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "-q", "-p", "no:cacheprovider", *files],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.startswith(f"{release[0]} {folder}"), done.stdout[:300]
    assert f"{NUM_CHECKS} passed" in done.stdout, done.stdout[-300:]
