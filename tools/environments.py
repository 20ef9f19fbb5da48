"""Python environments of a clone, kept in one cache folder that all clones share (stdlib only; called by the Makefile).

    PYTHON tools/environments.py megarl FOLDER       .venv; .venv-3.12 for the tests of another Python
    PYTHON tools/environments.py sglang VERSION      .venv-sglang
    PYTHON tools/environments.py null-gpu            .venv-null-gpu
    PYTHON tools/environments.py verl VERSION        .venv-verl
    PYTHON tools/environments.py docs                .venv-docs
    PYTHON tools/environments.py cache               prints the cache folder

Environments have the Python that runs this file, 3.11 or newer.

The cache is $MEGARL_CACHE, or megarl/ in $XDG_CACHE_HOME, or ~/.cache/megarl. An environment there is named after a
hash of everything that decides what is installed. So clones with different pins use different environments, and a
second clone with the same pins installs nothing.

- ``.venv`` is the clone's own: megarl itself (editable), Megatron-Core (``megarl patch`` changes it in place), and a
  ``.pth`` file that leads to the cached packages. It is made again when another Python or other packages are asked for.
- ``.venv-sglang`` is a link into the cache, where nothing belongs to a clone.
- ``.venv-null-gpu`` is such a link too: CUDA torch and Transformer Engine, and a ``.pth`` file that leads to the cached
  packages of ``.venv`` for everything else. So is ``.venv-verl``, with verl and what verl needs.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TORCH = "2.13.0"
TORCH_CPU_INDEX = os.environ.get("TORCH_CPU_INDEX", "https://download.pytorch.org/whl/cpu")
SGLANG_RELEASES = ("0.5.17", "0.5.18", "0.5.21")
"""Other releases that the tests run: their wheels alone, each beside a ``python`` that finds it first."""
COMPLETE = ".complete"
"""The last file of an installation. A folder without it was interrupted, and is made again."""
LIBRARY = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")

FOR_PYTHON_3_12 = (
    *("--ignore-requires-python", "--python-version", "3.12"),
    *("--only-binary", ":all:", "--platform", "manylinux_2_28_x86_64"),
)
"""Wheels of Megatron-Core from 0.17 on ask for it. They run on 3.11: all is Python, but for a part that is not used."""
TRITON = "3.7.1"
"""Megatron-Core imports it from 0.18 on and does not declare it; torch's builds for CPUs come without it."""

RELEASE_PYTHON = """\
#!/bin/sh
here=$(cd "$(dirname "$0")" && pwd)
PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" exec "$here/../../bin/python" "$@"
"""


def cache_folder() -> Path:
    base = os.environ.get("MEGARL_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "megarl")
    return Path(base).expanduser().resolve()


def key(*parts: object) -> str:
    """A short hash of ``parts``, of this interpreter and of this kind of machine."""
    machine = (platform.python_version(), sys.base_prefix, platform.system(), platform.machine())
    return hashlib.sha256(json.dumps([*machine, TORCH, *parts]).encode()).hexdigest()[:16]


@contextmanager
def installation(folder: Path) -> Iterator[bool]:
    """Hold the lock of a cached folder. Yields whether it has to be filled, which is repeated if anything is raised."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / COMPLETE).exists():
            yield False
            return
        shutil.rmtree(folder, ignore_errors=True)
        yield True
        (folder / COMPLETE).touch()


@contextmanager
def environment_to_fill(folder: Path, cost: str) -> Iterator[Path | None]:
    """``installation`` of an environment: yields the python of a new one, or None if it is complete."""
    with installation(folder) as is_missing:
        if is_missing:
            say(f"creating {folder} ({cost}, once for all clones)")
        yield new_environment(folder) if is_missing else None


def say(words: str) -> None:
    print(f"setup: {words}", flush=True)


def pip(python: Path, *words: object, **options: Any) -> int:
    """Install and return 0. If pip fails: raises CalledProcessError, or returns its exit code with ``check=False``."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *words]
    return subprocess.run(list(map(str, command)), cwd=ROOT, **{"check": True, **options}).returncode


def install_torch(python: Path) -> None:
    """The build for CPUs, from the configured indexes or PyTorch's own. Where there is none (macOS), the default."""
    say(f"installing torch {TORCH} for the CPU")
    for index in ([], ["--index-url", TORCH_CPU_INDEX]):
        if not pip(python, f"torch=={TORCH}+cpu", *index, stderr=subprocess.DEVNULL, check=False):
            return
    say("found no build for the CPU, installing the default build of torch (for Linux that of CUDA)")
    share_libraries(python.parents[1])
    pip(python, f"torch=={TORCH}")


def share_libraries(environment: Path) -> None:
    """Link the files of NVIDIA's libraries that another environment has: 3 GB, the same for every Python.

    pip replaces those of other versions than torch asks for, and leaves the other environment's as they are.
    """
    for complete in sorted(cache_folder().glob(f"*/{COMPLETE}")):
        if found := next(complete.parent.glob("lib/python*/site-packages/nvidia"), None):
            for path in found.parent.glob("nvidia*"):
                shutil.copytree(path, environment / LIBRARY / path.name, copy_function=os.link)
            return


def new_environment(folder: Path, *, with_pip: bool = True) -> Path:
    """Create an environment and return its python."""
    venv.create(folder, with_pip=with_pip, symlinks=True)
    return folder / "bin" / "python"


# .venv


def requirements() -> list[str]:
    """What pyproject.toml asks for, with the extras of a developer and what builds megarl."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = table["project"]["optional-dependencies"]
    needed = [*extras["megatron"], *extras["train"], *extras["dev"]]
    build, project = table["build-system"]["requires"], table["project"]["dependencies"]
    return [*build, *project, *(each for each in needed if not each.startswith("megarl-moe["))]


def make_megarl(own: Path) -> None:
    cached, stamp = make_packages(), own / ".setup-done"
    with installation_of_clone(own):
        entry_points = (ROOT / "pyproject.toml").read_text().split("[project.scripts]")[-1].split("[tool.")[0]
        wanted = key(str(cached), entry_points, Path(__file__).read_text())
        if stamp.is_file() and stamp.read_text() == wanted:
            return
        make_thin(own, cached)
        stamp.write_text(wanted)
        say("done")


def make_packages() -> Path:
    """The cached environment with what megarl needs."""
    constraints = ROOT / "constraints.txt"
    cached = cache_folder() / f"megarl-{key(requirements(), constraints.read_text())}"
    with environment_to_fill(cached, "a few minutes") as python:
        if python:
            install_torch(python)
            say("installing megarl's dependencies (about a minute)")
            pip(python, "--constraint", constraints, *requirements())
    return cached


@contextmanager
def installation_of_clone(own: Path) -> Iterator[None]:
    if own.is_symlink():
        sys.exit(f"setup: {own} is a link; remove it, so that this clone gets an environment of its own")
    locks = cache_folder() / "clones"
    locks.mkdir(exist_ok=True)
    with (locks / f"{key(str(own))}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_thin(own: Path, cached: Path) -> None:
    """An environment with megarl, Megatron-Core and the commands of the cached one, whose packages it finds."""
    say(f"making {own.name} for Python {platform.python_version()}, with the packages of {cached}")
    shutil.rmtree(own, ignore_errors=True)
    python = new_environment(own, with_pip=False)
    packages = cached / LIBRARY
    # The path is for pyright, the import for packages that have .pth files of their own.
    (own / LIBRARY / "megarl-cache.pth").write_text(f"{packages}\nimport site; site.addsitedir({str(packages)!r})\n")
    for found in packages.glob("megatron*"):
        shutil.copytree(found, own / LIBRARY / found.name)
    copy_commands(cached / "bin", own / "bin")
    pip(python, "--no-deps", "--no-build-isolation", "--editable", ".")


def copy_commands(source: Path, target: Path) -> None:
    """Scripts run the python of ``target``; programs are linked."""
    for path in source.iterdir():
        if path.name.startswith(("python", "activate", "Activate")) or (target / path.name).exists():
            continue
        data, interpreter = path.read_bytes(), str(source / "python").encode()
        if not data.startswith(b"#!"):
            (target / path.name).symlink_to(path)
            continue
        (target / path.name).write_bytes(data.replace(interpreter, str(target / "python").encode(), 1))
        (target / path.name).chmod(0o755)


# .venv-sglang


def make_sglang(version: str) -> None:
    pins = ROOT / "requirements-sglang-cpu.txt"
    cached = cache_folder() / f"sglang-{version}-{key(pins.read_text(), version)}"
    with environment_to_fill(cached, "about two minutes, 3.2 GB") as python:
        if python:
            install_torch(python)
            # Every version is pinned and nothing is resolved, so that other versions of SGLang can be put beside it.
            say("installing what SGLang needs")
            pip(python, "--no-deps", "--requirement", pins)
            for release in (version, *SGLANG_RELEASES):
                install_sglang(release, python, None if release == version else cached / "releases" / release)
    link(ROOT / ".venv-sglang", cached)
    say(f"SGLang {version} for the CPU is in .venv-sglang; {', '.join(SGLANG_RELEASES)} are in .venv-sglang/releases")


def install_sglang(version: str, python: Path, beside: Path | None) -> None:
    """Into the environment, or into a folder ``beside`` whose ``python`` finds this release first."""
    say(f"installing SGLang {version}")
    pip(python, "--no-deps", *(["--target", beside] if beside else []), f"sglang=={version}")
    if beside:
        (beside / "python").write_text(RELEASE_PYTHON)
        (beside / "python").chmod(0o755)


def link(own: Path, cached: Path) -> None:
    if own.is_symlink() or not own.exists():
        new = own.with_name(f"{own.name}.{os.getpid()}")
        new.symlink_to(cached)
        new.replace(own)
    else:  # made by an earlier Makefile
        shutil.rmtree(own)
        own.symlink_to(cached)


# .venv-null-gpu


def make_null_gpu() -> None:
    packages, tests = make_packages(), ROOT / "tests" / "null_gpu"
    pins = tests / "requirements.txt"
    wheels = sorted((tests / "wheels").glob("*.whl"))
    cached = cache_folder() / f"null-gpu-{key(pins.read_text(), [wheel.name for wheel in wheels], str(packages))}"
    with environment_to_fill(cached, "about five minutes, 6 GB") as python:
        if python:
            torch = next(line for line in pins.read_text().splitlines() if line.startswith("torch=="))
            pip(python, torch, "--constraint", pins)
            pip(python, "--no-deps", "--requirement", pins, *wheels)
            lead_to(packages, cached)
    link(ROOT / ".venv-null-gpu", cached)


def lead_to(packages: Path, cached: Path) -> None:
    """Let an environment find other packages too, after its own."""
    (cached / LIBRARY / "zz-megarl.pth").write_text(f"import site; site.addsitedir({str(packages / LIBRARY)!r})\n")


# .venv-verl


def make_verl(version: str) -> None:
    packages, pins = make_packages(), ROOT / "requirements-verl.txt"
    cached = cache_folder() / f"verl-{version}-{key(pins.read_text(), str(packages))}"
    with environment_to_fill(cached, "about a minute, 400 MB") as python:
        if python:
            pip(python, "--no-deps", "--requirement", pins, f"verl=={version}")
            lead_to(packages, cached)
    link(ROOT / ".venv-verl", cached)


# .venv-docs


def make_docs() -> None:
    """What builds the documentation; it reads megarl's code without importing it."""
    pins = ROOT / "requirements-docs.txt"
    cached = cache_folder() / f"docs-{key(pins.read_text())}"
    with environment_to_fill(cached, "less than a minute, 90 MB") as python:
        if python:
            pip(python, "--no-deps", "--requirement", pins)
    link(ROOT / ".venv-docs", cached)


# Other releases of Megatron-Core


def megatron_release(version: str) -> Path:
    """A folder with this release of Megatron-Core alone, or with a link to triton; shared, so leave it as it is."""
    minor, own = int(version.split(".")[1]), f"{sys.version_info.major}.{sys.version_info.minor}"
    cached = cache_folder() / f"megatron-core-{version}-python{own}"  # the link leads to this Python's triton
    with installation(cached) as is_missing:
        if is_missing:
            other_python = FOR_PYTHON_3_12 if minor >= 17 else ()
            pip(Path(sys.executable), "--no-deps", *other_python, "--target", cached, f"megatron-core=={version}")
            if minor >= 18:
                (cached / "triton").symlink_to(triton_release() / "triton")
    return cached


def transformers_release(version: str, *others: str) -> Path:
    """A folder with this release of transformers, and ``others`` that it needs in another release than megarl's."""
    cached = cache_folder() / f"transformers-{version}-{key(others)}"
    with installation(cached) as is_missing:
        if is_missing:
            pip(Path(sys.executable), "--no-deps", "--target", cached, f"transformers=={version}", *others)
    return cached


def trl_release(version: str) -> Path:
    """A folder with this release of TRL alone; what it needs is among megarl's packages."""
    cached = cache_folder() / f"trl-{version}-{key()}"
    with installation(cached) as is_missing:
        if is_missing:
            pip(Path(sys.executable), "--no-deps", "--target", cached, f"trl=={version}")
    return cached


def openai_release(version: str) -> Path:
    """A folder with this release of OpenAI's package and what it needs."""
    constraints = ROOT / "constraints.txt"
    cached = cache_folder() / f"openai-{version}-{key(constraints.read_text())}"
    with installation(cached) as is_missing:
        if is_missing:
            pip(Path(sys.executable), "--constraint", constraints, "--target", cached, f"openai=={version}")
    return cached


def sinks_release() -> Path:
    """A folder with MLflow and Weights & Biases, and what they need beside megarl's packages; 150 MB."""
    pins = ROOT / "requirements-sinks.txt"
    cached = cache_folder() / f"sinks-{key(pins.read_text())}"
    with installation(cached) as is_missing:
        if is_missing:
            pip(Path(sys.executable), "--no-deps", "--target", cached, "--requirement", pins)
    return cached


def triton_release() -> Path:
    """A folder with Triton alone, for this Python."""
    cached = cache_folder() / f"triton-{TRITON}-{key()}"
    with installation(cached) as is_missing:
        if is_missing:
            pip(Path(sys.executable), "--no-deps", "--target", cached, f"triton=={TRITON}")
    return cached


def main(words: Sequence[str]) -> None:
    match list(words):
        case ["megarl", folder]:
            make_megarl(ROOT / folder)
        case ["sglang", version]:
            make_sglang(version)
        case ["null-gpu"]:
            make_null_gpu()
        case ["verl", version]:
            make_verl(version)
        case ["docs"]:
            make_docs()
        case ["cache"]:
            print(cache_folder())
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
