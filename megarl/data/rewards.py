"""Reward functions: a typed protocol and two built-in ones; ``megarl.data.judge`` calls them.

A reward is any callable ``reward(*, prompt: str, response: str, answer: str)`` that returns a number, or Steps
(``megarl.data.verdicts``). The built-in ones give 1 for a right and 0 for a wrong response.
"""

from __future__ import annotations

import importlib.util
import inspect
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from megarl.config.plugs import load_plug
from megarl.data.verdicts import Steps
from megarl.errors import ConfigError

AnyReward = TypeVar("AnyReward", bound=Callable[..., Any])

MATH_VERIFY_TIMEOUT_S = 5
"""Seconds for parsing a response, and for each comparison with the answer (math-verify's own default)."""


class RewardFunction(Protocol):
    """Judges one response; higher is better. Called with keywords only, once per response."""

    def __call__(self, *, prompt: str, response: str, answer: str) -> float | Steps: ...


def instantaneous(reward: AnyReward) -> AnyReward:
    """Declares a reward function that returns at once and cannot crash: a judge calls it without a worker process."""
    reward.instantaneous = True  # type: ignore[attr-defined]
    return reward


@instantaneous
def exact_match(*, prompt: str, response: str, answer: str) -> float:
    """1 if response and answer are the same text, blanks around them apart, else 0."""
    return float(response.strip() == answer.strip())


def math_verify(*, prompt: str, response: str, answer: str) -> float:
    """1 if the last mathematical expression of the response equals the answer (math-verify), else 0.

    The response may hold LaTeX ($...$, \\boxed{...}) or plain numbers; an answer without such a mark is read as the
    inside of a \\boxed. A response in which nothing can be read, or that cannot be compared, is wrong: 0.

    math-verify stops endless simplifications with SIGALRM, which Python delivers to the main thread only, and which
    cancels any alarm the caller has set. So this reward works in the main thread of a process and refuses any other.

    Raises TimeoutError when it ran out of time, for then the response is neither right nor wrong; ValueError when the
    answer cannot be read; ConfigError outside the main thread.
    """
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "the reward math_verify stops itself by a signal and needs the main thread: score there, or in a process"
        )
    marked = any(mark in answer for mark in ("$", "\\boxed", "\\(", "\\["))
    gold = parse(answer if marked else f"\\boxed{{{answer}}}", parsing_timeout=MATH_VERIFY_TIMEOUT_S)
    if not gold:
        raise ValueError(f"math-verify can read no expression in the answer {answer!r:.80}")
    timed_out = False
    try:
        candidates = parse(response, parsing_timeout=MATH_VERIFY_TIMEOUT_S, raise_on_error=True)
    except TimeoutException:
        raise TimeoutError(
            f"reading the response took more than {MATH_VERIFY_TIMEOUT_S} s: {response[-80:]!r}"
        ) from None
    except Exception:  # whatever the LaTeX parser trips over in a model's output, the response holds no readable answer
        return 0.0
    for expected in gold:
        for candidate in candidates:
            try:
                if verify(expected, candidate, timeout_seconds=MATH_VERIFY_TIMEOUT_S, raise_on_error=True):
                    return 1.0
            except TimeoutException:
                timed_out = True
            except (
                Exception
            ):  # sympy refuses to compare the two (a set with a matrix, say): not equal, as math-verify counts it
                continue
    if timed_out:
        raise TimeoutError(f"comparing the response took more than {MATH_VERIFY_TIMEOUT_S} s: {response[-80:]!r}")
    return 0.0


BUILT_IN_REWARDS: dict[str, RewardFunction] = {"exact_match": exact_match, "math_verify": math_verify}


def load_reward(name_or_path: str) -> RewardFunction:
    """The reward function of a built-in name ("exact_match", "math_verify") or of "package.module:function".

    Raises ConfigError (one line): unknown name, module that cannot be imported, missing function, something that
    cannot be called with the keywords prompt, response and answer, math-verify not installed.
    """
    if name_or_path in BUILT_IN_REWARDS:
        if name_or_path == "math_verify" and importlib.util.find_spec("math_verify") is None:
            raise ConfigError("reward.function is math_verify, but the package is missing: pip install math-verify")
        return BUILT_IN_REWARDS[name_or_path]
    reward = load_plug("reward.function", name_or_path, ", ".join(BUILT_IN_REWARDS))
    _check_callable(reward, name_or_path)
    return reward


def _check_callable(reward: object, name: str) -> None:
    """A wrong signature would fail on every single response, so it is found before the run starts."""
    if not callable(reward):
        raise ConfigError(f"reward.function {name!r} is {type(reward).__name__}, expected a function")
    try:
        signature = inspect.signature(reward)
    except ValueError:  # some built-ins carry no signature; then the first call will tell
        return
    try:
        signature.bind(prompt="", response="", answer="")
    except TypeError as error:
        raise ConfigError(
            f"reward.function {name!r} has the parameters {signature} ({error}): expected (*, prompt, response, answer)"
        ) from None
