"""The environment of tools: how calls are read, and what of a failing tool the episodes beside it notice."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from megarl.core.types import FinishReason
from megarl.engines.tools.calculator import CalculatorTool
from megarl.engines.tools.environment import Block, Hermes, ToolEnvironment
from megarl.engines.tools.protocol import Environment, ModelTurn, Observation, ToolResult
from megarl.engines.tools.python_tool import PythonTool
from megarl.engines.tools.sandbox import Limits
from megarl.errors import ConfigError


class Echo:
    """A tool that gives back what it gets."""

    name = "echo"

    async def __call__(self, argument: str) -> ToolResult:
        return ToolResult(f"[{argument}]", "ok")


def step(environment: Environment, text: str, finish: FinishReason = "stop") -> Observation:
    async def one() -> Observation:
        episode = environment.begin("", 0)
        try:
            return await episode.step(ModelTurn(0, np.zeros(len(text), np.int32), text, finish))
        finally:
            await episode.close()

    return asyncio.run(one())


@pytest.mark.parametrize(
    ("text", "argument"),
    [
        ("so <tool>1 + 1</tool>", "1 + 1"),
        ("so <tool>1 + 1", "1 + 1"),  # the closing mark was the stop token, and is not in the text
        ("<tool>1</tool> and <tool>2</tool> then", "2"),
        ("<tool>a<tool>b</tool>c</tool>", "b"),
        ("<tool>\nprint(1)\n</tool>", "\nprint(1)\n"),
        ("the answer is 2", None),
    ],
)
def test_a_block_is_the_last_one_of_the_turn(text: str, argument: str | None) -> None:
    found = step(ToolEnvironment([Echo()], Block()), text)
    if argument is None:
        assert (found.text, found.done) == ("", True)
    else:
        assert (found.text, found.done) == (f"\n<output>[{argument}]</output>\n", False)


def hermes(*calls: object) -> str:
    texts = [call if isinstance(call, str) else json.dumps(call) for call in calls]
    return "".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def outputs(found: Observation) -> list[str]:
    head, _, rest = found.text.partition("<tool_response>\n")
    body, _, tail = rest.rpartition("\n</tool_response>")
    assert (head, tail) == ("\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
    return body.split("\n</tool_response>\n<tool_response>\n")


def test_hermes_runs_several_calls_in_order_and_gives_one_argument_as_it_is() -> None:
    environment = ToolEnvironment([CalculatorTool(), Echo()], Hermes())
    turn = hermes(
        {"name": "calculator", "arguments": {"expression": "6 * 7"}},
        {"name": "echo", "arguments": {"a": 1, "b": "two"}},
        {"name": "echo", "arguments": "plain"},
        {"name": "echo", "arguments": {"only": 5}},
        {"name": "echo"},
    )
    found = step(environment, f"Let me see. {turn} Done?")
    assert outputs(found) == ["42", '[{"a": 1, "b": "two"}]', "[plain]", "[5]", "[{}]"]
    assert not found.done
    assert step(environment, "The answer is 42.").done
    assert step(environment, "</tool_call>").done


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("{", "error: this is no call: Expecting property name"),
        ("[]", "error: this is no call: list indices"),
        ('"name"', "error: this is no call: string indices"),
        ('{"name": 5}', "error: the name of a tool is a string"),
        ('{"name": "rm"}', "error: there is no tool 'rm', only echo"),
        ('{"name": "\\ud800"}', "error: there is no tool '\\ud800', only echo"),
        ("9" * 5000, "error: this is no call: Exceeds the limit"),
        ("[" * 100_000, "error: this is no call: "),
        ('{"name": "echo", "arguments": ' + '{"a":' * 900 + "1" + "}" * 901, None),
        ("<tool_call>{}", "error: this is no call: Expecting value"),
    ],
    ids=range(10),
)
def test_what_is_no_call_is_told_to_the_model_and_the_next_one_runs(call: str, told: str | None) -> None:
    found = step(ToolEnvironment([Echo()], Hermes()), hermes(call, {"name": "echo", "arguments": "x"}))
    first, second = outputs(found)
    assert told is None or first.startswith(told)
    assert second == "[x]"
    assert not found.done


def test_a_call_that_was_cut_is_not_run_and_one_that_ended_is() -> None:
    """Half of 12 + 34 is a sum too."""
    block, many = ToolEnvironment([Echo()], Block()), ToolEnvironment([Echo()], Hermes())
    cut = "error: the turn was cut before this call ended"
    assert step(block, "<tool>12 + 3", "length").text == f"\n<output>{cut}</output>\n"
    assert step(block, "<tool>12 + 34</tool> so", "length").text == "\n<output>[12 + 34]</output>\n"
    whole = hermes({"name": "echo", "arguments": "x"})
    assert outputs(step(many, whole + '<tool_call>{"name": "echo", "arguments": "y"}', "length")) == ["[x]", cut]
    assert outputs(step(many, whole + '<tool_call>{"name": "echo", "arguments": "y"}', "stop")) == ["[x]", "[y]"]
    assert step(block, "thinking, thinking", "length").done


def test_tools_that_cannot_be_told_apart_are_refused() -> None:
    for tools in ([], [Echo(), Echo()]):
        with pytest.raises(ConfigError, match="expected at least one, with own names"):
            ToolEnvironment(tools, Hermes())


@pytest.mark.needs("bwrap")
def test_text_that_is_no_unicode_does_not_fail_the_episode() -> None:
    """Half of a surrogate pair, by JSON's escapes; and bytes that are no text, by the tool's output."""
    odd = "import sys; sys.stdout.buffer.write(bytes([255, 10])); sys.stdout.flush(); print('\ud800')"
    environment = ToolEnvironment([PythonTool(Limits(wall_s=600.0))], Hermes())
    text = step(environment, hermes({"name": "python", "arguments": {"code": odd}})).text
    assert "\ufffd" in text
    assert text.encode()
