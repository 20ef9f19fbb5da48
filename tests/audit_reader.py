"""Reads samples.jsonl as a user would: which samples made the present weights, and whether any trained twice."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.errors import DataError
from megarl.run.samples import Key


def read_used(path: Path) -> dict[int, list[Key]]:
    """The samples by step, without undone steps; DataError for a broken line that no resumption undoes."""
    steps: dict[int, list[Key]] = {}
    torn = ""
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            record = json.loads(line)
        except ValueError:
            torn = f"{path}:{number}"
            continue
        if "resumed_after" in record:
            steps = {step: keys for step, keys in steps.items() if step <= record["resumed_after"]}
            torn = ""
        else:
            if torn:
                raise DataError(f"{torn}: broken record, and no resumption after it")
            if record["step"] in steps:
                raise DataError(f"{path}:{number}: step {record['step']} has trained twice without a resumption")
            prompts = record["prompts"].items()
            steps[record["step"]] = [(int(prompt), sample) for prompt, samples in prompts for sample in samples]
    return steps


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
