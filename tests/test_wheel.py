"""The wheel and the source distribution: whole, without anything foreign, and working without other packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from lean import make_environment

from megarl import __version__
from megarl.routes import RoutingTrace
from megarl.routes.trace_file import TracedSequence, TraceInfo, write_traces

ROOT = Path(__file__).parents[1]
LOAD = """
import sys
from megarl.config import file
from megarl.errors import ConfigError
try:
    file.load(f"{sys.argv[1]}.toml", trust=True)
except ConfigError as error:
    assert "found no megatron-core" in str(error), error
    print("its [megatron] table needs Megatron-Core")
"""
pytestmark = pytest.mark.slow(minutes=1)


def build(source: Path, out: Path, kind: str) -> Path:
    """Call the build backend as pip does, with the setuptools of this environment; kind: "wheel" or "sdist"."""
    out.mkdir(exist_ok=True)
    tell = f"import setuptools.build_meta as b; print(); print(b.build_{kind}({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", tell], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1]


def members(wheel: Path) -> set[str]:
    """Files of a wheel without those that describe it."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.startswith(f"megarl-{__version__}.dist-info/")}


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """Files of the repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tracked: list[str]) -> tuple[Path, Path]:
    """A wheel and a source distribution of the files of the repository."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked:
        if not name.startswith(("docs/", "tests/null_gpu/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    return build(source, out, "wheel"), build(source, out, "sdist")


def test_every_file_of_the_package_is_in_and_no_other(built: tuple[Path, Path], tracked: list[str]) -> None:
    package = {name for name in tracked if name.startswith("megarl/")}
    assert members(built[0]) == package
    assert {"megarl/py.typed", "patches/0.15.3.patch", "launch/scripts/local.sh"} <= package
    with tarfile.open(built[1]) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    described = {"PKG-INFO", "setup.cfg", "MANIFEST.in", "LICENSE", "README.md", "pyproject.toml"}
    assert {name for name in names if not name.startswith("megarl.egg-info/")} == package | described


def test_the_source_distribution_makes_the_same_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    again = build(next(tmp_path.glob("megarl-*")), tmp_path / "out", "wheel")
    with zipfile.ZipFile(built[0]) as first, zipfile.ZipFile(again) as second:
        assert members(built[0]) == members(again)
        assert all(first.read(name) == second.read(name) for name in members(again))


def test_it_works_where_only_numpy_and_pydantic_are(built: tuple[Path, Path], tmp_path: Path) -> None:
    python = make_environment(tmp_path / "empty", with_pip=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", built[0]]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: str | Path) -> str:
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(*pip)
    megarl = python.with_name("megarl")
    assert run(megarl, "--version") == f"megarl {__version__}\n"
    assert "patch" in run(megarl, "--help")
    experts = np.array([[[0, 1]], [[2, 3]]], np.int32)
    write_traces(tmp_path / "t", TraceInfo("tiny", (0,), 4, 2), [TracedSequence("s", RoutingTrace(experts, 4))])
    assert "top-2 of 4" in run(megarl, "trace", "inspect", "t")
    listed = run(megarl, "recipes")
    recipes = [path.stem for path in (ROOT / "launch").glob("*.toml")]
    assert len(recipes) == 8
    for name in recipes:
        assert name in listed
        run(megarl, "recipes", "copy", name, name)
        done = subprocess.run([python, "-c", LOAD, name], cwd=tmp_path / name, env=environment, stdout=subprocess.PIPE)
        assert done.returncode == 0
        assert done.stdout in (b"", b"its [megatron] table needs Megatron-Core\n")
    assert os.access(tmp_path / "qwen3-30b-a3b-8gpu" / "local.sh", os.X_OK)
