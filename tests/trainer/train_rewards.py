"""Rewards that a random model can earn, and rewards that fail; runs name them as ``train_rewards:function``."""

from __future__ import annotations

import os

from megarl.data.rewards import StepReward, Steps, instantaneous


def digit_share(*, prompt: str, response: str, answer: str) -> float:
    """The share of the response's characters that are digits: differs within a group, and can be learned."""
    return sum(map(str.isdigit, response)) / max(len(response), 1)


@instantaneous
def digits_and_length(*, prompt: str, response: str, answer: str) -> dict[str, float]:
    """Two rewards; the order of the names is none of the configuration's."""
    return {"short": 1 / (1 + len(response)), "digits": digit_share(prompt=prompt, response=response, answer=answer)}


def raises_on_demand(*, prompt: str, response: str, answer: str) -> float:
    """Fails on the prompts that a variable names."""
    if prompt in os.environ.get("NO_VERDICT_ON", "").split(","):
        raise ValueError("no verdict")
    return digit_share(prompt=prompt, response=response, answer=answer)


def starts_low(*, prompt: str, response: str, answer: str) -> float:
    """1 if the response begins with 0 to 4; of one token, a model passes as often as it thinks that likely."""
    return float(response[:1] in set("01234"))


@instantaneous
def starts_low_at_once(*, prompt: str, response: str, answer: str) -> float:
    """As ``starts_low``, in the caller: the order of arrival is that of sampling."""
    return starts_low(prompt=prompt, response=response, answer=answer)


def only_starts_low(*, prompt: str, response: str, answer: str) -> float | None:
    """As ``starts_low``, without a reward for the others."""
    return 1.0 if response[:1] in set("01234") and response else None


def uniform(*, prompt: str, response: str, answer: str) -> float:
    return 0.5


def often_uniform(*, prompt: str, response: str, answer: str) -> float:
    """The same for all responses to half of the prompts."""
    return 0.5 if int(prompt[0]) % 2 else digit_share(prompt=prompt, response=response, answer=answer)


def sometimes_raises(*, prompt: str, response: str, answer: str) -> float:
    """Fails by what the response says, so that it fails on the same ones wherever they are judged."""
    if response.startswith(("0", "1", "2", "3", "4")):
        raise ValueError("no verdict")
    if response.startswith(("5", "6", "7", "8", "9")):
        return float("nan")
    return digit_share(prompt=prompt, response=response, answer=answer)


def always_raises(*, prompt: str, response: str, answer: str) -> float:
    raise ValueError("no verdict")


def has_no_server(*, prompt: str, response: str, answer: str) -> float:
    """Fails as a client of a server does that wraps its errors."""
    try:
        raise ConnectionRefusedError(111, "refused")
    except OSError as error:
        raise RuntimeError("no answer") from error


@instantaneous
def fails_on_rank_1(*, prompt: str, response: str, answer: str) -> float:
    if os.environ.get("RANK") == "1":
        raise ValueError(f"no verdict on {response!r}")
    return digit_share(prompt=prompt, response=response, answer=answer)


@instantaneous
def raises_on_rank_1(*, prompt: str, response: str, answer: str) -> float:
    """A ConfigError passes through the scorer: it ends the run, here on one rank only."""
    from megarl.errors import ConfigError

    if os.environ.get("RANK") == "1":
        raise ConfigError("this reward cannot work on rank 1")
    return digit_share(prompt=prompt, response=response, answer=answer)


def digit_by_digit(*, prompt: str, response: str, answer: str) -> Steps | float:
    """Each character is a step, worth 1 if it is a digit; a response without characters is judged as a whole."""
    outcome = digit_share(prompt=prompt, response=response, answer=answer)
    if not response:
        return outcome
    return Steps(outcome, [StepReward(end + 1, float(response[end].isdigit())) for end in range(len(response))])


@instantaneous
def flat_where_told(*, prompt: str, response: str, answer: str) -> float:
    """The same for all responses to the prompts whose answer says so."""
    return 0.5 if answer == "flat" else digit_share(prompt=prompt, response=response, answer=answer)


@instantaneous
def signed(*, prompt: str, response: str, answer: str) -> float:
    """Between -1 and 1: no pass rate."""
    return 2 * digit_share(prompt=prompt, response=response, answer=answer) - 1


@instantaneous
def fails_where_told(*, prompt: str, response: str, answer: str) -> float:
    """Fails on all responses to the prompts whose answer says so."""
    if answer == "fails":
        raise ValueError("no verdict")
    return digit_share(prompt=prompt, response=response, answer=answer)


@instantaneous
def sometimes_raises_here(*, prompt: str, response: str, answer: str) -> float:
    return sometimes_raises(prompt=prompt, response=response, answer=answer)
