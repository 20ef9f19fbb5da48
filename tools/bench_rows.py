"""One figure of a benchmark, with its spread and its budget; what every ``tools/bench_*.py`` writes with ``--json``."""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class Row:
    """One line of docs/benchmarks.md."""

    name: str
    what: str
    value: float
    unit: str
    low: float
    high: float
    budget: float | None = None
    kind: Literal["at_most", "at_least"] | None = None

    @property
    def holds(self) -> bool:
        """Whether the value keeps its budget; NaN keeps none."""
        if self.budget is None:
            return True
        return self.value <= self.budget if self.kind == "at_most" else self.value >= self.budget


def ratio_row(name: str, what: str, values: Sequence[float], at_most: float | None = None) -> Row:
    """The median of ratios that were measured in pairs, with the 95 % interval of that median."""
    low, high = interval_of_median(values)
    return Row(name, what, statistics.median(values), "x", low, high, at_most, at_most and "at_most")


def interval_of_median(values: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """95 % of the medians of samples drawn from the sample, with replacement."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")


def take_json(words: Sequence[str]) -> tuple[list[str], Path | None]:
    """Return the command line without ``--json FILE``, and the file."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_json(parser)
    known, rest = parser.parse_known_args(words)
    return rest, known.json


def finish(rows: Sequence[Row], file: Path | None) -> int:
    """Write the rows where they are wanted, name broken budgets, and return the exit code."""
    if file is not None:
        file.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    broken = [row for row in rows if not row.holds]
    for row in broken:
        print(f"BROKEN: {row.name}: {row.value:.3g} {row.unit}, {str(row.kind).replace('_', ' ')} {row.budget:g}")
    return int(bool(broken))
