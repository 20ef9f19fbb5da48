"""The table about rollouts of several turns: [environment]."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megarl.config.tables.base import Table


class EnvironmentConfig(Table):
    """[environment]: rollouts of several turns, with tools; see docs/environments.md."""

    function: str | None = None
    """"tools" for those below, or "package.module:factory"; default none: a response is one turn."""
    options: dict[str, Any] = {}
    """Keywords for that factory."""
    tools: list[str] = []
    """What the model may call: "calculator", "python" or "package.module:factory"."""
    format: Literal["block", "hermes"] = "block"
    """How it calls: text between call_open and call_close, for one tool; or JSON in <tool_call> tags, as Qwen."""
    call_open: str = "<tool>"
    """What begins a call of the format block."""
    call_close: str = "</tool>"
    """What ends it; what follows is not read."""
    observation: str | None = None
    """What is appended for a call, {output} being the tool's; default depends on the format."""
    stop: list[str] = []
    """Texts of one token each that end a turn, besides the end token."""
    max_turns: PositiveInt = 8
    """Most turns of the model; rollout.max_response_tokens bounds all turns and observations together."""
    max_turn_tokens: PositiveInt | None = None
    """Longest turn; default what is left."""
    step_s: PositiveFloat = 60.0
    """Longest answer of the environment; seconds."""
    episode_s: PositiveFloat = 1800.0
    """Longest time from the end of a rollout's first turn to its end, sampling included; seconds. A later one does not
    train, and is counted."""
    concurrency: PositiveInt = 4
    """Answers that each rank has the environment work on at a time."""
    python_s: PositiveFloat = 10.0
    """Wall and CPU time of a call of the Python tool; seconds."""
    python_memory_mb: PositiveInt = 1024
    """Memory of each of its processes."""
    python_output_kb: PositiveInt = 16
    """Most that it may print."""
    python_processes: int = Field(default=8, ge=-1)
    """Processes and threads that it may have beside the first one; -1 = no limit, with python_limits_alone only."""
    python_limits_alone: bool = False
    """Run it without isolation, under resource limits alone, where bubblewrap does not work: the model's code then has
    the network, and reads and writes what the user can."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if (self.function == "tools") != bool(self.tools):
            raise ValueError(
                f'tools: found {self.tools} with function = {self.function!r}; name tools, with function = "tools"'
            )
        if self.format == "block" and len(self.tools) > 1:
            raise ValueError('tools: found several with format = "block", which names none; use format = "hermes"')
        if self.observation is not None and "{output}" not in self.observation:
            raise ValueError(f"observation: found {self.observation!r}, expected {{output}} in it")
        if self.function is None and self != EnvironmentConfig.model_construct():
            raise ValueError("function: missing beside other keys; it says what the environment is")
        return self
