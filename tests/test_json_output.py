"""What commands print with --json: the keys of docs/commands.md, and nothing besides JSON on stdout."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl import cli
from megarl.commands import COMMANDS
from megarl.routes import RoutingTrace
from megarl.routes.trace_file import TracedSequence, TraceInfo, write_traces

PAGE = (Path(__file__).parents[1] / "docs" / "commands.md").read_text()
KEYS = {
    words: set(re.findall(r"`(\w+)`", keys))
    for words, keys in re.findall(r"^\| `megarl ([a-z ]+)` \| (.*) \|$", PAGE, re.M)
}
INFO = TraceInfo("tiny", layers=(1, 2), num_experts=8, top_k=2)


def traced(first: int) -> list[TracedSequence]:
    experts = (np.arange(first, first + 40).reshape(10, 2, 2)) % 8
    return [TracedSequence("one", RoutingTrace(experts, 8), np.arange(10, dtype=np.int32))]


@pytest.fixture
def files(here: Path, core_tree: Callable[..., Path]) -> None:
    """What the commands below name, in the current folder."""
    core_tree("0.15.3", here / "core")
    core_tree("0.16.1", here / "new")
    write_traces("a.safetensors", INFO, traced(0))
    write_traces("b.safetensors", replace(INFO, model="other"), traced(2))


@pytest.mark.parametrize(
    ("command", "line", "code", "values"),
    [
        (
            "data prepare",
            "data prepare task/train.jsonl out",
            0,
            {"files": {"train": "out/train.jsonl"}, "unreadable": []},
        ),
        ("convert", "convert model out", 0, {"out": "out", "to": "megatron"}),
        ("quantize", "quantize model out --block 8 8", 0, {"out": "out", "to": "fp8", "block": [8, 8]}),
        ("patch", "patch check core", 0, {"version": "0.15.3", "patch": "0.15.3"}),
        ("patch", "patch apply core", 0, {"version": "0.15.3", "patch": "0.15.3"}),
        ("patch", "patch status core --version 0.14.0", 0, {"patch": "0.14.0"}),
        ("trace inspect", "trace inspect a.safetensors", 0, {"tokens": 10, "layers": [1, 2], "columns": ["tokens"]}),
        ("trace diff", "trace diff a.safetensors b.safetensors", 0, {"flip": 1.0, "sequences": 1}),
        ("verify", "verify a.safetensors a.safetensors", 0, {"is_right": True, "causes": []}),
        ("verify", "verify a.safetensors b.safetensors", 1, {"is_right": False, "compared": 20.0}),
        ("plan", "plan run.toml", 0, {}),
    ],
)
def test_the_keys_are_those_of_the_page(
    command: str, line: str, code: int, values: dict[str, Any], files: None, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert cli.main([*line.split(), "--json"]) == code
    printed = json.loads(capsys.readouterr().out)
    assert printed.keys() == KEYS[command]
    assert printed | values == printed


def test_every_command_with_the_flag_is_on_the_page() -> None:
    with_flag = {name for name, command in COMMANDS.items() if "json" in command.__pydantic_fields__}  # type: ignore[attr-defined]
    assert with_flag == {words.split()[0] for words in KEYS}


@pytest.mark.parametrize("line", ["patch check core --version 0.12.3", "quantize task out", "trace inspect run.toml"])
def test_an_error_is_one_line_and_no_json(line: str, files: None, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli.main([*line.split(), "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("megarl: error: ")
    assert not printed.out or json.loads(printed.out)["files"]
