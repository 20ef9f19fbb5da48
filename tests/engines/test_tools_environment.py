"""The environment of tools: how calls are read, and five attacks in episodes beside others that must not notice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from megarl.core.types import FinishReason, Rollout, SampleRequest
from megarl.engines.episodes import EpisodeLimits, EpisodeResult, play
from megarl.engines.local.engine import BatchSession
from megarl.engines.protocol import Session
from megarl.engines.tools.calculator import CalculatorTool
from megarl.engines.tools.environment import Block, Hermes, ToolEnvironment
from megarl.engines.tools.protocol import Environment, ModelTurn, Observation, ToolResult
from megarl.engines.tools.python_tool import PythonTool
from megarl.errors import ConfigError

END = "<eos>"


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
        ("</tool>1<tool>", ""),
        ("<tool></tool>", ""),
        ("<tool>\nprint(1)\n</tool>", "\nprint(1)\n"),
        ("", None),
        ("the answer is 2", None),
        ("tool>1</tool>", None),
        ("<TOOL>1</TOOL>", None),
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
        ("", "error: this is no call: Expecting value"),
        ("calculator(1)", "error: this is no call: Expecting value"),
        ("[]", "error: this is no call: list indices"),
        ("null", "error: this is no call: 'NoneType'"),
        ("7", "error: this is no call: 'int'"),
        ('"name"', "error: this is no call: string indices"),
        ("{}", "error: this is no call: 'name'"),
        ('{"name": 5}', "error: the name of a tool is a string"),
        ('{"name": null}', "error: the name of a tool is a string"),
        ('{"name": "rm"}', "error: there is no tool 'rm', only echo"),
        ('{"name": "\\ud800"}', "error: there is no tool '\\ud800', only echo"),
        ("9" * 5000, "error: this is no call: Exceeds the limit"),
        ("[" * 100_000, "error: this is no call: "),
        ('{"name": "echo", "arguments": ' + '{"a":' * 900 + "1" + "}" * 901, None),
        ("<tool_call>{}", "error: this is no call: Expecting value"),
    ],
    ids=range(16),
)
def test_what_is_no_call_is_told_to_the_model_and_the_next_one_runs(call: str, told: str | None) -> None:
    found = step(ToolEnvironment([Echo()], Hermes()), hermes(call, {"name": "echo", "arguments": "x"}))
    first, second = outputs(found)
    assert told is None or first.startswith(told)
    assert second == "[x]"
    assert not found.done


@pytest.mark.parametrize("depth", range(930, 1000))
def test_no_depth_of_json_fails_the_episode(depth: int) -> None:
    turn = hermes('{"name": "echo", "arguments": {"a": 1, "b": ' + "[" * depth + "]" * depth + "}}")
    assert len(outputs(step(ToolEnvironment([Echo()], Hermes()), turn))) == 1


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


def test_a_template_is_filled_once() -> None:
    form = Block("(", ")", "={output};")
    assert step(ToolEnvironment([Echo()], form), "({output})").text == "=[{output}];"


def test_tools_that_cannot_be_told_apart_are_refused() -> None:
    for tools in ([], [Echo(), Echo()]):
        with pytest.raises(ConfigError, match="expected at least one, with own names"):
            ToolEnvironment(tools, Hermes())


# Attacks, through the environment of a configuration and a session.


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, so that a script can hold any text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(BPE({END: 0} | {letter: i + 1 for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END)


class Writer:
    """An engine's batches, with what each group writes in its turns given beforehand."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, scripts: Sequence[Sequence[str]]) -> None:
        self._tokenizer, self._scripts = tokenizer, [list(script) for script in scripts]

    def __call__(self, requests: Sequence[SampleRequest]) -> list[Rollout]:
        return [self._written(request) for request in requests]

    def _written(self, request: SampleRequest) -> Rollout:
        text = self._scripts[request.group].pop(0)
        written = [*self._tokenizer(text, add_special_tokens=False)["input_ids"], 0]
        tokens = np.append(request.prompt_tokens, written).astype(np.int32)
        mask = np.arange(len(tokens)) >= len(request.prompt_tokens)
        logprobs = np.where(mask, -1.0, 0.0).astype(np.float32)
        versions = np.zeros(len(tokens), np.int32)
        return Rollout(request.group, 0, tokens, mask, logprobs, None, None, versions, "stop")


def played(environment: Environment, *scripts: Sequence[str], step_s: float = 120.0) -> list[tuple[EpisodeResult, str]]:
    """The episodes of one session, and their responses as text."""
    tokenizer, found = byte_tokenizer(), {}

    def begin(session: Session) -> None:
        places = asyncio.Semaphore(3)
        limits = EpisodeLimits(response_tokens=100_000, turns=4, step_s=step_s)

        async def one(i: int) -> None:
            request = SampleRequest(np.array([5], np.int32), i, 0, i)
            found[i] = await play(session, request, "", environment, tokenizer, limits, places)

        for i in range(len(scripts)):
            session.start(one(i))

    BatchSession(Writer(tokenizer, scripts)).run(begin)
    told = []
    for i in range(len(scripts)):
        rollout = found[i].rollout
        assert rollout is not None
        told.append((found[i], tokenizer.decode(rollout.response_tokens, skip_special_tokens=True)))
    return told


def call(code: str) -> str:
    return f"<tool>{code}</tool>"


def test_the_host_fails_the_episode_where_a_tool_raises() -> None:
    class Down:
        name = "down"

        async def __call__(self, argument: str) -> ToolResult:
            raise OSError("no sandbox today")

    (bad, _), (good, _) = played(ToolEnvironment([Down()], Block()), [call("x")], ["nothing to call"])
    assert bad.failure is not None
    assert bad.failure.startswith(f"turn 0: the environment failed: OSError: no sandbox today ({__file__}:")
    assert good.failure is None


@pytest.mark.needs("bwrap")
def test_text_that_is_no_unicode_does_not_fail_the_episode() -> None:
    """Half of a surrogate pair, by JSON's escapes; and bytes that are no text, by the tool's output."""
    turn = hermes({"name": "python", "arguments": {"code": "import sys; sys.stdout.buffer.write(bytes([255, 10]))"}})
    half = '<tool_call>{"name": "python", "arguments": {"code": "print(\'\\ud800\')"}}</tool_call>'
    environment = ToolEnvironment([PythonTool()], Hermes())
    (episode, text), (other, _) = played(environment, [turn, "done"], [half, "done"])
    assert (episode.failure, other.failure) == (None, None)
    assert "\ufffd" in text
