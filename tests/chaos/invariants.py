"""What holds at the end of every episode, whatever happened in it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from audit_reader import check
from chaos_world import SAMPLES, STEPS, ChaosError, Run
from run_configs import records_of

from megarl.errors import DataError

TEMPORARY = ("*.partial", "[!.]*.tmp", "*.new", "*.damaged.*")
"""A kill in the middle of the write of a small file may leave ``.NAME.PID.tmp``."""
ENDING_S = 60.0
"""Helpers of Python's multiprocessing end a moment after the run."""
COUNTED = ("judged; first failure",)
"""Words of a run that has counted what it could not use: its numbers are those of fewer samples."""


def numbers(folder: Path) -> list[dict[str, Any]]:
    """The run's records, without times; none of a run that ended before its first one."""
    return records_of(folder) if (folder / "metrics.jsonl").exists() else []


def steps_of(run: Run) -> list[dict[str, Any]]:
    return [record for record in numbers(run.folder) if record["kind"] == "step"]


def require(holds: object, what: str, run: Run) -> None:
    if not holds:
        raise ChaosError(f"{what}\n{run.last_words()}")


def require_explained(run: Run) -> None:
    """A run that has ended early says why, in a sentence and without a traceback."""
    said, code = run.said(), run.code
    require("Traceback" not in said, f"ended with code {code} and a traceback", run)
    if code not in (0, None) and code > 0:
        require("megarl: " in said, f"ended with code {code} and without a word", run)


def require_clean(run: Run) -> None:
    """No process, and no temporary file in the run folder or in TMPDIR."""
    until = time.monotonic() + ENDING_S
    while (left := run.left()) and time.monotonic() < until:
        time.sleep(0.05)
    require(not left, f"processes are left: {left}", run)
    found = [str(path) for pattern in TEMPORARY for path in run.folder.rglob(pattern)]
    # SGLang leaves the names of its sockets, as sockets or empty files.
    found += [str(path) for path in (run.scratch / "tmp").iterdir() if not path.match("tmp????????") or _size(path)]
    require(not found, f"temporary files are left: {found}", run)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*")) + 1 if path.is_dir() else path.stat().st_size


def require_whole(run: Run, steps: int = STEPS) -> None:
    """Every step is in the metrics once, and every sample has trained once, but for those that the records count."""
    records = steps_of(run)
    done = [record["step"] for record in records]
    require(done == list(range(1, steps + 1)), f"metrics of steps {done}, expected 1 to {steps}", run)
    try:
        trained = check(run.folder / "samples.jsonl", steps)
    except DataError as error:
        raise ChaosError(f"the audit of samples: {error}") from error
    lost = ("reward/error_fraction", "episode/failed_fraction")
    failed = sum(round(record.get(name, 0.0) * SAMPLES) for record in records for name in lost)
    expected = steps * SAMPLES - failed - sum(int(record.get("tripwires/dropped", 0)) for record in records)
    require(trained == expected, f"{trained} samples have trained, expected {expected}", run)


def require_undisturbed(run: Run, reference: list[dict[str, Any]]) -> str:
    """The numbers of a run that nothing happened to; returns "lost nothing", or what the run has counted."""
    counted = [words for words in COUNTED if words in run.said(1)]
    if counted:
        return f"counted: {counted[0]}"
    found = numbers(run.folder)
    for mine, other in zip(found, reference, strict=False):
        differ = {key: (mine.get(key), other.get(key)) for key in mine | other if mine.get(key) != other.get(key)}
        require(not differ, f"step {other['step']} has other numbers: {dict(list(differ.items())[:4])}", run)
    require(len(found) == len(reference), f"{len(found)} records, expected {len(reference)}", run)
    return "lost nothing"
