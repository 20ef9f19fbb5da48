"""The protocols of tools and environments, as the code that drives a rollout of several turns sees them.

The driver owns the tokens, turn limits and deadlines: it cancels what is too slow, so every coroutine here must give up
its processes and files when it is cancelled.

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
    """What the tool wrote, errors included; cut at its limit, and a last line then says so."""
    exit: ToolExit
    """ok; error: the call itself is wrong or failed; timeout: of wall or CPU time; memory: an allocation was refused;
    output_limit: it wrote more than is read; killed: it died of another signal."""
    truncated: bool = False
    """Whether the output was cut."""


class Tool(Protocol):
    """Something that a model calls with one text and that answers with another; safe to call concurrently."""

    @property
    def name(self) -> str:
        """The name that the model uses for the tool."""
        ...

    async def __call__(self, argument: str) -> ToolResult:
        """Runs one call. A mistake of the model gives a result; only a fault of the host raises RolloutError."""
        ...


@dataclass(frozen=True, slots=True)
class ModelTurn:
    index: int
    tokens: np.ndarray
    """int32 [T], as they were sampled, the stop token included. Not to be made from the text again."""
    text: str
    """The same tokens decoded, without special tokens."""
    finish_reason: FinishReason
    """stop, or length where the turn was cut and a call in it may be incomplete. An aborted turn is never stepped."""


@dataclass(frozen=True, slots=True)
class Observation:
    text: str
    """Appended to the sequence exactly as it is, chat markup included; "" appends nothing."""
    done: bool
    """Whether the episode ends here. The text of the last observation is not appended: nobody reads it."""
    reward: float | None = None
    """Of this turn alone, as a step of the response (see docs/rewards.md); None for none."""


class Episode(Protocol):
    """One rollout in an environment, with whatever state it needs; its steps come one after the other."""

    async def step(self, turn: ModelTurn) -> Observation:
        """Answers a turn. Raises RolloutError where the environment failed, not the model; may be cancelled."""
        ...

    async def close(self) -> None:
        """Frees what the episode holds; called once, also after an error or a cancelled step."""


class Environment(Protocol):
    """Makes episodes; shared by all of them, so it keeps nothing that belongs to one."""

    def begin(self, prompt: str, seed: int) -> Episode:
        """Starts an episode on a prompt; the same prompt and seed give the same episode for the same turns."""
        ...
