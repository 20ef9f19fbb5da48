"""Reward functions: the protocol, the results, and the built-in functions. ``megarl.data.judge`` calls them.

A reward is a callable ``reward(*, prompt: str, response: str, answer: str)`` that returns a number, ``Steps``, or
several rewards by name (``reward.weights``); higher is better. A reward is called once per response. Built-in rewards
return 1 for a correct and 0 for a wrong response.
"""

import math
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from megarl.errors import describe_call, may_pass, refusal, refuse_if

AnyReward = TypeVar("AnyReward", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class StepReward:
    end: int
    """Characters of the response up to the end of the step, exclusive: 1..len(response)."""
    reward: float


@dataclass(frozen=True, slots=True)
class Steps:
    """Result of a process reward."""

    outcome: float
    """The reward of the whole response, for sampling rules, pass rates and metrics."""
    steps: Sequence[StepReward]
    """At least one, with ascending ends."""


@dataclass(frozen=True, slots=True)
class Verdict:
    reward: float | None
    """None: the reward function failed."""
    steps: tuple[StepReward, ...] = ()
    """Empty unless the reward function returned Steps."""
    components: tuple[float, ...] = ()
    """Several rewards, in the order of ``reward.weights``; empty where the function returned no mapping."""
    error: str | None = None
    """A line about an exception, a return value that is no reward, a time-out, or a dead worker."""
    may_pass: bool = False
    """Whether the cause of a failure lies outside of the function: a server, a time-out, a killed process."""
    timed_out: bool = False
    """Whether the call was stopped, or gave up, because of its time; for functions with limited CPU time: because of
    CPU time or memory, not because of a busy machine."""


def read_verdict(returned: object, response: str, weights: Mapping[str, float] | None = None) -> Verdict:
    """Return the verdict for the return value of a reward function. ValueError or TypeError if it is no reward.

    weights: by name, if the function returns several rewards; the reward is the weighted sum.
    """
    if weights:
        return _weigh(returned, weights)
    if not isinstance(returned, Steps):
        return Verdict(_check_finite(returned, "the reward function returned"))
    outcome = _check_finite(returned.outcome, "the outcome of the steps is")
    steps: list[StepReward] = []
    previous = 0
    for index, step in enumerate(returned.steps):
        if not isinstance(step, StepReward):
            raise TypeError(f"step {index} is {step!r:.80} ({type(step).__name__}), expected a StepReward")
        reward = _check_finite(step.reward, f"the reward of step {index} is")
        if isinstance(step.end, bool) or not isinstance(step.end, numbers.Integral):
            raise TypeError(f"step {index} ends at {step.end!r:.80}, expected a number of characters")
        end = int(step.end)
        if not previous < end <= len(response):
            raise ValueError(refusal("end_of_step", index=index, end=end, least=previous + 1, most=len(response)))
        steps.append(StepReward(end, reward))
        previous = end
    refuse_if(not steps, ValueError, "no_steps")
    return Verdict(outcome, tuple(steps))


def _weigh(returned: object, weights: Mapping[str, float]) -> Verdict:
    """Return the verdict of a function that returns rewards by name."""
    if not isinstance(returned, Mapping):
        raise TypeError(refusal("no_rewards_by_name", returned=returned, kind=type(returned), names=[*weights]))
    refuse_if(set(returned) != set(weights), ValueError, "names_of_rewards", returned=[*returned], weights=[*weights])
    components = tuple(_check_finite(returned[name], f"the reward {name!r} is") for name in weights)
    total = math.fsum(map(operator.mul, weights.values(), components))
    return Verdict(_check_finite(total, "the weighted sum of rewards is"), components=components)


def describe_failure(error: BaseException, function: Callable[..., Any]) -> Verdict:
    """Return the verdict for a reward function that raised an error: type, message, file and place, in a line."""
    return Verdict(None, (), (), describe_call(error, function), may_pass(error), isinstance(error, TimeoutError))


def _check_finite(value: object, label: str) -> float:
    if not isinstance(value, (float, numbers.Real, np.bool_)):  # float first: that check is the fastest
        hint = "; for several rewards by name, set reward.weights" if isinstance(value, Mapping) else ""
        raise TypeError(f"{label} {value!r:.80} ({type(value).__name__}), expected a number{hint}")
    number = float(value)
    refuse_if(not math.isfinite(number), ValueError, "not_a_finite_number", label=label, number=number)
    return number


def instantaneous(reward: AnyReward) -> AnyReward:
    """Mark a reward function that returns at once and cannot crash. A judge needs no worker process for the call."""
    reward.instantaneous = True  # type: ignore[attr-defined]
    return reward


def with_special_tokens(reward: AnyReward) -> AnyReward:
    """Mark a reward function that gets responses with special tokens: the end token, and tags that are tokens."""
    reward.special_tokens = True  # type: ignore[attr-defined]
    return reward


def wrong_if_stopped(check_answer: Callable[[str], object]) -> Callable[[AnyReward], AnyReward]:
    """Mark a reward function whose time and memory depend on the response: at a limit, the response is wrong.

    A judge limits CPU time, which does not depend on the load of the machine, and memory. After a stop the judge calls
    ``check_answer(answer)``. If the check raises or is stopped too, the data is at fault: the response has no reward.
    """

    def mark(reward: AnyReward) -> AnyReward:
        reward.check_answer = check_answer  # type: ignore[attr-defined]
        return reward

    return mark


@instantaneous
def exact_match(*, prompt: str, response: str, answer: str) -> float:
    """Return 1 if response and answer are equal texts, ignoring white space around the texts, else 0."""
    return float(response.strip() == answer.strip())


def _read_strict_answer(answer: str) -> Any:
    from megarl.data.math.grade import read_key  # imports sympy

    return read_key(answer)


@wrong_if_stopped(_read_strict_answer)
def math_strict(*, prompt: str, response: str, answer: str) -> float:
    """Return 1 if the last box of the response equals the answer, and is evaluated as far as the answer, else 0.

    A grammar (``megarl.data.math``) reads the box. A response without a box, or with a box that the grammar cannot
    read, is wrong. ValueError if the answer holds nothing to compare with.
    """
    from megarl.data.math.grade import is_right

    return float(is_right(_read_strict_answer(answer), response))


BUILT_IN_REWARDS: dict[str, Callable[..., float]] = {"exact_match": exact_match, "math_strict": math_strict}
