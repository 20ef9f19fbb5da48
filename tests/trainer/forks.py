"""Runs jobs on forked gloo ranks: one import of the heavy packages for all of them, each job in processes of its own.

A job may be killed, or kill itself; its exit codes say how every rank ended, a negative one by which signal. A rank
that is killed takes the others with it at once, as torchrun does; one that raises lets them speak first.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import preloaded


@dataclass(frozen=True)
class Job:
    """``function(**arguments)`` on every one of ``world_size`` ranks, as if started by torchrun."""

    name: str
    world_size: int
    function: str
    """``module:function``, the module in this folder or installed."""
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    exit_codes: tuple[int, ...]
    """By rank; 1 if it raised, -9 if it was killed."""
    value: Any
    """What rank 0 returned; None if it did not."""
    output: str
    """Tracebacks and prints of all ranks."""

    def checked(self) -> Any:
        assert not any(self.exit_codes), self.output
        return self.value


def run_jobs(jobs: Sequence[Job], folder: Path) -> dict[str, Ended]:
    """Run the jobs one after the other; their outcomes by name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.pkl").write_bytes(pickle.dumps(list(jobs)))
    log = folder / "worker.txt"
    preloaded.launch("fork_worker", folder, log)
    assert (folder / "codes.pkl").is_file(), log.read_text()[-3000:]
    codes = pickle.loads((folder / "codes.pkl").read_bytes())
    return {job.name: _ended(folder, index, codes[index]) for index, job in enumerate(jobs)}


def _ended(folder: Path, index: int, codes: tuple[int, ...]) -> Ended:
    result = folder / f"job{index}.pkl"
    value = pickle.loads(result.read_bytes()) if result.is_file() else None
    return Ended(codes, value, (folder / f"job{index}.txt").read_text()[-6000:])
