"""samples.jsonl: the samples of each step, written before the step counts as done. Nothing is removed.

    {"step": 7, "weights": 6, "prompts": {"96": [0, 1, 2, 3], ...}}   step 7 trained on these samples
    {..., "dropped": {"96/3": "k3 0.92, ..."}}                        a tripwire dropped sample 3: it did not train
    {"resumed_after": 5, "time": "2026-01-31 12:00:00"}               steps after 5 were undone, their weights are gone
    {"accepted_inputs": ["data.train:0a1b2c3d4e5f"], "time": ...}     the run goes on with other inputs

A prompt is named by the place in the run's order. No two draws share a place: (prompt, sample) names a single response.
``read_used`` replays the file; ``check`` finds missing steps and samples that were used twice.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megarl.errors import DataError
from megarl.files.foreign_json import MOST_JSON_BYTES, parse_json

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

    def record_inputs(self, accepted: Sequence[str]) -> None:
        """Record differing inputs that the user accepts, as "NAME:DIGEST"."""
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
    """Return the samples of the present weights, by step, without undone steps.

    DataError for a line that is no record. A line that a kill has cut is skipped if a resumption has undone the line.
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
        elif "accepted_inputs" not in record:
            if torn is not None:
                raise DataError(f"{torn}: broken record, and no resumption after it")
            if record["step"] in steps:
                raise DataError(f"{path}:{number}: step {record['step']} has trained twice without a resumption")
            prompts = record["prompts"].items()
            steps[record["step"]] = [(int(prompt), sample) for prompt, samples in prompts for sample in samples]
    return steps


def _is_record(record: Any) -> bool:
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
        and all(isinstance(entry, list) and all(type(sample) is int for sample in entry) for entry in prompts.values())
    )


def check(path: Path, steps: int) -> int:
    """Return the number of samples that trained in steps 1 to ``steps``.

    DataError if a step is missing or a sample trained twice.
    """
    used = read_used(path)
    if missing := [step for step in range(1, steps + 1) if step not in used]:
        raise DataError(f"{path}: no record of steps {missing[:5]}")
    step_of: dict[Key, int] = {}
    for step, keys in used.items():
        for key in keys:
            if key in step_of:
                steps_text = f"steps {step_of[key]} and {step}"
                raise DataError(f"{path}: prompt {key[0]}, sample {key[1]} has trained in {steps_text}")
            step_of[key] = step
    return len(step_of)
