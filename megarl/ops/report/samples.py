"""``megarl samples``, and the samples in a report: what the model wrote, searched and sorted."""

import json
from collections.abc import Iterable, Mapping
from heapq import nsmallest
from pathlib import Path
from typing import Any, Literal

from megarl.errors import ConfigError, DataError, printable
from megarl.run.samples import NAME, read_samples

SortKey = Literal["reward", "length", "gap"]
_PAGE_BYTES = 2_000_000
_PAGE_TEXT = 20_000
"""Most characters of one text in a page; of a longer one, the middle is left out."""


def show(
    run_dir: Path, *, step: int | None, sort: SortKey | None, worst: int | None, best: int | None, search: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Print responses of a run, by default those of its newest step.

    worst, best: so many from one end of the order by ``sort``, by default the reward: the best have the highest reward,
    the smallest length or gap. DataError if the run has stored none; ConfigError if nothing matches.
    """
    if worst is not None and best is not None:
        raise ConfigError("megarl samples: found --worst and --best, expected one of them")
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: there is no such folder; expected the folder of a run")
    if not (run_dir / NAME).is_file():
        why = "no step is finished, log.samples_per_step is 0, or this is no run folder"
        raise DataError(f"{run_dir / NAME}: there is no such file: {why}")
    count = worst if worst is not None else best
    is_newest = step is None and search is None and count is None
    found: list[dict[str, Any]] = []
    total, first, last = 0, None, 0
    for one in read_samples(run_dir):
        total, first, last = total + 1, first or one["step"], one["step"]
        if is_newest and found and found[0]["step"] != last:
            found = []
        if is_newest or ((step is None or one["step"] == step) and _matches(one, search)):
            found.append(one)
    if not found:
        held = f"{total} responses of steps {first} to {last}" if total else "none"
        raise ConfigError(f"{run_dir / NAME}: no response matches, of {held}")
    if sort is not None or count is not None:
        found = order(found, sort or "reward", worst is not None, count)
    if as_json:
        print(*map(json.dumps, found), sep="\n")
        return
    for one in found:
        print(describe(one), end="\n\n")
    print(f"{len(found)} of {total} responses, of steps {first} to {last}")


def order(
    samples: Iterable[dict[str, Any]], sort: SortKey, worst: bool, count: int | None = None
) -> list[dict[str, Any]]:
    """Return samples from the best on, or from the worst on; at most ``count``.

    Those without a reward come first among the worst, and other samples without a value last.
    """
    sign = -1 if (sort == "reward") != worst else 1
    is_last = not (worst and sort == "reward")

    def rank(one: Mapping[str, Any]) -> tuple[bool, float]:
        value = one[sort]
        return (value is None) == is_last, 0.0 if value is None else sign * value

    return sorted(samples, key=rank) if count is None else nsmallest(count, samples, key=rank)


def describe(one: Mapping[str, Any]) -> str:
    """Return a response as text for a terminal, without control characters."""
    head = [
        f"step {one['step']}  prompt {one['group']}  response {one['sample']}",
        f"reward {_number(one['reward'])}" + "".join(f", {name} {value:.4g}" for name, value in one["rewards"].items()),
        f"{one['length']} tokens  gap {_number(one['gap'])}  {one['tool_calls']} tool calls",
        *flags(one),
    ]
    parts = one["parts"] or [["model", one["response"]]]
    texts = [("prompt", one["prompt"]), *(("response" if who == "model" else who, text) for who, text in parts)]
    lines = [f"  {name}:\n    " + text.replace("\n", "\n    ") for name, text in texts]
    error = [f"  error: {one['error']}"] if one["error"] else []
    return printable("\n".join(["--- " + "  ".join(head), *lines, *error]))


def flags(one: Mapping[str, Any]) -> list[str]:
    """Return what is out of the ordinary."""
    found = ["cut off"] if one["truncated"] else []
    if one["reward"] is None:
        found.append("no reward")
    if one["dropped"]:
        found.append(f"dropped: {one['dropped']}")
    elif not one["trained"]:
        found.append("not trained")
    return found


def for_page(run_dir: Path, name: str = "") -> tuple[list[dict[str, Any]], str]:
    """Return the newest samples of a run that fit into a page, and a sentence about those that do not.

    Of a damaged file, what stands before the damage.
    """
    kept: list[dict[str, Any]] = []
    size = total = 0
    damage, run = "", name or "The run"
    try:
        for one in read_samples(run_dir):  # in the order of the steps: the oldest go
            total += 1
            kept.append(_for_page(one, name))
            size += _size(kept[-1])
            while size > _PAGE_BYTES:
                size -= _size(kept.pop(0))
    except DataError as error:
        damage = f" What follows cannot be read: {printable(str(error))}."
    if not kept:
        return [], f"{run} has stored no samples{damage and ' that can be read'} (log.samples_per_step).{damage}"
    steps = f"of steps {kept[0]['step']} to {kept[-1]['step']}"
    left = f"; {total - len(kept)} older ones are left out, megarl samples shows them" if total > len(kept) else ""
    return kept, f"{run}: {len(kept)} stored responses {steps}{left}.{damage}"


def _for_page(one: Mapping[str, Any], name: str) -> dict[str, Any]:
    keys = ("step", "group", "sample", "reward", "length", "gap", "finish", "tool_calls")
    rewards = ", ".join(f"{part} {value:.4g}" for part, value in one["rewards"].items())
    response = "\n".join(f"[{who}]\n{text}" for who, text in one["parts"]) or one["response"]
    texts = {"prompt": one["prompt"], "response": response, "error": one["error"] or "", "rewards": rewards}
    shown = {key: _shorten(printable(text)) for key, text in texts.items()}
    return {key: one[key] for key in keys} | shown | {"run": name, "flags": [printable(flag) for flag in flags(one)]}


def _shorten(text: str) -> str:
    half = _PAGE_TEXT // 2
    return text if len(text) <= _PAGE_TEXT else f"{text[:half]}\n[{len(text) - 2 * half} characters]\n{text[-half:]}"


def _size(one: Mapping[str, Any]) -> int:
    return sum(len(one[key]) for key in ("prompt", "response", "error", "rewards")) + 200


def _matches(one: Mapping[str, Any], search: str | None) -> bool:
    return search is None or any(search.lower() in (one[key] or "").lower() for key in ("prompt", "response", "error"))


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
