"""Source trees of Megatron-Core releases, and the patch tool run on them."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import preloaded
import pytest
from megatron_releases import installed

VERSIONS = ["0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1"]
MOE = Path("megatron/core/transformer/moe")
FILES = (MOE / "moe_utils.py", MOE / "router.py")


@pytest.fixture
def core_tree(tmp_path: Path) -> Callable[..., Path]:
    """Makes a source tree: the files of a release that a patch can touch, and the one that names the version."""

    def make(version: str, folder: Path = tmp_path / "tree") -> Path:
        for name in (*FILES, Path("megatron/core/package_info.py")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(installed(version) / name, folder / name)
        return folder

    return make


class _Popen(preloaded.ForkedPopen):
    """A fork of a process that has imported the tool: no Megatron-Core, and no torch."""

    def _zygote(self, words: Sequence[str], environment: Mapping[str, str]) -> preloaded.Zygote:
        return _tool()


@functools.cache
def _tool() -> preloaded.Zygote:
    return preloaded.Zygote(sys.executable, ("megarl.commands", "megarl.ops.patching.patch"), os.environ)


def run(command: str, *words: str | Path, **settings: object) -> subprocess.CompletedProcess[str]:
    """``megarl patch``, as a user calls it."""
    line = [sys.executable, "-m", "megarl.cli", "patch", command, *map(str, words)]
    start = subprocess.Popen if "preexec_fn" in settings else _Popen
    return preloaded.run(line, start=start, timeout=3600, **settings)


def succeed(command: str, *words: str | Path, **settings: object) -> str:
    done = run(command, *words, **settings)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def refuse(command: str, *words: str | Path, **settings: object) -> str:
    """What the tool says on refusing: one line, and exit code 2."""
    done = run(command, *words, **settings)
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("megarl: error: ")
    return done.stderr


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, git's own left out."""
    files = (path for path in folder.rglob("*") if path.is_file() and ".git" not in path.relative_to(folder).parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_bytes().decode()
    assert text.count(old) == 1, old
    file.write_bytes(text.replace(old, new).encode())


def git(folder: Path, *words: str, **settings: object) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "core.autocrlf=false"]
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    line = ["git", *identity, *words]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=True, **settings)  # type: ignore[call-overload]
    return done.stdout
