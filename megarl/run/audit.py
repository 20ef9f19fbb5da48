"""samples.jsonl: the samples of each step, written before the step counts as done. Nothing is removed.

    {"step": 7, "weights": 6, "prompts": {"96": [0, 1, 2, 3], ...}}   step 7 trained on these samples
    {..., "dropped": {"96/3": "k3 0.92, ..."}}                        a tripwire dropped sample 3: it did not train
    {"resumed_after": 5, "time": "2026-01-31 12:00:00"}               steps after 5 were undone, their weights are gone

A prompt is named by the place in the run's order. No two draws share a place: (prompt, sample) names a single response.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

Key = tuple[int, int]
"""(place of the prompt, sample)."""


class Audit:
    """Appends to the file, on one rank only. A line is on the disk when a method returns."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "samples.jsonl"

    def record_step(
        self, step: int, weights: int, keys: np.ndarray | Sequence[Key], dropped: Mapping[Key, str]
    ) -> None:
        """Record the samples of step ``step`` (from 1), int64 [n, 2].

        weights: the steps that the sampling weights had seen. dropped: why a tripwire dropped some of the samples.
        """
        prompts: dict[str, list[int]] = {}
        for prompt, sample in sorted(map(tuple, np.asarray(keys, np.int64).reshape(-1, 2).tolist())):
            if (prompt, sample) not in dropped:
                prompts.setdefault(str(prompt), []).append(sample)
        reasons = {f"{prompt}/{sample}": reason for (prompt, sample), reason in sorted(dropped.items())}
        self._append(
            {"step": step, "weights": weights, "prompts": prompts, **({"dropped": reasons} if reasons else {})}
        )

    def record_resume(self, done: int) -> None:
        """Record that the run continues from a checkpoint after step ``done``."""
        self._append({"resumed_after": done, "time": time.strftime("%Y-%m-%d %H:%M:%S")})

    def _append(self, line: dict[str, object]) -> None:
        with self.path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    file.write(b"\n")  # a kill has cut the line before
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
