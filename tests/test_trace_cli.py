"""``megarl trace`` as a user runs it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megarl import cli
from megarl.routes import RoutingTrace
from megarl.routes.trace_file import TracedSequence, TraceInfo, write_traces

INFO = TraceInfo("tiny", layers=(1, 2), num_experts=4, top_k=2)
A = [[[0, 1], [2, 3]], [[0, 1], [1, 3]], [[2, 3], [0, 1]]]
B = [[[0, 2], [2, 3]], [[0, 1], [1, 3]], [[0, 1], [2, 3]]]
PRESENT = np.array([True, True, True, False])


def traced(name: str, rows: list, present: np.ndarray | None = None, first_token: int = 0) -> TracedSequence:
    tokens = np.arange(first_token, first_token + len(rows), dtype=np.int32)
    versions = np.array([3] * (len(rows) - 1) + [5], dtype=np.int32)
    return TracedSequence(name, RoutingTrace(np.array(rows), 4, present=present), tokens, versions)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """a: three and four tokens, the last one without routes; b: the first of these, and another one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    write_traces("a.safetensors", INFO, [traced("s0", A), traced("s1", [*A, [[0, 0], [0, 0]]], PRESENT)])
    write_traces("b.safetensors", replace(INFO, model="tiny-fp8"), [traced("s0", B), traced("s2", B)])
    return tmp_path


def run(capsys, *words: str) -> list[list[str]]:
    """The words of every line."""
    assert cli.main(["trace", *words]) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]


def test_inspect(files, capsys):
    lines = [" ".join(words) for words in run(capsys, "inspect", "a.safetensors")]
    assert lines[1:] == [
        "model tiny",
        "MoE layers 2: 1-2",
        "experts top-2 of 4",
        "weight versions 3, 5",
        "per token besides routes tokens, row_versions",
        "sequences 2",
        "tokens 7, longest sequence 4",
        "missing rows 1 (14.29%)",
    ]


def test_diff(files, capsys):
    lines = run(capsys, "diff", "a.safetensors", "b.safetensors")
    assert ["1", "66.667%", "50.000%"] in lines
    assert ["2", "33.333%", "66.667%"] in lines
    assert ["all", "50.000%", "58.333%"] in lines
    text = "\n".join(" ".join(words) for words in lines)
    assert "The models differ: tiny against tiny-fp8." in text
    assert "3 tokens of 1 sequences compared; only in the first file 1, only in the second 1." in text
    assert "66.667% of the tokens differ in at least one layer, 1.000 layers per token" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["diff", "a.safetensors"], "megarl trace diff: found 1 files, expected 2"),
        (["draw", "a.safetensors"], "ACTION: found 'draw', expected inspect or diff"),
        (["inspect", "none.safetensors"], "none.safetensors: not a readable safetensors file (No such file"),
        (["inspect", "junk"], "junk: not a readable safetensors file"),
        (["diff", "a.safetensors", "wide.safetensors"], "has layers (1, 2), wide.safetensors has (0, 1)"),
        (["diff", "a.safetensors", "other.safetensors"], "no sequence of the same name"),
        (["diff", "a.safetensors", "text.safetensors"], "s0: token 0 is 0 in one file and 50 in the other"),
        (["diff", "a.safetensors", "long.safetensors"], "only traces of the same tokens and model compare"),
        (["diff", "a.safetensors", "holes.safetensors"], "no token has routes in both files"),
        (["inspect", "a.safetensors", "--run.steps", "3"], "megarl trace reads no configuration"),
    ],
)
def test_a_mistake_costs_one_line_and_exit_code_2(files, capsys, words, expected):
    (files / "junk").write_bytes(b"junk" * 9)
    write_traces("wide.safetensors", replace(INFO, layers=(0, 1)), [traced("s0", A)])
    write_traces("other.safetensors", INFO, [traced("t0", A)])
    write_traces("text.safetensors", INFO, [traced("s0", A, first_token=50)])
    write_traces("long.safetensors", INFO, [traced("s0", A + A)])
    write_traces("holes.safetensors", INFO, [traced("s0", A, np.zeros(3, dtype=bool))])
    before = sorted(path.name for path in files.iterdir())
    assert cli.main(["trace", *words]) == 2
    seen = capsys.readouterr()
    assert len(seen.err.splitlines()) == 1
    assert seen.err.startswith("megarl: error: ")
    assert expected in seen.err
    assert seen.out == ""
    assert sorted(path.name for path in files.iterdir()) == before
