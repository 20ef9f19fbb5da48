"""The protocols of tools and environments, for the code that drives a rollout of several turns.

The driver owns tokens, turn limits and deadlines. The driver cancels slow calls: every coroutine must then give up its
processes and files.

    episode = environment.begin(prompt.text, seed)
    try:
        observation = await episode.step(turn)      # once per turn of the model, until observation.done
    finally:
        await episode.close()
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from megarl.core.types import FinishReason

ToolExit = Literal["ok", "error", "timeout", "memory", "output_limit", "killed"]


@dataclass(frozen=True, slots=True)
class ToolResult:
    output: str
    """Text of the tool, errors included; cut at the limit, with a last line about the cut."""
    exit: ToolExit
    """ok; error: the call is wrong or failed; timeout: wall or CPU time; memory: an allocation was refused;
    output_limit: too much output; killed: the process died of another signal."""


class Tool(Protocol):
    """Answers a text with a text; safe to call concurrently."""

    @property
    def name(self) -> str:
        """Name of the tool in calls of the model."""
        ...

    async def __call__(self, argument: str) -> ToolResult:
        """Run a call. A mistake of the model gives a result; RolloutError for a fault of the host alone."""
        ...


@dataclass(frozen=True, slots=True)
class ModelTurn:
    index: int
    tokens: np.ndarray
    """int32 [T], the sampled tokens, including the stop token. Do not tokenize the text again."""
    text: str
    """The tokens decoded, without special tokens."""
    finish_reason: FinishReason
    """stop, or length for a turn that was cut, whose last call may be incomplete. An aborted turn is never stepped."""


@dataclass(frozen=True, slots=True)
class Observation:
    text: str
    """Text to append to the sequence unchanged, chat markup included; may be empty."""
    done: bool
    """Whether the episode ends. The text of the last observation is not appended: the model does not read it."""
    reward: float | None = None
    """Reward of this turn, as a step of the response (docs/rewards.md); None without a reward."""


class Episode(Protocol):
    """A rollout in an environment, with its state; the driver makes one step at a time."""

    async def step(self, turn: ModelTurn) -> Observation:
        """Answer a turn. RolloutError if the environment failed, not the model; may be cancelled."""
        ...

    async def close(self) -> None:
        """Free the episode's resources; called once, also after an error or a cancelled step."""


class Environment(Protocol):
    """Makes episodes; an environment holds no state of an episode."""

    def begin(self, prompt: str, seed: int) -> Episode:
        """Start an episode on a prompt; prompt, seed and turns determine the episode."""
        ...
