"""Reward functions: what they get, what they may return, and the built-in ones. ``megarl.data.judge`` calls them.

A reward is any callable ``reward(*, prompt: str, response: str, answer: str)`` that returns a number, ``Steps``, or
several rewards by name (``reward.weights``). The built-in ones return 1 for a correct response and 0 for a wrong one.
"""

import contextlib
import importlib.util
import itertools
import math
import numbers
import operator
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from megarl.config.plugs import check_function, load_plug
from megarl.config.tables.data import RewardModelConfig
from megarl.data import math_text
from megarl.errors import ConfigError, describe_call, may_pass

AnyReward = TypeVar("AnyReward", bound=Callable[..., Any])

MATH_VERIFY_TIMEOUT_S = 3
"""CPU time for the answer, and for the response: reading it and all its comparisons with the answer."""
_NEVER_S = 3600
"""math-verify's own time limits. They count the time in which other processes run, too."""


@dataclass(frozen=True, slots=True)
class StepReward:
    end: int
    """Characters of the response up to the end of the step, exclusive: 1..len(response)."""
    reward: float


@dataclass(frozen=True, slots=True)
class Steps:
    """What a process reward returns instead of a number."""

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
    """One line: an exception, a return value that is no reward, a time-out, a worker that died."""
    may_pass: bool = False
    """Whether the function failed for a cause outside of it: a server, a time-out, a process that was killed."""
    timed_out: bool = False
    """Whether the call was stopped, or gave up, because it took too long; or too much memory, where that is wrong. Not
    where its CPU time is limited, and it ended for another reason: its machine was busy, say."""


class RewardFunction(Protocol):
    """Judges one response; higher is better. Called with keywords only, once per response."""

    def __call__(self, *, prompt: str, response: str, answer: str) -> float | Steps | Mapping[str, float]: ...


def instantaneous(reward: AnyReward) -> AnyReward:
    """Mark a reward function that returns at once and cannot crash. A judge calls it without a worker process."""
    reward.instantaneous = True  # type: ignore[attr-defined]
    return reward


def with_special_tokens(reward: AnyReward) -> AnyReward:
    """Mark a reward function that gets responses with their special tokens: tags that are such, and the end token."""
    reward.special_tokens = True  # type: ignore[attr-defined]
    return reward


def wrong_if_stopped(check_answer: Callable[[str], object]) -> Callable[[AnyReward], AnyReward]:
    """Mark a reward function whose time and memory depend on the response: if they run out, the response is wrong.

    A judge then limits its CPU time, which does not depend on the load of the machine, and its memory.
    check_answer: called with the answer then; if it raises or does not end either, the data is at fault, and the
    response has no reward.
    """

    def mark(reward: AnyReward) -> AnyReward:
        reward.check_answer = check_answer  # type: ignore[attr-defined]
        return reward

    return mark


@instantaneous
def exact_match(*, prompt: str, response: str, answer: str) -> float:
    """Return 1 if response and answer are the same text, ignoring blanks around them, else 0."""
    return float(response.strip() == answer.strip())


def read_math_answer(answer: str) -> list[Any]:
    """Return what math-verify reads in an answer of a data set; ValueError for nothing, TimeoutError after 3 s."""
    from math_verify import parse

    with _limit_cpu(f"reading the answer {answer!r:.80}"):
        gold = math_text.read_answer(partial(parse, parsing_timeout=_NEVER_S), answer)
    if not gold:
        raise ValueError(f"math-verify can read no expression in the answer {answer!r:.80}")
    return gold


def can_read_answer(answer: str, reward: str = "math_verify") -> bool:
    """Whether a built-in reward can read an answer of a data set: no response to another one has a reward."""
    try:
        getattr(BUILT_IN_REWARDS[reward], "check_answer", str)(answer)
    except (ValueError, TimeoutError):
        return False
    return True


def is_spelling(answer: str) -> bool:
    """Whether math_strict knows an answer of a data set by its spelling alone."""
    return can_read_answer(answer, "math_strict") and _read_strict_answer(answer).is_spelling


def _read_strict_answer(answer: str) -> Any:
    from megarl.data.strict.grade import read_key  # imports sympy

    return read_key(answer)


@wrong_if_stopped(_read_strict_answer)
def math_strict(*, prompt: str, response: str, answer: str) -> float:
    """Return 1 if the last box of the response holds the answer, as evaluated as the answer is, else 0.

    What a box may hold is a grammar (``megarl.data.strict``); a response without a box is wrong, and so is what the
    grammar does not know. Raises ValueError if there is nothing in the answer to compare with.
    """
    from megarl.data.strict.grade import is_right

    return float(is_right(_read_strict_answer(answer), response))


@wrong_if_stopped(read_math_answer)
def math_verify(*, prompt: str, response: str, answer: str) -> float:
    """Return 1 if the last boxed expression of the response equals the answer (math-verify), else 0.

    A response without a box may hold LaTeX ($...$) or plain numbers, of which the last one counts. An answer without
    such a mark is read as the inside of a \\boxed. A response that cannot be read or compared is wrong: 0.

    Endless simplifications are interrupted by a signal when their CPU time is used up: a busy machine makes no answer
    wrong. Python delivers it to the main thread only, so this reward works only in the main thread of a process.

    Raises:
        TimeoutError: the time ran out for the response; a judge takes it as wrong.
        ValueError: the answer cannot be read.
        ConfigError: this is not the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "the reward math_verify interrupts itself with a signal, which needs the main thread: call it there, or in "
            "a process of its own"
        )
    gold = read_math_answer(answer)
    with _limit_cpu(f"judging the response {response[-80:]!r}"):
        return float(_is_among(gold, response))


def _is_among(gold: list[Any], response: str) -> bool:
    from math_verify import parse, verify

    try:
        read = partial(parse, parsing_timeout=_NEVER_S, raise_on_error=True)
        candidates = math_text.read_response(read, response)
    except Exception:  # the LaTeX parser raises many types; the response holds no readable answer
        return False
    if math_text.are_other_lists(gold, candidates):
        return False
    for mine, other in ((gold, candidates), (candidates, gold)):  # math-verify takes 9 % as 9, but not 9.5 % as 9.5
        if (number := math_text.bare_percentage(mine)) and not math_text.bare_percentage(other):
            mine += parse(f"\\boxed{{{number}}}", parsing_timeout=_NEVER_S)
    for expected, candidate in itertools.product(gold, candidates):
        with contextlib.suppress(Exception):  # sympy refuses to compare a set with a matrix: not equal
            if verify(expected, candidate, timeout_seconds=_NEVER_S, raise_on_error=True):
                return True
    return False


class _OutOfTimeError(BaseException):
    """No Exception, which sympy would catch."""


@contextlib.contextmanager
def _limit_cpu(what: str) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _OutOfTimeError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, MATH_VERIFY_TIMEOUT_S, 1.0)  # and again, where a library catches everything
    try:
        yield
    except _OutOfTimeError:
        raise TimeoutError(f"{what} took more than {MATH_VERIFY_TIMEOUT_S} s") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


BUILT_IN_REWARDS: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "math_strict": math_strict,
    "math_verify": math_verify,
}


def load_reward(name_or_path: str, model: RewardModelConfig | None = None) -> Callable[..., Any]:
    """Return the reward function of a built-in name or of "package.module:function"; model: for "reward_model".

    Raises ConfigError (one line) if the name is unknown, the module cannot be imported, the function is missing or
    cannot be called with the keywords prompt, response and answer, or math-verify is not installed.
    """
    if name_or_path in BUILT_IN_REWARDS:
        package = {"math_verify": "math_verify", "math_strict": "sympy"}.get(name_or_path)
        if package and importlib.util.find_spec(package) is None:
            missing = f"the package {package} is missing: pip install math-verify"
            raise ConfigError(f"reward.function is {name_or_path}, but {missing}")
        return BUILT_IN_REWARDS[name_or_path]
    if name_or_path == "reward_model" and model is not None:
        from megarl.data.reward_model import RewardModel  # takes aiohttp

        return RewardModel(model)
    reward = load_plug("reward.function", name_or_path, ", ".join([*BUILT_IN_REWARDS, "reward_model"]))
    return check_function("reward.function", name_or_path, reward, "*, prompt, response, answer")


def read_verdict(returned: object, response: str, weights: Mapping[str, float] | None = None) -> Verdict:
    """Return what a reward function returned as a verdict. Raises ValueError or TypeError if it is no reward.

    weights: by name, of several rewards, which the function must return then; the reward is their weighted sum.
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
            raise ValueError(
                f"step {index} ends at character {end}, expected {previous + 1}..{len(response)}: "
                f"ends ascend and lie within the response"
            )
        steps.append(StepReward(end, reward))
        previous = end
    if not steps:
        raise ValueError("the reward function returned Steps without a step: return a number instead")
    return Verdict(outcome, tuple(steps))


def _weigh(returned: object, weights: Mapping[str, float]) -> Verdict:
    """Return the verdict of a function that returns rewards by name."""
    if not isinstance(returned, Mapping):
        found = f"{returned!r:.80} ({type(returned).__name__})"
        raise TypeError(f"the reward function returned {found}, expected rewards by name: {[*weights]}")
    if set(returned) != set(weights):
        raise ValueError(f"the reward function returned {[*returned]}, expected those of reward.weights: {[*weights]}")
    components = tuple(_check_finite(returned[name], f"the reward {name!r} is") for name in weights)
    total = math.fsum(map(operator.mul, weights.values(), components))
    return Verdict(_check_finite(total, "the weighted sum of rewards is"), components=components)


def describe_failure(error: BaseException, function: Callable[..., Any]) -> Verdict:
    """Return the verdict for a reward function that raised: type, message, file and line, in one line."""
    return Verdict(None, (), (), describe_call(error, function), may_pass(error), isinstance(error, TimeoutError))


def _check_finite(value: object, what: str) -> float:
    if not isinstance(value, (float, numbers.Real, np.bool_)):  # float first, for it needs no look-up
        hint = "; for several rewards by name, set reward.weights" if isinstance(value, Mapping) else ""
        raise TypeError(f"{what} {value!r:.80} ({type(value).__name__}), expected a number{hint}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} {number}, expected a finite number")
    return number
