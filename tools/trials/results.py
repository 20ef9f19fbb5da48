"""All stored outcomes, by cell."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megarl.files.writing import write_atomically
from trials.grids import TABLES, Cell, make_cell
from trials.intervals import Difference, bound_share, compare_pairs
from trials.outcomes import Outcome, from_line, to_line

CALIBRATION: int = TABLES["grids"]["calibration"][0]["first_seed"]
"""First seed of the grid of that name."""
Runs = dict[int, Outcome]
"""Seed -> outcome."""


class NotRunError(ValueError):
    """Too few seeds of a cell have run."""


class Results:
    """The outcomes of many runs."""

    def __init__(self, outcomes: Iterable[Outcome]) -> None:
        self._cells: dict[Cell, Runs] = {}
        for outcome in sorted(outcomes, key=lambda outcome: outcome.seed):
            self._cells.setdefault(outcome.cell, {})[outcome.seed] = outcome

    def runs(self, arm: str, replay: str, *, calibrates: bool = False, **axes: Any) -> Runs:
        """The runs of a cell; axes: those that differ from the usual setting. Empty if none has run.

        calibrates: the seeds of the calibration, in place of all others.
        """
        runs = self._cells.get(make_cell(arm, replay, **axes), {})
        return {seed: run for seed, run in runs.items() if (seed >= CALIBRATION) == calibrates}

    def require(self, arm: str, replay: str, seeds: int, **axes: Any) -> Runs:
        """As ``runs``; NotRunError with fewer seeds: a part of a cell is not judged."""
        runs = self.runs(arm, replay, **axes)
        if len(runs) < seeds:
            raise NotRunError(f"{arm} with {replay}: {len(runs)} of {seeds} seeds have run")
        return runs


def compare_runs(first: Runs, second: Runs, value: Callable[[Outcome], float]) -> Difference:
    """Compare a value of the runs of two cells, over the seeds of both: first minus second."""
    seeds = first.keys() & second.keys()
    if not seeds:
        raise NotRunError("two cells have no seed in common")
    return compare_pairs([value(first[seed]) for seed in seeds], [value(second[seed]) for seed in seeds])


def count_collapsed(runs: Runs) -> str:
    """Words: collapsed runs of all, with Wilson's 95 % interval of the share."""
    count = sum(run.has_collapsed for run in runs.values())
    low, high = bound_share(count, len(runs))
    return f"{count} of {len(runs)} [{low:.0%}, {high:.0%}]"


def read_folder(folder: Path) -> Results:
    """Read what ``tools/evidence.py run`` has stored in a folder."""
    return Results(from_line(path.read_text()) for path in (folder / "outcomes").glob("*.seed*.json"))


def read_archive(path: Path) -> Results:
    """Read an archive, as ``write_archive`` writes it."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return Results(from_line(line) for line in lines)


def write_archive(folder: Path, path: Path) -> None:
    """Write the outcomes of a folder into one file; equal outcomes give equal bytes."""
    lines = sorted(to_line(from_line(file.read_text())) + "\n" for file in (folder / "outcomes").glob("*.seed*.json"))
    write_atomically(path, gzip.compress("".join(lines).encode(), mtime=0))
