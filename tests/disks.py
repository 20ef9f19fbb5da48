"""A small file system of its own for a test, which can be full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int | None], Path]]:
    """A file system of its own; called with its free bytes, None for plenty."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system")

    def limit(free: int | None) -> Path:
        found = os.statvfs(folder)
        size = (found.f_blocks - found.f_bfree) * found.f_frsize + free if free is not None else 1 << 30
        subprocess.run(["mount", "-o", f"remount,size={size}", folder], check=True)
        return folder

    yield limit
    subprocess.run(["umount", folder], check=True)
