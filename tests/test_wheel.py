"""The wheel and the source distribution: complete, nothing foreign in them, usable without other packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from lean import make_environment

from megarl import __version__

ROOT = Path(__file__).parents[1]
DATA = ("launch", "patches")
"""Folders beside the package that the wheel carries inside of it."""
pytestmark = [pytest.mark.slow(minutes=1), pytest.mark.gate]


def build(source: Path, out: Path, kind: str) -> Path:
    """Call the build backend as pip does, with the setuptools of this environment; kind: "wheel" or "sdist"."""
    out.mkdir(exist_ok=True)
    code = f"import setuptools.build_meta as b; print(); print(b.build_{kind}({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1]


def members(wheel: Path) -> set[str]:
    """Files of a wheel without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.startswith(f"megarl_moe-{__version__}.dist-info/")}


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """Files of the repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tracked: list[str]) -> Path:
    """A copy of the repository, in which building leaves its files."""
    folder = tmp_path_factory.mktemp("source")
    for name in tracked:
        if not name.startswith(("docs/", "tests/null_gpu/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(source, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(source, tmp_path_factory.mktemp("sdist"), "sdist")


def test_the_wheel_has_the_package_and_the_two_folders_of_data(wheel: Path, tracked: list[str]) -> None:
    package = {name for name in tracked if name.startswith("megarl/")}
    data = {f"megarl/{name}" for name in tracked if name.startswith(DATA)}
    assert {"megarl/patches/0.15.3.patch", "megarl/launch/scripts/local.sh"} <= data
    assert members(wheel) == package | data
    assert "megarl/py.typed" in package


def test_the_source_distribution_has_the_same_files_where_the_checkout_has_them(
    sdist: Path, tracked: list[str]
) -> None:
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    sources = {name for name in tracked if name.startswith(("megarl/", *DATA))}
    build_files = {"MANIFEST.in", "LICENSE", "README.md", "pyproject.toml", "tools/build_package.py"}
    assert {name for name in names if not name.startswith("megarl_moe.egg-info/")} == (
        sources | build_files | {"PKG-INFO", "setup.cfg"}
    )


def test_it_works_where_only_numpy_and_pydantic_are(wheel: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "empty", with_pip=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: str | Path, cwd: Path = tmp_path, code: int = 0) -> str:
        done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=environment)
        assert done.returncode == code, done.stderr
        return done.stdout

    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
    megarl = python.with_name("megarl")
    assert run(megarl, "--version") == f"megarl {__version__}\n"
    assert "patch" in run(megarl, "--help")
    listed = run(megarl, "recipes")
    recipes = [path.stem for path in (ROOT / "launch" / "recipes").glob("*.toml")]
    assert len(recipes) == 11
    for name in recipes:
        assert name in listed
        run(megarl, "recipes", "copy", name, name)
        words = ["--model", str(ROOT / "launch/models/Qwen3-30B-A3B")] if name == "starter" else []
        assert "trainer's GPU, with reserves" in run(megarl, "plan", f"{name}.toml", *words, cwd=tmp_path / name)
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "1+1?", "answer": "1+1=2 #### 2"}\n')
    words = ["data", "prepare", "gsm8k.jsonl", "data", "--prompt-field", "question", "--answer-after", "####"]
    assert "data/train.jsonl: 1 prompts" in run(megarl, *words)
    recipe = tmp_path / "qwen3-30b-a3b-64gpu"
    (recipe / "data").symlink_to(tmp_path / "data")
    assert "not ready for qwen3-30b-a3b-64gpu.toml" in run(megarl, "doctor", f"{recipe.name}.toml", cwd=recipe, code=1)
    assert os.access(tmp_path / "qwen3-30b-a3b-8gpu" / "local.sh", os.X_OK)
    installed = run(python, "-c", "from megarl.ops.patching.patch import PATCHES; print(PATCHES)")
    assert Path(installed.strip()).is_relative_to(tmp_path / "empty")
