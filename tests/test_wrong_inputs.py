"""Sixty wrong inputs: each costs one line on stderr and exit code 2, which says what was found and what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_configs import run_text

from megarl import cli
from megarl.config.file import load
from megarl.data.tiny import write_sort_task, write_tiny_model
from megarl.errors import ConfigError
from megarl.run.folder import claim

CONFIG = run_text(
    run__dir="run", model__path="model", data__train="task/train.jsonl",
    sft={"data": "task/demonstrations.jsonl", "steps": 2, "batch_size": 4, "lr": 1e-3},
)  # fmt: skip
TRAIN = "train run.toml"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, its task and a configuration that could train."""
    folder = tmp_path_factory.mktemp("made")
    write_tiny_model(folder / "model", hidden_size=16, num_layers=1, num_experts=4, expert_width=8)
    write_sort_task(folder / "task", num_train=8, num_heldout=4, num_demonstrations=8)
    (folder / "run.toml").write_text(CONFIG)
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    shutil.copytree(made, folder)
    monkeypatch.chdir(folder)
    return folder


def text(name: str, old: str, new: str) -> Callable[[], None]:
    """Change a part of a file."""

    def change() -> None:
        before = Path(name).read_text()
        assert old in before
        Path(name).write_text(before.replace(old, new, 1))

    return change


def whole(name: str, content: bytes) -> Callable[[], None]:
    def write() -> None:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)

    return write


def config(old: str, new: str) -> Callable[[], None]:
    return text("run.toml", old, new)


def without(*names: str) -> Callable[[], object]:
    return lambda: [Path(name).unlink() for name in names]


def a_run(**status: Any) -> Callable[[], None]:
    def write() -> None:
        found = {"state": "finished", "phase": "", "host": "h", "step": 1, "steps": 3, "ranks": 1, "pid": 1}
        whole("run/status.json", json.dumps(found | status).encode())()
        whole("run/config.toml", CONFIG.encode())()
        whole("run/metrics.jsonl", b"")()

    return write


def lines(*records: object) -> Callable[[], None]:
    return whole("task/train.jsonl", b"".join(json.dumps(record).encode() + b"\n" for record in records))


def nothing() -> None:
    """The command alone is wrong."""


COMMANDS = """
 | expected one of train, launch
trian run.toml | did you mean train?
train | required: CONFIG
train run.toml --rollout.temprature 1 | did you mean rollout.temperature?
train run.toml --json | unrecognized arguments: --json
report run --run.steps 3 | remove --run.steps
train run.toml --rollout.temperature hot | found 'hot'
train run.toml --rollout.group_size 1e23 | --rollout.group_size: found '1e23'
train run.toml --train.replay r4 | input should be 'none', 'r2' or 'r3'
train run.toml --train.objective grop | expected one of minirl
quickstart --family gpt | invalid choice: 'gpt'
quickstart --out run.toml | cannot be made a folder
eval run.toml --data task/heldout.jsonl --k 0 | --k: found 0
eval run.toml --data aime99 | expected aime24, aime25, hmmt25
eval run.toml --data nowhere.jsonl | nowhere.jsonl: there is no such file
eval run.toml --data task/heldout.jsonl --model.path nowhere | model.path: there is no folder nowhere, expected a Hugg
trace diff a | found 1 files, expected 2
trace inspect nowhere | nowhere: there is no such file
recipes copy nowhere | found no recipe or script 'nowhere'
patch status nowhere | expected the folder that contains megatron/core
train nowhere.toml | nowhere.toml: cannot be read as a configuration file: No such
plan task | is a folder, FIFO, socket, device or broken link, expected a regular file
train run.toml --parallel.tp 2 | found 1 ranks, expected a multiple of tp
train run.toml --reward.function lost:it | cannot import 'lost'
sft run.toml --model.path nowhere | model.path: there is no folder nowhere
train run.toml --data.train run.toml | run.toml: cannot tell a format
status task | is no folder of a run that has begun
samples task | or this is no run folder
report task | metrics.jsonl: there is no such file
convert nowhere out | nowhere does not exist
convert task out | neither a Hugging Face folder
convert model model | would replace its own source
"""
"""Commands that are wrong by themselves, and a part of the line."""


def partition(line: str) -> list[str]:
    return line.split(" | ")


CASES: dict[str, tuple[str, Callable[[], object], str]] = {
    # name: command, what is done to the files before, what the line contains
    "not UTF-8": (TRAIN, whole("run.toml", b"\xff\xfe"), "cannot be read as a configuration file"),
    "not TOML": (TRAIN, whole("run.toml", b"{}"), "not valid TOML"),
    "empty": (TRAIN, whole("run.toml", b""), "run, model, data, rollout, optim: missing"),
    "a key misspelt": (
        TRAIN,
        config("steps = 3", "stps = 3"),
        "run.stps: unknown key; did you mean run.steps?",
    ),
    "a table misspelt": (TRAIN, config("[sft]", "[sfy]"), "[sfy]: unknown table; did you mean sft"),
    "two mistakes": (
        TRAIN,
        lambda: (config("steps = 3", "stps = 3")(), config("lr = 0.0001", "lr = 0.0")()),
        "3 problems: (1) run.stps: unknown key; did you mean run.steps? (2) optim.lr: found 0.0",
    ),
    "a count as 1e23": (TRAIN, config("group_size = 8", "group_size = 1e23"), "found 1e+23"),
    "a count of 24 digits": (
        TRAIN,
        config("group_size = 8", f"group_size = 1{'0' * 23}"),
        "found an integer of 77 bits, expected at most 63",
    ),
    "a NUL": (TRAIN, config('"model"', '"mo\\u0000del"'), "without NUL characters"),
    "one of two types": (TRAIN, config("[optim]", '[train]\nmax_k3 = "on"\n[optim]'), "'learn' or 'off', or input"),
    "no config.json": (TRAIN, without("model/config.json"), "model has no config.json"),
    "config.json is cut": (TRAIN, whole("model/config.json", b'{"model_type'), "holds no JSON"),
    "another architecture": (TRAIN, text("model/config.json", "qwen3_moe", "mamba"), "'mamba'"),
    "no tokenizer": ("sft run.toml", without("model/tokenizer.json"), "tokenizer: none in model, expected one of tok"),
    "tokenizer.json is cut": (TRAIN, whole("model/tokenizer.json", b"{"), "tokenizer.json holds no JSON"),
    "no weights": (TRAIN, lambda: [p.unlink() for p in Path("model").glob("*.safetensors")], "has no *.safe"),
    "data is not there": (TRAIN, without("task/train.jsonl"), "data.train: task/train.jsonl: there is no such file"),
    "data is empty": (TRAIN, whole("task/train.jsonl", b""), "expected at least one example"),
    "data is no JSON": (TRAIN, whole("task/train.jsonl", b"{\n"), "task/train.jsonl:1"),
    "data is not UTF-8": (TRAIN, whole("task/train.jsonl", b"\xff\xfe\n"), "task/train.jsonl"),
    "data without answers": (TRAIN, lines({"prompt": "1="}), "task/train.jsonl:1"),
    "a list for a record": (TRAIN, lines([1]), "task/train.jsonl:1"),
    "demonstrations without responses": (
        "sft run.toml",
        whole("task/demonstrations.jsonl", b'{"prompt": "1="}\n'),
        "sft.data: task/demonstrations.jsonl:1",
    ),
    "a status that is damaged": ("status run", a_run(step="one"), "status.json is damaged"),
    "metrics that are none": (
        "report run",
        lambda: (a_run()(), whole("run/metrics.jsonl", b"{}\n")()),
        "metrics.jsonl",
    ),
    "a checkpoint half written": (
        "convert run/checkpoints/step_0000001 out",
        whole("run/checkpoints/step_0000001/metadata.json", b"{}"),
        "step_0000001",
    ),
    "weights of another shape": (
        "convert model out",
        text("model/config.json", '"moe_intermediate_size": 8', '"moe_intermediate_size": 16'),
        "of another shape",
    ),
    "weights that are cut": (
        "convert model out",
        lambda: os.truncate(next(Path("model").glob("*.safetensors")), 1000),
        "truncated, or no safetensors file",
    ),
    "a name that is too long": (f"{TRAIN} --data.train {'a' * 300}.jsonl", nothing, "File name too long"),
}


@pytest.mark.parametrize(
    ("command", "prepare", "expected"),
    [
        *(pytest.param(*case, id=name) for name, case in CASES.items()),
        *((command, nothing, expected) for command, expected in map(partition, COMMANDS.strip("\n").splitlines())),
    ],
)
def test_a_wrong_input_costs_one_line_and_exit_code_2(
    command: str, prepare: Callable[[], object], expected: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare()
    capsys.readouterr()
    code = cli.main(command.split())
    printed = capsys.readouterr()
    assert (code, printed.err.count("\n"), printed.out) == (2, 1, ""), printed
    assert printed.err.startswith("megarl: error: ")
    assert expected in printed.err


def test_what_nobody_foresaw_costs_one_line_and_a_file(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("of a \x1b[31mkind")

    monkeypatch.setattr("megarl.commands.OnConfiguration.load_for_ranks", fail)
    for folder in (None, Path("run")):
        if folder:
            folder.mkdir()
        assert cli.main(["train", "run.toml"]) == 1
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "unexpected ZeroDivisionError: of a \\x1b[31mkind; the traceback is in " in said
        file = Path(said.partition("traceback is in ")[2].partition(", please")[0])
        assert "in fail" in file.read_text()
        assert (file == Path("run/ranks/00000.error.txt")) == bool(folder)
        file.unlink()


def test_torchrun_is_told_the_line(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends its own report with it."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(here / "error.json"))
    assert cli.main(["train", "run.toml", "--data.train", "nowhere.jsonl"]) == 2
    record = json.loads((here / "error.json").read_text())
    assert record["message"] == "megarl: error: data.train: nowhere.jsonl: there is no such file"
    assert isinstance(record["timestamp"], int)


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    """As in `megarl recipes | head -1`."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    words = [sys.executable, "-m", "megarl.cli", "recipes"]
    done = subprocess.run(words, stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_plan_is_json_for_programs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "run.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["worst_rank"]["peak"] > 0


STEP = '{"kind": "step", "step": 1, "minibatch": null, "wall_s": 1.0}\n'


def test_a_run_that_finished_no_step_holds_no_folder(here: Path) -> None:
    folder, metrics = here / "run", here / "run" / "metrics.jsonl"
    held, other = {"run.dir": str(folder)}, {"run.dir": str(folder), "optim.lr": 0.5}
    claim(load("run.toml", held))
    (folder / "notes.txt").write_text("mine")
    evaluated, update = (
        STEP.replace('"step",', f'"{kind}",').replace('": 1,', '": 0,') for kind in ("eval", "minibatch")
    )
    for text in ("", evaluated, evaluated + update.replace("null", "0"), evaluated + '{"kind": "st'):
        for resume in (True, False):
            claim(load("run.toml", held))
            metrics.write_text(text)
            claim(load("run.toml", {**other, "checkpoint.resume": resume}))  # which megarl train then writes anew
            assert "lr = 0.5" in (folder / "config.toml").read_text()
    assert (folder / "notes.txt").read_text() == "mine"
    assert not [*folder.glob("metrics.earlier*")]
    for text in (STEP, evaluated + STEP, f"{evaluated}broken\n{evaluated}"):
        (folder / "config.toml").unlink()
        claim(load("run.toml", held))
        metrics.write_text(text)
        with pytest.raises(ConfigError, match=r"holds a run with optim\.lr"):
            claim(load("run.toml", other))
        assert metrics.read_text() == text
    metrics.write_text(evaluated)
    (folder / "checkpoints" / "step_0000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"holds a run with optim\.lr"):
        claim(load("run.toml", other))


def test_a_run_folder_that_was_copied_asks_for_its_place(here: Path) -> None:
    claim(load("run.toml", {"run.dir": "run"}))
    assert load("run/config.toml").run_dir == Path("run")
    shutil.copytree("run", "copy")
    with pytest.raises(ConfigError, match=r"run\.dir is run, another folder: .* add --run\.dir "):
        load("copy/config.toml")
    assert load("copy/config.toml", {"run.dir": "copy"}).run_dir == Path("copy")
