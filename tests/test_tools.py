"""Every tool can be imported, so that none falls behind the package."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = sorted((Path(__file__).parent.parent / "tools").glob("*.py"))


def test_there_are_tools() -> None:
    assert len(TOOLS) >= 8


@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.stem)
def test_a_tool_finds_all_that_it_imports(tool: Path) -> None:
    code = (
        "import importlib.util, sys; "
        f"spec = importlib.util.spec_from_file_location('tool', {str(tool)!r}); "
        "module = importlib.util.module_from_spec(spec); sys.modules['tool'] = module; spec.loader.exec_module(module)"
    )
    assert importlib.util.find_spec("megarl") is not None
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
