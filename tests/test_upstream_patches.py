"""The patches that could be offered to NVIDIA/Megatron-LM: what fails on a release as it is, and passes with them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from megatron_releases import installed
from release_checks import HERE, run, run_tests

PATCHES = sorted((HERE.parent / "patches" / "upstream").glob("*.patch"))
RELEASES = {"0.16.1": (0, 16), "0.17.1": (0, 17), "0.18.2": (0, 18), "0.19.2": (0, 19)}
UNIT_TESTS = "tests/unit_tests/transformer/moe"
UTILITIES = """
import torch
from megatron.core import parallel_state


class Utils:
    @staticmethod
    def initialize_model_parallel(*sizes):
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(*sizes)

    @staticmethod
    def destroy_model_parallel():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
"""
"""In place of Megatron-LM's own, which needs NCCL; wheels have no tests."""


def first_release(patch: Path) -> tuple[int, ...]:
    """The oldest release that has the defect, by the header."""
    found = re.search(r"^Releases: (\d+)\.(\d+)", patch.read_text(), re.MULTILINE)
    assert found, f"{patch.name} names no releases"
    return tuple(map(int, found.groups()))


def apply(patches: Sequence[Path], folder: Path, *words: str) -> None:
    for patch in patches:
        done = subprocess.run(["git", "apply", *words, str(patch)], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def failing(folder: Path) -> tuple[set[str], int]:
    """Files of the patches' unit tests of which a test fails on the release in the folder; how many tests pass."""
    words = ["-m", "pytest", "-q", "--tb=no", "-p", "on_cpu", "-p", "no:cacheprovider", str(folder / UNIT_TESTS)]
    done = run(words, folder)
    assert done.passed, done.output[-3000:]
    return set(re.findall(r"^(?:FAILED|ERROR) \S*?/(test_router_replay_\w+)\.py", done.output, re.M)), done.passed


def dispatched(folder: Path) -> None:
    """On the release in the folder, exactly the passes that no patch mends send tokens to wrong experts."""
    done = run_tests(folder, ["verify/test_own_replay_failures.py"])
    assert (done.status, done.passed > 10) == (0, True), done.output[-3000:]


@pytest.mark.multirank
@pytest.mark.parametrize(
    "release", [pytest.param(name, marks=[] if name == "0.19.2" else pytest.mark.slow(minutes=1)) for name in RELEASES]
)
def test_the_unit_tests_fail_on_the_release_and_pass_with_the_patches(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [patch for patch in PATCHES if first_release(patch) <= RELEASES[release]]
    folder = tmp_path / "tree"
    shutil.copytree(installed(release), folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    apply(wanted, folder, "--include=tests/*")
    (folder / "tests/unit_tests/test_utilities.py").write_text(UTILITIES)
    files = {path.stem for path in (folder / UNIT_TESTS).glob("*.py")}
    assert len(files) == len(wanted)
    assert failing(folder)[0] == files
    dispatched(folder)
    for patch in wanted:  # each alone, and all together
        apply([patch], folder, "--check", "--include=megatron/*")
    apply(wanted, folder, "--include=megatron/*")
    wrong, passed = failing(folder)
    assert (wrong, passed > 30) == (set(), True)
    monkeypatch.setenv("UPSTREAM_PATCHES", " ".join(patch.stem for patch in wanted))
    dispatched(folder)
