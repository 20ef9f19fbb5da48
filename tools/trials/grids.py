"""The cells of all grids, from grids.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
ARMS: dict[str, dict[str, Any]] = TABLES["arms"]
SETTING: dict[str, Any] = TABLES["setting"]
AXES = ("gap", "updates", "lr", "budget", "cold_start")


@dataclass(frozen=True, slots=True)
class Cell:
    """What all seeds of a cell share."""

    arm: str
    replay: str
    gap: str
    updates: int
    """Optimizer steps per global step, N; each takes 16 responses, so that a global step samples 16 N."""
    lr: float
    budget: int
    """Optimizer steps of the run."""
    cold_start: int
    """Supervised steps before."""

    @property
    def steps(self) -> int:
        """Global steps."""
        return self.budget // self.updates

    @property
    def name(self) -> str:
        """A name that no other cell has; settings that all cells share are left out."""
        usual = [f"{axis}={getattr(self, axis):g}" for axis in AXES[2:] if getattr(self, axis) != SETTING[axis]]
        return ".".join([self.arm, self.replay, self.gap, f"n{self.updates}", *usual])

    @property
    def overrides(self) -> dict[str, Any]:
        """The parts of MiniRL that the arm replaces."""
        return {key: value for key, value in ARMS[self.arm].items() if key != "label"}


def make_cell(arm: str, replay: str, **axes: Any) -> Cell:
    """Return a cell; axes: those that differ from the usual setting."""
    return Cell(arm, replay, **{axis: SETTING[axis] for axis in AXES} | axes)


def cells_of(grid: str) -> Iterator[tuple[Cell, range]]:
    """The cells of a grid, and their seeds."""
    for block in TABLES["grids"][grid]:
        values = [block.get(axis, SETTING[axis]) for axis in AXES]
        axes = [value if isinstance(value, list) else [value] for value in values]
        first, seeds = block.get("first_seed", SETTING["first_seed"]), block.get("seeds", SETTING["seeds"])
        for arm, replay, gap, *others in product(block["arms"], block["replays"], *axes):
            yield Cell(arm, replay, gap, *others), range(first, first + seeds)


def runs_of(grids: list[str]) -> list[tuple[Cell, int]]:
    """Every run (cell, seed) of the grids once: the first seed of all cells, then the second, and so on."""
    runs = {(cell, seed): None for grid in grids for cell, seeds in cells_of(grid) for seed in seeds}
    return sorted(runs, key=lambda run: run[1])
