"""The checks of a run's health: what each one reads of a step, and what its verdict says.

They are data in ``megarl/watch/limits.toml``, beside their default limits; here is how they read a step.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from megarl.config.tables import health

Step = Mapping[str, float]
"""Metrics of a step: those of its own record, and means over its mini-batches; of gradient norms, the largest."""

SOLVED = 0.9
"""From this pass rate on, few prompts with contrast and a low entropy are what success looks like."""


def largest(values: Collection[float]) -> float:
    """Return the largest value, or one that is not finite."""
    return next((value for value in values if not math.isfinite(value)), max(values))


def _largest(step: Step) -> float:
    return largest(step.values())


def _smallest(step: Step) -> float:
    return -largest([-value for value in step.values()])


def _total(step: Step) -> float:
    return sum(step.values())


def _are_zero(step: Step, fewest: int = 3) -> float | None:
    """Return 1 if every value is 0, else 0; a mean reward of 0 alone may be one of rewards that cancel out."""
    if len(step) < fewest:
        return None
    return next((value for value in step.values() if not math.isfinite(value)), float(not any(step.values())))


def _contrast(step: Step, solved: bool = False) -> float | None:
    """Return the share of prompts with contrast, if the step is (not) ``solved``; None if no prompt can have any."""
    rate, mean = step.get("reward/pass_rate", 0.0), step.get("reward/mean", math.nan)
    share = step.get("prompts/effective_ratio")
    is_single = step.get("sampling/samples_per_prompt", math.inf) <= 1
    is_zero = not (rate or mean or share)  # which is a check of its own
    return None if is_single or is_zero or solved != (rate >= SOLVED) else share


def _unsolved_entropy(step: Step) -> float | None:
    return None if step.get("reward/pass_rate", 0.0) >= SOLVED else step.get("rollout/entropy")


def _flip(step: Step) -> float:
    """Under r3 the experts in use agree by construction; the routers' own choice does not."""
    return step.get("router/native/flip", step.get("router/flip", math.nan))


def _missing_rows(step: Step) -> float | None:
    """Return the share beyond one token for each response: no engine processes the last one."""
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
    """A check. Its limits are those of the same name in [health]."""

    name: str
    metrics: tuple[str, ...]
    """What it reads; a step without any of them says nothing."""
    subject: str
    """What it looks at, in the words of a verdict."""
    cause: str
    advice: str
    read: Callable[[Step], float | None] = _largest
    """Gets those of its metrics that a step has; returns None if they say nothing."""
    form: str = "{:.1%}"
    against: Literal["limits", "start", "calm", "spikes", "best", "streak"] = "limits"
    """What is compared with the limits.

    - limits: the value itself;
    - start: the value over its median in the first steps;
    - calm, spikes: the value over its median in recent steps within the limits; of spikes, one step is enough;
    - best: the mean of the latest steps over the best such mean, if noise does not explain the difference;
    - streak: the number of steps in a row in which the value is not 0.
    """
    floor: float = 0.0
    """The smallest median that counts."""
    names_failure: bool = False
    """Whether its verdict says how many responses are judged, and why the first of the others is not."""

    def look(self, step: Step) -> tuple[Step, float | None]:
        """Return those of its metrics that a step has, and what they say; None for nothing."""
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
"""Keys of a check that the configuration reads."""


def _make_check(name: str, table: Mapping[str, Any]) -> Check:
    fields = {key: value for key, value in table.items() if key not in _OF_LIMITS}
    fields |= {"metrics": tuple(table["metrics"]), "read": _READS[table.get("read", "largest")]}
    return Check(name, **fields)


CHECKS = tuple(_make_check(name, table) for name, table in health.CHECKS.items())
"""In the order of the table in docs/health.md."""

METRICS = frozenset(name for check in CHECKS for name in check.metrics)
