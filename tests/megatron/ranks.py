"""Runs functions on several gloo ranks: one launch for all the cases that the selected tests of a file ask for.

A test is parametrised with a ``Case`` and reads the ``outcome`` fixture (see conftest.py). The functions live in
``cases_*.py``, are named ``module:function``, and run below ``rank_worker.py``.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import preloaded
import pytest


@dataclass(frozen=True)
class Case:
    """One call of ``function(layout, **arguments)`` on every one of ``world_size`` ranks; its result is rank 0's."""

    world_size: int
    function: str
    """``module:function`` in this folder."""
    layout: tuple[tuple[str, int], ...] = ()
    """Sorted items of the [parallel] table."""
    arguments: tuple[tuple[str, Any], ...] = field(default=())

    def __str__(self) -> str:
        layout = "-".join(f"{name}{size}" for name, size in self.layout) or "single"
        rest = "-".join(f"{value}" for _, value in self.arguments)
        return f"{layout}-{rest}" if rest else layout


def case(world_size: int, function: str, layout: str = "", **arguments: Any) -> Case:
    """A case whose layout is written like ``"tp2 ep2 etp1"``."""
    sizes = tuple(
        (name.rstrip("0123456789"), int(name.lstrip("abcdefghijklmnopqrstuvwxyz"))) for name in layout.split()
    )
    return Case(world_size, function, sizes, tuple(arguments.items()))


def slow(one: Case) -> Any:
    """A case for `make test-all` alone."""
    return pytest.param(one, marks=pytest.mark.slow)


@dataclass(frozen=True)
class Outcome:
    """What rank 0 returned, or the traceback of the first rank that raised."""

    value: Any = None
    error: str | None = None


def launch(cases: Sequence[Case], folder: Path) -> dict[Case, Outcome]:
    """Run every case on its own fresh ranks, one case after the other; ``folder`` keeps log and results."""
    folder.mkdir(parents=True)
    (folder / "plan.pkl").write_bytes(pickle.dumps(list(cases)))
    preloaded.launch("rank_worker", folder, folder / "log.txt")
    return {case: read_outcome(folder, index) for index, case in enumerate(cases)}


def read_outcome(folder: Path, index: int) -> Outcome:
    result, log = folder / f"case{index}.pkl", folder / "log.txt"
    if result.is_file():
        return Outcome(value=pickle.loads(result.read_bytes()))
    told = [f"{path.name}\n{path.read_text()}" for path in sorted(folder.glob(f"case{index}.rank*.error"))]
    return Outcome(error="\n".join(told) or f"a rank ended without a word\n{log.read_text()[-3000:]}")
