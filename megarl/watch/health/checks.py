"""The checks of a run's health: inputs of each check, and the words of a verdict.

The checks are data in ``megarl/watch/limits.toml``, beside the default limits. This module reads the steps.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from megarl.config.tables import health

Step = Mapping[str, float]
"""Metrics of a step: metrics of the step's record, and means over the mini-batches; of gradient norms, the largest."""

SOLVED = 0.9
"""From this pass rate on, success looks like few prompts with contrast and a low entropy."""


def largest(values: Collection[float]) -> float:
    """Return the largest value, or a value that is not finite."""
    return next((value for value in values if not math.isfinite(value)), max(values))


def _largest(step: Step) -> float:
    return largest(step.values())


def _smallest(step: Step) -> float:
    return -largest([-value for value in step.values()])


def _total(step: Step) -> float:
    return sum(step.values())


def _are_zero(step: Step, fewest: int = 3) -> float | None:
    """Return 1 if every value is 0, else 0; a mean reward of 0 may come from rewards that cancel out."""
    if len(step) < fewest:
        return None
    return next((value for value in step.values() if not math.isfinite(value)), float(not any(step.values())))


def _contrast(step: Step, solved: bool = False) -> float | None:
    """Return the share of prompts with contrast, if the step is (not) ``solved``; None if contrast is impossible."""
    rate, mean = step.get("reward/pass_rate", 0.0), step.get("reward/mean", math.nan)
    share = step.get("prompts/effective_ratio")
    is_single = step.get("sampling/samples_per_prompt", math.inf) <= 1
    is_zero = not (rate or mean or share)  # a separate check
    return None if is_single or is_zero or solved != (rate >= SOLVED) else share


def _unsolved_entropy(step: Step) -> float | None:
    return None if step.get("reward/pass_rate", 0.0) >= SOLVED else step.get("rollout/entropy")


def _flip(step: Step) -> float:
    """Under r3 the experts in use agree by construction; the routers' own choice does not."""
    return step.get("router/native/flip", step.get("router/flip", math.nan))


def _missing_rows(step: Step) -> float | None:
    """Return the share beyond a token per response: no engine processes the last token."""
    if (share := step.get("rollout/missing_rows_fraction")) is None or not math.isfinite(share):
        return share
    tokens = step.get("sampling/tokens", 0.0)
    return max(0.0, share - (step.get("sampling/samples", 0.0) / tokens if tokens > 0 else 0.0))


def _idle(step: Step) -> float | None:
    whole = step.get("time/step_s", 0.0)
    if "time/train_s" not in step or whole <= 0:
        return None
    return 1.0 - sum(value for name, value in step.items() if name != "time/step_s") / whole


@dataclass(frozen=True, slots=True)
class Check:
    """A check. The limits are the key of the same name in [health]."""

    name: str
    metrics: tuple[str, ...]
    """What it reads; a step without these metrics is not judged."""
    subject: str
    """The subject of a verdict."""
    cause: str
    advice: str
    read: Callable[[Step], float | None] = _largest
    """Gets the check's metrics of a step; returns None to skip the step."""
    form: str = "{:.1%}"
    against: Literal["limits", "start", "calm", "spikes", "best", "streak"] = "limits"
    """The value compared with the limits.

    - limits: the value itself;
    - start: the value over its median in the first steps;
    - calm, spikes: the value over its median in recent steps within the limits; for spikes, a single step is enough;
    - best: the mean of the latest steps over the best such mean, if noise does not explain the difference;
    - streak: the number of steps in a row with a value other than 0.
    """
    floor: float = 0.0
    """The smallest median used."""
    names_failure: bool = False
    """True: the verdict counts the judged responses, and names the first failure."""

    def look(self, step: Step) -> tuple[Step, float | None]:
        """Return the check's metrics of a step, and the value; None to skip the step."""
        metrics = {name: step[name] for name in self.metrics if name in step}
        return metrics, self.read(metrics) if metrics else None

    @property
    def score_form(self) -> str:
        """How a limit is written."""
        return {"limits": self.form, "streak": "{:.0f} steps"}.get(self.against, "{:.3g} x")


_READS: dict[str, Callable[[Step], float | None]] = {
    "largest": _largest,
    "smallest": _smallest,
    "total": _total,
    "zero": _are_zero,
    "zero_gradient": partial(_are_zero, fewest=1),
    "contrast": _contrast,
    "solved_contrast": partial(_contrast, solved=True),
    "unsolved_entropy": _unsolved_entropy,
    "flip": _flip,
    "missing_rows": _missing_rows,
    "idle": _idle,
}
_OF_LIMITS = ("limits", "meaning", "falls")
"""Keys of a check for the configuration."""


def _make_check(name: str, table: Mapping[str, Any]) -> Check:
    fields = {key: value for key, value in table.items() if key not in _OF_LIMITS}
    fields |= {"metrics": tuple(table["metrics"]), "read": _READS[table.get("read", "largest")]}
    return Check(name, **fields)


CHECKS = tuple(_make_check(name, table) for name, table in health.CHECKS.items())
"""In the order of the table in docs/health.md."""

METRICS = frozenset(name for check in CHECKS for name in check.metrics)
