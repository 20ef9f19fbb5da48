"""samples.jsonl: which samples trained in which step, written before the step counts as done; nothing is removed.

    {"step": 7, "weights": 6, "prompts": {"96": [0, 1, 2, 3], ...}}   step 7 trained on these samples
    {..., "dropped": {"96/3": "k3 0.92, ..."}}                        a tripwire dropped this one: it did not train
    {"resumed_after": 5, "time": "2026-01-31 12:00:00"}               steps after 5 were undone, their weights are gone
    {"accepted_inputs": ["data.train:0a1b2c3d4e5f"], "time": ...}     the run goes on with other inputs

A prompt is named by its place in the run's order of prompts. No two draws share a place, so (prompt, sample) names one
response. ``read_used`` replays the file; ``check`` finds steps that are missing and samples that were used twice.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from megarl.errors import DataError
from megarl.files.foreign_files import MOST_JSON_BYTES
from megarl.files.foreign_json import parse_json

Key = tuple[int, int]
"""(place of the prompt, sample)."""


class Audit:
    """Appends to the file; on one rank only. A line is on the disk when ``record_step`` returns."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "samples.jsonl"

    def record_step(
        self, step: int, weights: int, keys: np.ndarray | Sequence[Key], dropped: Mapping[Key, str]
    ) -> None:
        """Step ``step`` (from 1) has trained on these samples, drawn with the weights of so many steps.

        keys: int64 [n, 2]. dropped: those of the samples that a tripwire has dropped, with the reason.
        """
        rows = np.asarray(keys, np.int64).reshape(-1, 2)
        if dropped:
            rows = rows[[key not in dropped for key in map(tuple, rows.tolist())]]
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        numbers, begins = (column.tolist() for column in np.unique(rows[:, 0], return_index=True))
        samples, ends = rows[:, 1].tolist(), [*begins[1:], len(rows)][: len(begins)]
        prompts = {str(number): samples[a:b] for number, a, b in zip(numbers, begins, ends, strict=True)}
        reasons = {f"{prompt}/{sample}": why for (prompt, sample), why in sorted(dropped.items())}
        told = {"dropped": reasons} if reasons else {}
        self._append({"step": step, "weights": weights, "prompts": prompts, **told})

    def record_resume(self, done: int) -> None:
        """The run continues from a checkpoint after step ``done``."""
        self._append({"resumed_after": done, "time": time.strftime("%Y-%m-%d %H:%M:%S")})

    def record_inputs(self, accepted: Sequence[str]) -> None:
        """The run goes on with other inputs than it began with, "NAME:DIGEST" each, because its user accepts them."""
        self._append({"accepted_inputs": list(accepted), "time": time.strftime("%Y-%m-%d %H:%M:%S")})

    def _append(self, line: dict[str, object]) -> None:
        with self.path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    file.write(b"\n")  # a kill has cut the line before
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def read_used(path: Path) -> dict[int, list[Key]]:
    """The samples that have trained the present weights, by step; steps that a resumption has undone are left out.

    DataError for a line that is no record; a line that a kill has cut is skipped if a resumption has undone it.
    """
    steps: dict[int, list[Key]] = {}
    torn: str | None = None
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            record = parse_json(line, "it", MOST_JSON_BYTES)
        except DataError:
            torn = f"{path}:{number}"
            continue
        if not _is_record(record):
            raise DataError(f"{path}:{number}: found {record!r:.80}, expected a step, a resumption or inputs")
        if "resumed_after" in record:
            steps = {step: keys for step, keys in steps.items() if step <= record["resumed_after"]}
            torn = None
            continue
        if "accepted_inputs" in record:
            continue
        if torn is not None:
            raise DataError(f"{torn}: broken record, and no resumption after it")
        if record["step"] in steps:
            raise DataError(f"{path}:{number}: step {record['step']} has trained twice without a resumption")
        keys = [(int(prompt), sample) for prompt, samples in record["prompts"].items() for sample in samples]
        steps[record["step"]] = keys
    return steps


def _is_record(record: object) -> bool:
    if not isinstance(record, dict):
        return False
    if "resumed_after" in record:
        return type(record["resumed_after"]) is int
    if "accepted_inputs" in record:
        return True
    prompts = record.get("prompts")
    return (
        type(record.get("step")) is int
        and isinstance(prompts, dict)
        and all(number.isdecimal() and len(number) < 20 for number in prompts)
        and all(isinstance(each, list) and all(type(sample) is int for sample in each) for each in prompts.values())
    )


def check(path: Path, steps: int) -> int:
    """Number of samples that trained in steps 1..``steps``; DataError if a step is missing or one trained twice."""
    found = read_used(path)
    missing = [step for step in range(1, steps + 1) if step not in found]
    if missing:
        raise DataError(f"{path}: no record of steps {missing[:5]}")
    seen: dict[Key, int] = {}
    for step, keys in found.items():
        for key in keys:
            if key in seen:
                raise DataError(f"{path}: prompt {key[0]}, sample {key[1]} has trained in steps {seen[key]} and {step}")
            seen[key] = step
    return len(seen)
