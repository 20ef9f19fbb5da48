"""The example of docs/plugin.md where torch, numpy and one release of Megatron-Core are, and nothing else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from lean import KIT, make_environment
from megatron_releases import installed

ROOT = Path(__file__).parents[1]
ABSENT = "import importlib.util as u; print([n for n in ('pydantic', 'transformers', 'rich') if u.find_spec(n)])"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("kit"), distributions=KIT)


@pytest.mark.parametrize("release", ["0.16.1", "0.19.2"])
def test_the_plug_in_replays_with_megatron_alone(python: Path, release: str, tmp_path: Path) -> None:
    """Of the distribution, the process sees the package folder only."""
    (tmp_path / "megarl").symlink_to(ROOT / "megarl")
    path = os.pathsep.join([str(tmp_path), str(installed(release))])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, "-W", "ignore", *words], capture_output=True, text=True, env=environment, cwd=tmp_path
        )

    assert run("-c", ABSENT).stdout == "[]\n"
    version = run("-c", "import megatron.core; print(megatron.core.__version__)").stdout.split()[-1]
    assert version == release
    done = run(ROOT / "examples" / "plugged_in.py", "--replay", "r3", "--steps", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("r3 held\n")
