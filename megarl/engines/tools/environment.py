"""The environment of tools: what the model calls in a turn is run, and what it says comes next.

Two ways to write a call. A block is text between two marks, for one tool; the turn ends at its end token, or at a stop
token such as the closing mark. Hermes is JSON in <tool_call> tags, as Qwen's chat template and many others have it:
several calls in a turn, each of a named tool.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarl.engines.tools.protocol import Episode, ModelTurn, Observation, Tool
from megarl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Call:
    """One call that a turn holds."""

    tool: str | None
    """Its name; None where there is only one tool."""
    argument: str
    """What the tool gets."""
    error: str | None = None
    """Why it cannot be run, for the model to read."""
    closed: bool = True
    """Whether its end is written. If not, it is whole only where the turn ended by itself, and was not cut."""


@dataclass(frozen=True, slots=True)
class Block:
    """The last block of a turn is its call. One that is not closed counts: its mark may have been the stop token."""

    begin: str = "<tool>"
    end: str = "</tool>"
    template: str = "\n<output>{output}</output>\n"
    """The observation, {output} being the tool's."""

    def calls(self, text: str) -> list[Call]:
        """Returns the call of a turn. Text after it is no answer yet: an episode ends with a turn without a call."""
        _, found, rest = text.rpartition(self.begin)
        argument, closed, _ = rest.partition(self.end)
        return [Call(None, argument, closed=bool(closed))] if found else []

    def observation(self, outputs: Sequence[str]) -> str:
        """Returns the text that is appended for the outputs of the calls."""
        return self.template.replace("{output}", outputs[0])


_STOPPED = {
    "timeout": "the call took too long and was stopped",
    "memory": "the call ran out of memory",
    "output_limit": "the call printed too much and was stopped",
    "killed": "the call was killed",
}
"""What a model reads of a call that did not come to its own end."""
_TOOL_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Hermes:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

    A tool here takes one text: the only argument, or all of them as JSON if there are several.
    """

    template: str = "\n<|im_start|>user\n<tool_response>\n{output}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    """The observation, {output} being all outputs, with the tags between them."""

    def calls(self, text: str) -> list[Call]:
        """Returns the calls of a turn, in order. What is no JSON is a call that fails, for the model to mend it."""
        return [replace(_hermes_call(found), closed=bool(end)) for found, end in _TOOL_CALL.findall(text)]

    def observation(self, outputs: Sequence[str]) -> str:
        """Returns the text that is appended for the outputs of the calls."""
        return self.template.replace("{output}", "\n</tool_response>\n<tool_response>\n".join(outputs))


def _hermes_call(text: str) -> Call:
    try:
        found: Any = json.loads(text)
        name, arguments = found["name"], found.get("arguments", {})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return Call(None, "", f'this is no call: {error}; expected {{"name": ..., "arguments": {{...}}}}')
    if not isinstance(name, str):
        return Call(None, "", "the name of a tool is a string")
    if isinstance(arguments, Mapping) and len(arguments) == 1:
        (arguments,) = arguments.values()
    return Call(name, arguments if isinstance(arguments, str) else json.dumps(arguments))


class ToolEnvironment:
    """Runs the calls of each turn, one after the other, and ends the episode with a turn that has none.

    Tools keep nothing between calls, so that all its episodes are one and the same.
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
        """Nothing is open."""

    async def _output(self, call: Call, cut: bool) -> str:
        if cut and not call.closed:  # half of an expression may well be one
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
