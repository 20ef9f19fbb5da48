"""The environment of a configuration: what is made, and what is refused before anything is sampled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from megarl.config import EnvironmentConfig
from megarl.data.tiny import write_tiny_model
from megarl.engines.tools import sandbox
from megarl.engines.tools.environment import ToolEnvironment
from megarl.engines.tools.protocol import Environment, ModelTurn, Observation
from megarl.errors import ConfigError
from megarl.trainer.sampling.evaluation import make_environment, stop_ids

CODE = '''
"""Factories of a user."""

class Once:
    def __init__(self, text="x", **more):
        if more.get("fails"):
            raise RuntimeError("no\\nlicence")
        self.text = text

    def begin(self, prompt, seed):
        return self

    async def step(self, turn):
        from megarl.engines.tools.protocol import Observation
        return Observation(self.text, done=False)

    async def close(self):
        pass

class Shout:
    name = "shout"
    async def __call__(self, argument):
        from megarl.engines.tools.protocol import ToolResult
        return ToolResult(argument.upper(), "ok")

def refuses():
    from megarl.errors import ConfigError
    raise ConfigError("user: no GPU for the judge")

def nothing():
    return None
'''


@pytest.fixture(autouse=True)
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_by_user.py").write_text(CODE)
    (tmp_path / "broken_by_user.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)


def first_answer(environment: Environment | None, text: str) -> Observation:
    assert environment is not None
    turn = ModelTurn(0, np.zeros(1, np.int32), text, "stop")
    return asyncio.run(environment.begin("", 0).step(turn))


def test_a_function_of_the_user_gets_its_options_and_without_one_there_is_none() -> None:
    config = EnvironmentConfig(function="made_by_user:Once", options={"text": "hello"})
    assert first_answer(make_environment(config), "").text == "hello"
    assert make_environment(EnvironmentConfig()) is None


def test_tools_are_made_with_the_format_that_is_asked_for() -> None:
    made = make_environment(EnvironmentConfig(function="tools", tools=["calculator"]))
    assert isinstance(made, ToolEnvironment)
    assert first_answer(made, "<tool>2 ** 5</tool>").text == "\n<output>32</output>\n"
    settings: dict[str, Any] = {"call_open": "[", "call_close": "]", "observation": "{output};"}
    made = make_environment(EnvironmentConfig(function="tools", tools=["calculator"], **settings))
    assert first_answer(made, "[2 ** 5]").text == "32;"
    assert first_answer(made, "<tool>2 ** 5</tool>").done
    tools = ["calculator", "made_by_user:Shout"]
    made = make_environment(EnvironmentConfig(function="tools", tools=tools, format="hermes", observation="|{output}|"))
    both = (
        '<tool_call>{"name": "shout", "arguments": "a"}</tool_call><tool_call>{"name": "calculator", "arguments": "1"}'
    )
    assert first_answer(made, both).text == "|A\n</tool_response>\n<tool_response>\n1|"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"function": "gym"}, r"environment\.function: found 'gym', expected tools or package\.module:name"),
        ({"function": "no_such_module:f"}, "'no_such_module:f', but cannot import 'no_such_module' .*PYTHONPATH"),
        ({"function": "broken_by_user:f"}, r"cannot import 'broken_by_user' \(ZeroDivisionError: "),
        ({"function": "made_by_user:Once", "options": {"fails": True}}, "Once raised RuntimeError: no licence"),
        ({"function": "made_by_user:nothing", "options": {"x": 1}}, "nothing raised TypeError: .* keyword"),
        ({"function": "made_by_user:nothing"}, r"made a NoneType without begin\(prompt, seed\)"),
        ({"function": "made_by_user:refuses"}, r"^user: no GPU for the judge$"),
        ({"function": "tools", "tools": ["search"]}, r"environment\.tools: found 'search', expected calculator, "),
        ({"function": "tools", "tools": ["made_by_user:nothing"]}, "made a NoneType, expected a tool with a name"),
        (
            {"function": "tools", "tools": ["calculator"] * 2, "format": "hermes"},
            "at least one, with own names",
        ),
        pytest.param(
            {"function": "tools", "tools": ["python"], "python_memory_mb": 1},
            "memory_bytes may be too small",
            marks=pytest.mark.needs("bwrap"),
        ),
    ],
)
def test_what_cannot_be_made_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make_environment(EnvironmentConfig(**settings))


def test_without_bubblewrap_the_python_tool_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.shutil, "which", lambda *_, **__: None)
    with pytest.raises(ConfigError, match="found no bubblewrap"):
        make_environment(EnvironmentConfig(function="tools", tools=["python"]))


def test_stop_texts_are_single_tokens(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_tiny_model(tmp_path / "model", hidden_size=16, num_experts=2))
    assert stop_ids(tokenizer, []) == ()
    found = stop_ids(tokenizer, ["=", "a", "<eos>"])
    assert tokenizer.convert_ids_to_tokens(list(found)) == ["=", "a", "<eos>"]
    for text, size in (("ab", 2), ("", 0), ("==", 2)):
        with pytest.raises(ConfigError, match=rf"environment\.stop: {text!r} is {size} tokens of this tokenizer"):
            stop_ids(tokenizer, ["=", text])
