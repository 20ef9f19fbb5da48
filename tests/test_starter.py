"""`megarl init`: what it writes is valid, keeps the recipe's comments, and replaces nothing by itself."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny_families import write_family

from megarl.cli import main
from megarl.config import Config, file
from megarl.data.tiny import write_tiny_model
from megarl.ops import shipped
from megarl.ops.plan.plan import plan
from megarl.ops.starter import set_key


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115 - for the test
    return tmp_path


def init(*words: str) -> Config:
    assert main(["init", "run.toml", *words]) == 0
    return file.load("run.toml")


def recipe(name: str) -> Config:
    return file.parse(tomllib.loads(shipped.find(name).read_text()))


@pytest.mark.parametrize(
    ("nodes", "name"), [("1", "qwen3-30b-a3b-8gpu"), ("4", "qwen3-30b-a3b-32gpu"), ("8", "qwen3-30b-a3b-64gpu")]
)
def test_a_recipe_that_fits_is_taken_as_it_is(nodes: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = init("--model", "models/Qwen3-30B-A3B", "--nodes", nodes)
    wanted = recipe(name)
    assert found.model_copy(update={"run": wanted.run}) == wanted
    assert found.run.name == "run"
    comments = [line for line in shipped.find(name).read_text().splitlines() if line.startswith("#")]
    assert [line for line in Path("run.toml").read_text().splitlines() if line.startswith("#")] == comments
    told = capsys.readouterr().out
    assert f"the recipe {name}" in told
    script = "colocated" if nodes == "1" else "disaggregated"
    assert f"sbatch --nodes {nodes} --gpus-per-node 8 {script}.sbatch run.toml" in told


def test_answers_win_over_the_recipe_and_off_policy_steps_grow() -> None:
    words = ["--data", 'd"\\.jsonl', "--heldout", "h.jsonl", "--objective", "gspo", "--gpu-memory-gib", "140"]
    found = init("--model", "/w/qwen3-30b-a3b", "--nodes", "8", "--replay", "r3", *words)
    assert (found.model.path, found.data.train, found.data.heldout) == ("/w/qwen3-30b-a3b", 'd"\\.jsonl', "h.jsonl")
    assert (found.train.replay, found.train.mini_batches, found.rollout.prompts_per_step) == ("r3", 4, 256)
    assert (found.train.objective, found.eval.every, found.launch.gpu_memory_gib) == ("gspo", 20, 140)
    assert found.parallel == recipe("qwen3-30b-a3b-64gpu").parallel


@pytest.mark.parametrize("words", [["--gpus", "0"], ["--gpus", "4", "--nodes", "2"], ["--engine", "local"]])
def test_without_a_recipe_the_layout_divides_the_experts(words: list[str]) -> None:
    found = init("--model", "models/Qwen3-30B-A3B", *words)
    ranks = {"0": 1, "4": 8, "local": 8}[words[1]]
    assert found.check_world_size(found.launch.ranks).world_size == ranks
    assert found.parallel.ep == ranks  # 128 experts
    assert found.rollout.engine == ("sglang" if words[1] == "4" else "local")
    assert found.sglang.gpus == (list(range(4)) if words[1] == "4" else [])
    assert plan(found).layout.world_size == ranks


def test_without_a_recipe_the_model_says_its_lengths_and_whether_it_chats(folder: Path) -> None:
    write_tiny_model(folder / "model", seed=0)
    found = init("--model", "model", "--gpus", "0")
    assert not found.data.chat_template
    assert (found.data.max_prompt_tokens, found.rollout.max_response_tokens, found.parallel.ep) == (256, 256, 1)
    plan(found)
    (folder / "model" / "chat_template.jinja").write_text("{{ messages }}")
    assert init("--model", "model", "--gpus", "0", "--force").data.chat_template


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--model: missing"),
        (["--model", "m", "--gpus", "-1"], "--gpus: found '-1'"),
        (["--model", "m", "--nodes", "0"], "--nodes: found '0'"),
        (["--model", "m", "--gpus", str(10**9)], "--gpus: found '1000000000'"),
        (["--model", "m", "--gpus", "8", "--nodes", str(10**9)], "--nodes: found '1000000000'"),
        (["--model", "m", "--objective", "gpro"], "train.objective: found 'gpro'"),
        (["--model", "m", "--replay", "r4"], "--replay: found 'r4'"),
        (["--model", "models/Qwen3-30B-A3B", "--data", ""], "data.train"),
        (["--model", "m", "--optim.lr", "1"], "reads no configuration"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(
    words: list[str], told: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "run.toml", *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert not list(folder.iterdir())


def test_a_file_is_replaced_only_by_force(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text("mine")
    assert main(["init", "run.toml", "--model", "m"]) == 2
    assert "run.toml: exists; pass --force" in capsys.readouterr().err
    assert main(["init", "run.toml", "--model", "m", "--objective", "gpro", "--force"]) == 2
    assert main(["init", "run.toml", "--model", "m", "--force"]) == 2
    assert "run.toml exists, and megarl did not write it" in capsys.readouterr().err
    assert Path("run.toml").read_text() == "mine"
    Path("run.toml").unlink()
    init("--model", "m")
    init("--model", "m", "--force")
    assert main(["init", "none/run.toml", "--model", "m"]) == 2
    assert sorted(path.name for path in folder.iterdir()) == [".megarl-files.json", "run.toml"]


@contextmanager
def terminal(*flags: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """``megarl init run.toml`` with a terminal as its input, and what writes into that."""
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "megarl.cli", "init", "run.toml", *flags]
    with subprocess.Popen(words, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        os.close(theirs)
        yield process, ours
        os.close(ours)


def test_a_terminal_is_asked_again_until_an_answer_fits(folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "broken.jsonl").write_text("{")
    write_family(folder / "dense", "qwen3")
    expected = {
        "model": ["", "  ", "empty", "broken.jsonl", "a\x01b", "x" * 300, "dense"],
        "data": ["broken.jsonl", "dense/config.json", "\udcff", ""],
        "gpus": ["eight", "-3", "1.5", "7", "9" * 30, "0"],
        "nodes": ["0", "-1", "no", "100001", "1"],
        "replay": ["0", "R3", "r3", "none"],
    }
    answers = [line for lines in expected.values() for line in lines]
    with terminal() as (process, keyboard):
        for line in answers:
            os.write(keyboard, f"{line}\n".encode("utf-8", "surrogateescape"))
        told = process.communicate(timeout=3600)[0]
    assert process.returncode == 0, told
    assert told.count("]: ") + told.count("format): ") == len(answers)
    for part in (
        "--model: missing, expected a folder with config.json",
        "--model: found empty, which has no config.json",
        "broken.jsonl:1: broken JSON",
        "dense/config.json: cannot tell a format from the ending '.json'",
        "--gpus: found '-3', expected a whole number from 0 to 1024",
        "prompts_per_step * group_size = 512 responses, expected a multiple of",
        "--nodes: found '0', expected a whole number from 1 to 100000",
        "--replay: found '0', expected none, r2 or r3",
        'train.replay: found "r3", expected "none": the qwen3 model in model.path is dense',
    ):
        assert part in told
    assert file.load("run.toml").model.path == "dense"


@pytest.mark.parametrize("question", range(5))
def test_the_end_of_the_input_is_one_line(question: int, folder: Path) -> None:
    with terminal() as (process, keyboard):
        os.write(keyboard, b"m\nd\n0\n1\n"[: 2 * question] + b"\x04")
        told = process.communicate(timeout=3600)[0]
    assert process.returncode == 2
    name = ("model", "data", "gpus", "nodes", "replay")[question]
    assert f"\nmegarl: error: --{name}: the input ended, expected " in told
    assert not (folder / "run.toml").exists()


def test_a_flag_that_fits_no_answer_is_told_before_the_first_question(folder: Path) -> None:
    with terminal("--objective", "gpro") as (process, _):
        told = process.communicate(timeout=3600)[0]
    assert (process.returncode, told.count("\n")) == (2, 1)
    assert "train.objective: found 'gpro'" in told


def test_a_terminal_is_asked_for_what_no_flag_says(folder: Path) -> None:
    with terminal("--gpus", "8") as (process, keyboard):
        os.write(keyboard, b"models/Qwen3-30B-A3B\nmine.jsonl\n4\n\n")
        told = process.communicate(timeout=3600)[0]
    assert process.returncode == 0, told
    assert "GPUs on each node" not in told
    assert "prompts (" in told
    found = file.load("run.toml")
    assert (found.model.path, found.data.train, found.launch.nodes) == ("models/Qwen3-30B-A3B", "mine.jsonl", 2)


@pytest.mark.parametrize(
    ("text", "key", "value", "expected"),
    [
        ("[a]\nx = 1 # why\ny = 2\n", "a.x", 3, "[a]\nx = 3 # why\ny = 2\n"),
        ('[a]\nx = "# 1"   # why\n', "a.x", "b", '[a]\nx = "b"   # why\n'),
        ("[a]\nx = [1, 2]\n[b]\nx = 2\n", "b.x", [3], "[a]\nx = [1, 2]\n[b]\nx = [3]\n"),
        ("[a]\nx = 1\n\n[b]\ny = 2\n", "a.y", True, "[a]\nx = 1\ny = true\n\n[b]\ny = 2\n"),
        ("[a]\nxx = 1\n", "a.x", 2.5, "[a]\nxx = 1\nx = 2.5\n"),
        ("[a]\nx = 1\n", "c.x", "é", '[a]\nx = 1\n\n[c]\nx = "é"\n'),
    ],
)
def test_a_key_is_set_where_it_belongs(text: str, key: str, value: object, expected: str) -> None:
    found = set_key(text, key, value)
    assert tomllib.loads(found) == tomllib.loads(expected)
    assert found.count("#") == expected.count("#")
