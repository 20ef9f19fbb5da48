"""Other releases of Megatron-Core, installed once beside the environment's packages."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path


def installed(version: str) -> Path:
    """A folder with this release and nothing else; leave it as it is, other tests use it too."""
    target = Path(sys.prefix) / f"megatron-core-{version}"
    with target.with_name(f"{target.name}.lock").open("w") as lock:  # for tests that run side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        _install(version, target)
    return target


def _install(version: str, target: Path) -> None:
    if not target.is_dir():
        unfinished = target.with_name(f"{target.name}.part")
        words = ["install", "--quiet", "--no-deps", "--disable-pip-version-check", "--target", str(unfinished)]
        subprocess.run([sys.executable, "-m", "pip", *words, f"megatron-core=={version}"], check=True, timeout=300)
        unfinished.rename(target)
