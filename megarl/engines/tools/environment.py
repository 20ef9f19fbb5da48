"""The environment of tools: runs the calls of a turn, and appends the outputs as the observation.

A call has two possible forms. A block is text between two marks, for a single tool; the turn ends at the end token, or
at a stop token such as the closing mark. Hermes is JSON in <tool_call> tags, the form of Qwen's and many other chat
templates: several calls in a turn, each of a named tool.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarl.engines.tools.protocol import Episode, ModelTurn, Observation, Tool
from megarl.errors import ConfigError
from megarl.files.texts import read_table


@dataclass(frozen=True, slots=True)
class Call:
    """A call in a turn."""

    tool: str | None
    """Name of the tool; None in an environment with a single tool."""
    argument: str
    error: str | None = None
    """Why the call cannot be run, for the model."""
    closed: bool = True
    """Whether the end mark is written. A call without an end mark is whole unless the turn was cut."""
    arguments: Any = None
    """All arguments of a Hermes call, as its JSON has them."""


@dataclass(frozen=True, slots=True)
class Block:
    """The last block of a turn is the call. A block without an end counts: the end mark may be the stop token."""

    begin: str = "<tool>"
    end: str = "</tool>"
    template: str = "\n<output>{output}</output>\n"
    """The observation, with {output} for the tool's output."""

    def calls(self, text: str) -> list[Call]:
        """Return the call of a turn. Text after the call is no answer: an episode ends with a turn without a call."""
        _, begin, block = text.rpartition(self.begin)
        argument, end, _ = block.partition(self.end)
        return [Call(None, argument, closed=bool(end))] if begin else []

    def observation(self, outputs: Sequence[str]) -> str:
        """Return the text to append for the outputs of the calls."""
        return self.template.replace("{output}", outputs[0])


_STOPPED: dict[str, str] = read_table(__file__)
"""Exit of a stopped call -> text for the model."""
_TOOL_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Hermes:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

    A tool takes a single text: the only argument, or all arguments as JSON.
    """

    template: str = "\n<|im_start|>user\n<tool_response>\n{output}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    """The observation, with {output} for all outputs and the tags between outputs."""

    def calls(self, text: str) -> list[Call]:
        """Return the calls of a turn, in order. Text that is no JSON is a failing call, which the model can correct."""
        return [replace(_hermes_call(body), closed=bool(end)) for body, end in _TOOL_CALL.findall(text)]

    @staticmethod
    def remove_calls(text: str) -> str:
        """Return the text around the calls."""
        return _TOOL_CALL.sub("", text).strip()

    def observation(self, outputs: Sequence[str]) -> str:
        """Return the text to append for the outputs of the calls."""
        return self.template.replace("{output}", "\n</tool_response>\n<tool_response>\n".join(outputs))


def _hermes_call(text: str) -> Call:
    try:
        call: Any = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return Call(None, "", f'this is no call: {error}; expected {{"name": ..., "arguments": {{...}}}}')
    if not isinstance(name, str):
        return Call(None, "", "the name of a tool is a string")
    value = next(iter(arguments.values())) if isinstance(arguments, Mapping) and len(arguments) == 1 else arguments
    return Call(name, value if isinstance(value, str) else json.dumps(value), arguments=arguments)


class ToolEnvironment:
    """Runs the calls of each turn in order, and ends the episode at a turn without a call.

    Tools have no state between calls, so that a single Episode object serves all episodes. ConfigError without tools,
    and for two tools of equal name.
    """

    def __init__(self, tools: Sequence[Tool], form: Block | Hermes) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._form = form
        if len(self._tools) < len(tools) or not tools:
            raise ConfigError(f"the tools are {[tool.name for tool in tools]}, expected at least one, with own names")

    def begin(self, prompt: str, seed: int) -> Episode:
        return self

    async def step(self, turn: ModelTurn) -> Observation:
        calls = self._form.calls(turn.text)
        if not calls:
            return Observation("", done=True)
        cut = turn.finish_reason == "length"
        outputs = [await self._output(call, cut) for call in calls]
        return Observation(self._form.observation(outputs), done=False)

    async def close(self) -> None:
        """Do nothing: no resource is open."""

    async def _output(self, call: Call, cut: bool) -> str:
        if cut and not call.closed:  # half of an expression may be a valid expression
            return "error: the turn was cut before this call ended"
        if call.error is not None:
            return f"error: {call.error}"
        tool = next(iter(self._tools.values())) if call.tool is None else self._tools.get(call.tool)
        if tool is None:
            return f"error: there is no tool {call.tool!r}, only {', '.join(self._tools)}"
        result = await tool(call.argument)
        if result.exit not in _STOPPED:
            return result.output
        return f"{result.output.rstrip()}\nerror: {_STOPPED[result.exit]}".lstrip()
