"""Settings that every test shares, the two tiers of tests, and what is said about tests that cannot run here."""

from __future__ import annotations

import os
import signal
import sys

# Before torch is imported: one thread per process (see the Makefile), and no look at a model hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import fast_start  # noqa: F401 (first: it is of use to the others)
import pytest
from absent import explain
from disks import disk  # noqa: F401 (pytest finds it here)
from hypothesis import HealthCheck, settings
from lean import lean  # noqa: F401 (pytest finds it here)
from patch_trees import core_tree  # noqa: F401 (pytest finds it here)
from run_configs import here, trainable  # noqa: F401 (pytest finds them here)
from sglang_fixtures import (  # noqa: F401 (pytest finds them here)
    hostile_model,
    sglang_model,
    sglang_python,
    sglang_server,
    sglang_spec,
    updated_server,
)

# The same examples on every machine and no time limits: a busy machine must not fail a test.
settings.register_profile(
    "megarl", deadline=None, derandomize=True, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("megarl")

# A suite under nohup, or in the background of a shell, would hand on that these are ignored.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def _undo_changes_of_this_process() -> Iterator[None]:
    """A run sets variables, and a configuration puts its folder on the path; the next file has neither."""
    variables, path = dict(os.environ), [*sys.path]
    yield
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:] = path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take minutes, so that no worker is left alone with one at the end."""
    minutes: Counter[Path] = Counter()
    for item in items:
        for mark in item.iter_markers("slow"):
            minutes[item.path] = max(minutes[item.path], mark.kwargs.get("minutes", 0))
        minutes[item.path] += 0
    items.sort(key=lambda item: -minutes[item.path])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose programs are not here. Fail it instead where MEGARL_TEST_EVERYTHING is set, as CI does."""
    needs = [need for mark in item.iter_markers("needs") for need in mark.args]
    needs += [name for name in ("gpu", "sglang") if item.get_closest_marker(name)]
    for need in needs:
        if why := explain(need):
            if os.environ.get("MEGARL_TEST_EVERYTHING") and need != "gpu":
                pytest.fail(why, pytrace=False)
            pytest.skip(why)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say once per reason what was skipped, and how to get it."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    )
    if reasons:
        terminalreporter.section("not run on this machine")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:4d} tests: {reason}")
