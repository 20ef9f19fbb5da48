"""Every tool can be imported, so that none falls behind the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOLS = sorted((Path(__file__).parent.parent / "tools").glob("*.py"))


def test_there_are_tools() -> None:
    assert len(TOOLS) >= 8


def test_a_tool_finds_all_that_it_imports() -> None:
    code = (
        "import importlib.util, sys, traceback\n"
        "for path in sys.argv[1:]:\n"
        "    spec = importlib.util.spec_from_file_location('tool', path)\n"
        "    module = sys.modules['tool'] = importlib.util.module_from_spec(spec)\n"
        "    try:\n"
        "        spec.loader.exec_module(module)\n"
        "    except Exception:\n"
        "        print(path, traceback.format_exc())\n"
    )
    tools = [str(tool) for tool in TOOLS]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *tools], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert not done.stdout, done.stdout[-2000:]
