"""What a reward function may return, and what becomes of it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class StepReward:
    """The reward of one step of a response."""

    end: int
    """Characters of the response up to the end of the step, exclusive: 1..len(response)."""
    reward: float


@dataclass(frozen=True, slots=True)
class Steps:
    """What a process reward returns instead of a number."""

    outcome: float
    """The reward of the whole response: sampling rules, pass rates and metrics use this one."""
    steps: Sequence[StepReward]
    """At least one, their ends ascending."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One response, judged."""

    reward: float | None
    """None: the reward function failed."""
    steps: tuple[StepReward, ...] = ()
    """Empty unless the reward function returned Steps."""
    error: str | None = None
    """One line: an exception, a return value that is no reward, a time-out, a worker that died."""
    timed_out: bool = False
    """The call was stopped, or gave up, because it took too long."""


def verdict_of(returned: object, response: str) -> Verdict:
    """The verdict of what a reward function returned; ValueError or TypeError if that is no reward."""
    if not isinstance(returned, Steps):
        return Verdict(_finite(returned, "the reward function returned"))
    outcome = _finite(returned.outcome, "the outcome of the steps is")
    steps: list[StepReward] = []
    previous = 0
    for index, step in enumerate(returned.steps):
        if not isinstance(step, StepReward):
            raise TypeError(f"step {index} is {step!r:.80} ({type(step).__name__}), expected a StepReward")
        reward = _finite(step.reward, f"the reward of step {index} is")
        if isinstance(step.end, bool) or not isinstance(step.end, numbers.Integral):
            raise TypeError(f"step {index} ends at {step.end!r:.80}, expected a number of characters")
        end = int(step.end)
        if not previous < end <= len(response):
            raise ValueError(
                f"step {index} ends at character {end}, expected {previous + 1}..{len(response)}: "
                f"ends ascend and lie within the response"
            )
        steps.append(StepReward(end, reward))
        previous = end
    if not steps:
        raise ValueError("the reward function returned Steps without a step: return a number instead")
    return Verdict(outcome, tuple(steps))


def failure(error: BaseException) -> Verdict:
    """The verdict where the reward function raised."""
    return Verdict(None, error=one_line(error), timed_out=isinstance(error, TimeoutError))


def one_line(error: BaseException) -> str:
    """Type and message of an error, at most 300 characters."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # a foreign exception may fail to print itself
        text = type(error).__name__
    return " ".join(text.split())[:300]


def _finite(value: object, what: str) -> float:
    if not isinstance(value, (numbers.Real, np.bool_)):
        raise TypeError(f"{what} {value!r:.80} ({type(value).__name__}), expected a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} {number}, expected a finite number")
    return number
