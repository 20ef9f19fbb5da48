"""``megarl samples``, and the samples in a report: the model's texts."""

import json
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config.command import Overrides, Positional, command
from megarl.errors import ConfigError, DataError, printable, refusal
from megarl.run.samples import NAME, read_samples

_PAGE_SAMPLES = 400
"""Most samples in a page, of each run: the newest."""
_PAGE_TEXT = 20_000
"""Most characters of one text in a page; of a longer one, the middle is left out."""


@command
class Samples:
    """Print prompts, responses and rewards that a run has stored, by default of its newest step: docs/report.md."""

    run_dir: Positional[Path]
    """The folder of the run."""
    step: int | None = None
    """Only this step's, from 1."""
    json: bool = False
    """Print one JSON object per response, as stored."""

    def run(self, overrides: Overrides) -> None:
        """DataError if the run has stored no samples; ConfigError if nothing matches."""
        file = self.run_dir / NAME
        if not self.run_dir.is_dir():
            raise ConfigError(f"{self.run_dir}: there is no such folder; expected the folder of a run")
        if not file.is_file():
            raise DataError(refusal("no_samples", file=file))
        matching: list[dict[str, Any]] = []
        total, first, last = 0, None, 0
        for sample in read_samples(self.run_dir):
            total, first, last = total + 1, first or sample["step"], sample["step"]
            if self.step is None and matching and matching[0]["step"] != last:
                matching = []
            if self.step in (None, last):
                matching.append(sample)
        stored = f"{total} responses of steps {first} to {last}" if total else "none"
        if not matching:
            raise ConfigError(f"{file}: no response matches, of {stored}")
        print(*map(json.dumps if self.json else describe, matching), sep="\n" if self.json else "\n\n")
        if not self.json:
            print(f"\nshown: {len(matching)} of {stored}; --step N shows another step")


def describe(sample: Mapping[str, Any]) -> str:
    """Return a response as text for a terminal, without control characters."""
    rewards = [f", {name} {value:.4g}" for name, value in sample["rewards"].items()]
    head = [
        f"step {sample['step']}  prompt {sample['group']}  response {sample['sample']}",
        f"reward {_number(sample['reward'])}{''.join(rewards)}",
        f"{sample['length']} tokens  gap {_number(sample['gap'])}  {sample['tool_calls']} tool calls",
        *flags(sample),
    ]
    parts = sample["parts"] or [["model", sample["response"]]]
    texts = [("prompt", sample["prompt"]), *(("response" if role == "model" else role, text) for role, text in parts)]
    texts += [("expected", sample["expected"])] if sample["expected"] is not None else []
    lines = [f"  {name}:\n    " + text.replace("\n", "\n    ") for name, text in texts]
    error = [f"  error: {sample['error']}"] if sample["error"] else []
    return printable("\n".join(["--- " + "  ".join(head), *lines, *error]))


def flags(sample: Mapping[str, Any]) -> list[str]:
    """Return the exceptions of a sample."""
    texts = {"cut off": sample["finish"] == "length", "no reward": sample["reward"] is None}
    texts |= {f"dropped: {sample['dropped']}": sample["dropped"]}
    texts |= {"not trained": not (sample["trained"] or sample["dropped"])}
    return [text for text, holds in texts.items() if holds]


def for_page(run_dir: Path, name: str = "") -> tuple[list[dict[str, Any]], str]:
    """Return the newest samples of a run for a page, and a sentence about omitted samples.

    Of a damaged file, the part before the damage.
    """
    page = deque[dict[str, Any]](maxlen=_PAGE_SAMPLES)
    total, damage, run = 0, "", name or "The run"
    try:
        for sample in read_samples(run_dir):  # in the order of the steps: the oldest go
            total += 1
            page.append(_for_page(sample, name))
    except DataError as error:
        damage = f" What follows cannot be read: {printable(str(error))}."
    if not page:
        return [], f"{run} has stored no samples{damage and ' that can be read'} (log.samples_per_step).{damage}"
    steps = f"of steps {page[0]['step']} to {page[-1]['step']}"
    rest_text = f"; {total - len(page)} older ones are left out, megarl samples shows them" if total > len(page) else ""
    return [*page], f"{run}: {len(page)} stored responses {steps}{rest_text}.{damage}"


def _for_page(sample: Mapping[str, Any], name: str) -> dict[str, Any]:
    keys = ("step", "group", "sample", "reward", "length", "gap", "finish", "tool_calls")
    rewards = ", ".join(f"{name_of_reward} {value:.4g}" for name_of_reward, value in sample["rewards"].items())
    response = "\n".join(f"[{author}]\n{text}" for author, text in sample["parts"]) or sample["response"]
    texts = {"prompt": sample["prompt"], "response": response, "expected": sample["expected"] or ""}
    texts |= {"error": sample["error"] or "", "rewards": rewards}
    shown = {key: _shorten(printable(text)) for key, text in texts.items()}
    return {key: sample[key] for key in keys} | shown | {"run": name, "flags": [*map(printable, flags(sample))]}


def _shorten(text: str) -> str:
    half = _PAGE_TEXT // 2
    return text if len(text) <= _PAGE_TEXT else f"{text[:half]}\n[{len(text) - 2 * half} characters]\n{text[-half:]}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
