"""How long ``megarl quickstart`` takes, by part, and what it reaches.

    python tools/bench_quickstart.py [--repeats 3] [--json FILE]

Every repetition starts from an empty folder. "seconds" is what a user waits; it needs two free cores. "CPU" is the time
of all its processes, which other load does not change.
"""

from __future__ import annotations

import argparse
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from bench_rows import Row, add_json, finish


def run_once() -> dict[str, float]:
    """Return seconds and rates by name."""
    with tempfile.TemporaryDirectory() as folder:
        before, started = _children_cpu(), time.monotonic()
        words = [sys.executable, "-m", "megarl.cli", "quickstart", "--out", f"{folder}/out"]
        said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        found = {"seconds": time.monotonic() - started, "CPU": _children_cpu() - before}
    first, last = re.findall(r"held-out pass rate ([\d.]+)% -> ([\d.]+)%", said)[0]
    parts = re.findall(
        r"(start|cold start|RL|report) (\d+)", next(line for line in said.splitlines() if "seconds " in line)
    )
    return {**found, "first": float(first), "last": float(last), **{name: float(value) for name, value in parts}}


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    add_json(parser)
    arguments = parser.parse_args()
    runs = [run_once() for _ in range(arguments.repeats)]

    def row(name: str, what: str, unit: str, budget: float | None = None, kind: str | None = None) -> Row:
        values = [run[name] for run in runs]
        return Row(name, what, statistics.median(values), unit, min(values), max(values), budget, kind)

    rows = [
        row("seconds", "from the command to its last line", "s", 60.0, "at_most"),
        row("CPU", "all processes", "s"),
        *(row(name, "a part of the seconds", "s") for name in ("start", "cold start", "RL", "report")),
        row("first", "held-out pass rate before RL", "%"),
        row("last", "held-out pass rate after 30 steps", "%", 85.0, "at_least"),
    ]
    for each in rows:
        print(f"{each.name:>12} {each.value:7.1f} {each.unit}  ({each.low:.1f} to {each.high:.1f})")
    return finish(rows, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
