"""What some tests need and a machine may lack: ``@pytest.mark.needs("bwrap")``."""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path

SGLANG_PYTHON = Path(__file__).parents[1] / ".venv-sglang" / "bin" / "python"

DOCS_ENVIRONMENT = Path(__file__).parents[1] / ".venv-docs"


@functools.cache
def explain(need: str) -> str | None:
    """Why a test that needs this cannot run here, and how to get it. None if it can."""
    match need:
        case "sglang":
            return None if SGLANG_PYTHON.exists() else "needs a real SGLang server: make sglang-cpu (3.2 GB)"
        case "docs":
            found = any(DOCS_ENVIRONMENT.glob("lib/python3.*/site-packages/math_core"))
            return None if found else "needs the environment of the documentation: make docs (90 MB)"
        case "bwrap":
            return _program("bwrap", "bubblewrap, the sandbox of the Python tool: apt-get install bubblewrap")
        case "slurm":
            if os.geteuid() != 0:
                return "needs root, to start a Slurm of two nodes"
            missing = [_program(name, name) for name in ("munged", "slurmctld", "slurmd", "sbatch")]
            return "needs Slurm: apt-get install slurm-wlm munge" if any(missing) else None
        case "shellcheck":
            return _program("shellcheck", "shellcheck: apt-get install shellcheck")
        case "gpu":
            import torch

            return None if torch.cuda.is_available() else "needs a CUDA device"
    raise ValueError(f"found need {need!r}, expected one that tests/absent.py knows")


def _program(name: str, described: str) -> str | None:
    return None if shutil.which(name) else f"needs {described}"
