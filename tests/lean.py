"""An environment with what `pip install megarl-moe` brings: numpy, pydantic, and what these need."""

from __future__ import annotations

import sys
import venv
from importlib.metadata import distribution
from pathlib import Path

DISTRIBUTIONS = ("numpy", "pydantic", "pydantic-core", "annotated-types", "typing-extensions", "typing-inspection")


def make_environment(folder: Path, *, with_pip: bool = False) -> Path:
    """Create it, with links to the packages of this environment; return its python."""
    venv.create(folder, with_pip=with_pip, symlinks=True)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for name in DISTRIBUTIONS:
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            (site / top).symlink_to(str(found.locate_file(top)))
    return folder / "bin" / "python"
