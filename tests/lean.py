"""Environments with a few packages: by default what `pip install` of megarl brings, which is numpy and little more."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from importlib.metadata import distribution
from pathlib import Path

import pytest

DISTRIBUTIONS = (
    *("numpy", "safetensors", "pydantic", "pydantic-core", "annotated-types", "typing-extensions", "typing-inspection"),
)


KIT = (
    *("torch", "numpy", "packaging", "filelock", "typing-extensions", "sympy", "mpmath", "networkx"),
    *("jinja2", "markupsafe", "fsspec", "setuptools"),
)
"""What Megatron-Core imports, and what torch does."""


def make_environment(folder: Path, *, with_pip: bool = False, distributions: Sequence[str] = DISTRIBUTIONS) -> Path:
    """Create it, with links to the packages of this environment; return its python."""
    venv.create(folder, with_pip=with_pip, symlinks=True)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for name in distributions:
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            (site / top).symlink_to(str(found.locate_file(top)))
    return folder / "bin" / "python"


@pytest.fixture(scope="session")
def lean(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs megarl where nothing but numpy, pydantic and safetensors is installed."""
    here = tmp_path_factory.mktemp("here")
    python = make_environment(tmp_path_factory.mktemp("lean"))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        line = [python, "-m", "megarl.cli", *words]
        return subprocess.run(line, capture_output=True, text=True, cwd=here, env=environment, check=False)

    return run
