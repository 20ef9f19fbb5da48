"""The scores of an evaluation: avg@k, pass@k and their confidence intervals, from its rewards.

A response is correct if its reward is above ``reward.threshold``. A response without a reward, because the reward
function or the environment failed, does not count: its prompt counts with the samples that are left, and not at all
where they are too few.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.core.choices.stopping import POSITIVE
from megarl.core.sampling.pass_at_k import Interval, fixed_prompts_interval, mean_interval, pass_at_k, wilson_interval
from megarl.errors import printable
from megarl.text_table import text_table

LEVEL = 0.95
"""Confidence of all intervals."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one benchmark: P prompts, S samples each."""

    rewards: np.ndarray
    """float64 [P, S]; NaN without a reward."""
    lengths: np.ndarray
    """int64 [P, S], tokens of the response."""
    truncated: np.ndarray
    """bool [P, S], cut off at the length limit."""
    threshold: float = POSITIVE
    """A larger reward is a correct response."""

    @property
    def num_valid(self) -> np.ndarray:
        """int64 [P], samples with a reward."""
        return np.isfinite(self.rewards).sum(axis=1)

    @property
    def num_correct(self) -> np.ndarray:
        """int64 [P], correct samples."""
        return (np.nan_to_num(self.rewards, nan=0.0) > self.threshold).sum(axis=1)


def score(samples: Samples, ks: Sequence[int]) -> dict[str, Any]:
    """Return all scores of a benchmark as plain numbers; None where there is nothing to compute."""
    n, c = samples.num_valid, samples.num_correct
    judged = n > 0
    errors = int(samples.rewards.size - n.sum())
    rate = _average(c[judged] / n[judged], is_binary=bool((n[judged] == 1).all()), left_out=int((~judged).sum()))
    repeated = bool(judged.any() and (n[judged] > 1).all())
    fixed = fixed_prompts_interval(n[judged], c[judged], LEVEL) if repeated else None
    return {
        "prompts": int(n.size),
        "samples": int(samples.rewards.shape[1]),
        "avg": {**rate, "other_samples": _clip(fixed)},
        "pass": {str(k): _score_pass(n, c, k) for k in ks},
        "reward_mean": float(np.nanmean(samples.rewards)) if judged.any() else None,
        "reward_errors": errors,
        "length_mean": float(samples.lengths.mean()),
        "truncated": float(samples.truncated.mean()),
    }


def score_prompts(samples: Samples) -> list[dict[str, Any]]:
    """Return for each prompt its samples and its pass rate, with Wilson's interval."""
    rows = []
    for valid, correct in zip(samples.num_valid.tolist(), samples.num_correct.tolist(), strict=True):
        interval = wilson_interval(correct, valid, LEVEL) if valid else None
        rate = correct / valid if valid else None
        rows.append({"valid": valid, "correct": correct, "pass_rate": rate, "other_samples": _clip(interval)})
    return rows


def _score_pass(n: np.ndarray, c: np.ndarray, k: int) -> dict[str, Any]:
    enough = n >= k
    values = pass_at_k(n[enough], c[enough], k)
    return _average(values, is_binary=bool((n[enough] == k).all()), left_out=int((~enough).sum()))


def _average(values: np.ndarray, *, is_binary: bool, left_out: int) -> dict[str, Any]:
    interval: Interval | None = None
    # Each value is one draw of 0 or 1: the normal interval would have no width where all prompts agree.
    if is_binary and values.size:
        interval = wilson_interval(int(values.sum()), values.size, LEVEL)
    elif values.size > 1:
        interval = mean_interval(values, LEVEL)
    return {
        "value": float(values.mean()) if values.size else None,
        "other_prompts": _clip(interval),
        "prompts": int(values.size),
        "left_out": left_out,
    }


def _clip(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [max(interval.low, 0.0), min(interval.high, 1.0)]


def to_text(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table with one row per score of each benchmark, and the remarks below."""
    headings = ("benchmark", "score", "value", "95 %, other prompts", "95 %, other samples", "prompts")
    rows: list[Sequence[str]] = []
    for name, result in results.items():
        found = result["figures"]
        for index, (label, entry) in enumerate(_label(found).items()):
            value = "-" if entry["value"] is None else f"{entry['value']:.1%}"
            shown = value, _range(entry["other_prompts"]), _range(entry.get("other_samples"))
            rows.append(("" if index else name, label, *shown, str(entry["prompts"])))
        rows.append(("", "length", f"{found['length_mean']:.1f}", "", "", ""))
        rows.append(("", "truncated", f"{found['truncated']:.1%}", "", "", ""))
        rows.append(())
    remarks = [
        printable(f"{name}: {line}")
        for name, result in results.items()
        for line in _remarks(result["figures"], result["first_error"])
    ]
    return "\n".join([text_table(rows, headings, words=2), *remarks])


def _label(found: Mapping[str, Any]) -> dict[str, Any]:
    return {f"avg@{found['samples']}": found["avg"]} | {f"pass@{k}": entry for k, entry in found["pass"].items()}


def _remarks(found: Mapping[str, Any], first_error: str | None) -> list[str]:
    """Return what the table does not say: rewards that failed, and the prompts that a score leaves out for it."""
    lines = []
    if found["reward_errors"]:
        total = found["prompts"] * found["samples"]
        lines.append(
            f"{found['reward_errors']} of {total} responses have no reward, and count only in length and "
            f"truncated above; first: {first_error}"
        )
    short = [f"{entry['left_out']} from {name}" for name, entry in _label(found).items() if entry["left_out"]]
    if short:
        lines.append(f"prompts left out because too few of their samples have a reward: {', '.join(short)}")
    return lines


def _range(ends: Sequence[float] | None) -> str:
    return "" if ends is None else f"{ends[0]:.1%} to {ends[1]:.1%}"
