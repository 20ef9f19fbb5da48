"""Every tool can be imported, so that none falls behind the package."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import release_checks
from test_transformers_releases import CHECKS

ROOT = Path(__file__).parents[1]
TOOLS = sorted((ROOT / "tools").glob("*.py"))


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
    # docs_hooks.py runs in .venv-docs, where test_site.py builds pages with it.
    tools = [str(tool) for tool in TOOLS if tool.name != "docs_hooks.py"]
    assert len(tools) >= 8
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *tools], capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert not done.stdout, done.stdout[-2000:]


def test_every_module_that_is_mutated_exists_with_its_tests() -> None:
    tables = runpy.run_path(str(ROOT / "tools" / "mutate.py"))
    for module, stems in tables["SCORED"].items():
        assert tables["find_module"](module).is_file(), module
        for stem in stems.split():
            assert (ROOT / f"tests/core/test_{stem}.py").is_file(), f"{module}: {stem}"
    for module, names in tables["SAMPLED"].items():
        assert tables["find_module"](module).is_file(), module
        for name in names.split():
            assert (ROOT / f"tests/{name}.py").is_file(), f"{module}: {name}"


def named_tests() -> set[str]:
    """Tests that are run by name: on the null GPU, with other Pythons, on other releases."""
    text = "\n".join((ROOT / name).read_text() for name in ("tests/null_gpu/selection.txt", "tools/test_pythons"))
    names = set(re.findall(r"\btests/[\w/]+\.py(?:::\w+)*", text))
    releases = (*release_checks.REPLAY_TESTS, *release_checks.CHECKPOINT_TESTS, *release_checks.LAYOUT_TESTS)
    releases += (*release_checks.CONVERSION_TESTS, *release_checks.EXPORT_TESTS)
    return names | {f"tests/{name}" for name in releases} | {f"tests/engines/{name}" for name in CHECKS}


@pytest.mark.parametrize("name", sorted(named_tests()))
def test_a_test_that_is_run_by_name_exists(name: str) -> None:
    path, *parts = name.partition("[")[0].split("::")
    text = (ROOT / path).read_text()
    for part in parts:
        assert re.search(rf"^ *(?:async )?(?:def|class) {part}\b", text, re.MULTILINE), part
