"""Wrong inputs: each costs one line on stderr and exit code 2, which says what was found and what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl import cli
from megarl.config.file import load
from megarl.errors import ConfigError
from megarl.run.folder import claim

TRAIN = "train run.toml"


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


COMMANDS = """
 | expected train, launch
trian run.toml | did you mean train?
train | required: CONFIG
launch gap run.toml | megarl launch: found 'gap' and a further argument, expected CONFIG alone, or train, eval or sft
launch --trust evl run.toml | found 'evl' and a further argument
launch eval --samples 4 | found neither CONFIG nor --checkpoint
launch sft | megarl launch sft: the following arguments are required: CONFIG
eval --checkpoint task | task has no config.toml of a run in it or above it: give CONFIG
eval --checkpoint nowhere | nowhere (no such folder) has no config.toml of a run in it or above it: give CONFIG
train run.toml --parallel.tp 2 --parallel.ep 8 | ranks_per_node 16` starts them, as does torchrun --nproc-per-node 16
train run.toml --parallel.ep 2 | `megarl launch run.toml --parallel.ep 2 --launch.ranks_per_node 2` starts them, as d
train run.toml --parallel.tp 2 --launch.ranks_per_node 4 | `megarl launch run.toml --parallel.tp 2 --launch.ranks_per_n
sft run.toml --parallel.ep 2 --launch.ranks_per_node 2 | `megarl launch sft run.toml --parallel.ep 2 --launch.ranks_per
launch sft run.toml --parallel.ep 2 | found 1 ranks, expected a multiple of ep * etp * pp = 2 * 1 * 1 = 2; `megarl lau
launch run.toml --parallel.pp 3 | found 1 ranks, expected a multiple of tp * pp * cp = 1 * 3 * 1 = 3; `megarl launch C
launch eval run.toml --checkpoint x --data task/heldout.jsonl --parallel.ep 2 --launch.ranks_per_node 3 | found 3 ranks
report run --run.steps 3 | remove --run.steps
train run.toml --rollout.group_size 1e23 | --rollout.group_size: found '1e23'
quickstart --family gpt | --family: found 'gpt', expected qwen3_moe, qwen3, qwen2 or llama
quickstart --out run.toml | cannot be made a folder
eval run.toml --data task/heldout.jsonl --k 0 | --k: found 0
eval run.toml --data aime99 | expected aime24, aime25, hmmt25
eval run.toml --data nowhere.jsonl | nowhere.jsonl: there is no such file
eval run.toml --data task/heldout.jsonl --model.path nowhere | model.path: there is no folder nowhere, expected a Hugg
train nowhere.toml | nowhere.toml: cannot be read as a configuration file: No such
plan task | task is a folder, expected a regular file
sft run.toml --model.path nowhere | model.path: there is no folder nowhere
train run.toml --data.train run.toml | run.toml: cannot tell a format
--foo | megarl: unrecognized arguments: --foo; see megarl --help
train c.toml --lr=1 | unrecognized arguments: --lr=1; did you mean --optim.lr or --sft.lr?
gap x --tokens many | --tokens: found 'many', expected a whole number
gap nowhere --rollout.dtype fp32 | nowhere is not a folder; expected a Hugging Face folder
recipes copy qwen3-30b-a3b-8gp | did you mean qwen3-30b-a3b-8gpu?
recipes path ../shipped | found no recipe or script '../shipped'
recipes copy | megarl recipes copy: found no name
recipes copy cpu-quickstart run.toml | found a file, expected a folder or nothing
status task | is no folder of a run that has begun
samples task | or this is no run folder
report task | metrics.jsonl: there is no such file
convert nowhere out | nowhere does not exist
convert task out | neither config.json (a Hugging Face folder), metadata.json (torch_dist) nor a run; give
convert model model | would replace its own source
init --objective grop | copy a configuration with `megarl recipes copy starter FOLDER`
resume run | `megarl train CONFIG` goes on
patch chek | ACTION: found 'chek', expected check, apply, revert or status; did you mean check?
recipes lst | did you mean list?
convert a b --dtype bf61 | --dtype: found 'bf61', expected keep, fp32, bf16 or fp16; did you mean bf16?
quantize a b --block 128 | --block: found '128', expected 2 values, such as 128 128
quantize a b --block 1 2 3 | --block: found '1 2 3', expected 2 values, such as 128 128
quantize a b --block 128x128 | --block: found '128x128', expected a whole number
quantize a b --block | --block: expected at least one argument
eval run.toml --k | --k: expected at least one argument
gap x --responses 0 | --responses: found '0', expected a number greater than or equal to 1
doctor --config run.toml | unrecognized arguments: --config; see megarl doctor --help
trace inspect run.toml | RUN_DIR/traces: step_0000010.rollout.rank0000.safetensors
plan run.toml --jsn | unrecognized arguments: --jsn; did you mean --json?
train run.toml --run.steps | --run.steps: found no value, expected a whole number
train run.toml --run.steps --train.replay r3 | --run.steps: found no value, expected a whole number
train run.toml --optim.lr | --optim.lr: found no value, expected a number
train run.toml --model.path | --model.path: found no value, expected text
train run.toml --sglang.urls | --sglang.urls: found no value, expected a list
train run.toml --train.replay | --train.replay: found no value, expected none, r2 or r3
train run.toml --train.max_k3 on | --train.max_k3: found 'on', expected learn or off, or a number
train --checkpoint.resume run.toml | --checkpoint.resume: found 'run.toml', expected true or false
train run.toml --train.replay r4 | --train.replay: found 'r4', expected none, r2 or r3
train run.toml --train.objective grop | train.objective: found 'grop', did you mean grpo?
train run.toml --train.objective DAPO | train.objective: found 'DAPO', did you mean dapo?
train run.toml --train.objective zzz | train.objective: found 'zzz', expected minirl, minirl_length_norm,
train run.toml --rollout.engine sglng | rollout.engine: found 'sglng', expected local, sglang or package.module:name;
train run.toml --reward.function math_strikt | did you mean math_strict?
trace inspect run.toml | run.toml: not a readable safetensors file (text, begins with b'
trace inspect task | (task is a folder, expected a regular file); expected routing traces, which a run
trace inspect model/config.json | (text, begins with b'{
trace inspect model/model.safetensors | a safetensors file (format 'pt'); expected routing traces
verify run.toml run.toml | expected routing traces
"""
"""Commands that are wrong by themselves, and a part of the line."""


CASES: dict[str, tuple[str, Callable[[], object], str]] = {
    # name: command, what is done to the files before, what the line contains
    "not TOML": (TRAIN, whole("run.toml", b"{}"), "not valid TOML"),
    "empty": (TRAIN, whole("run.toml", b""), "run, model, data, rollout, optim: missing"),
    "a table misspelt": (TRAIN, text("run.toml", "[sft]", "[sfy]"), "sfy: unknown key; did you mean sft"),
    "a NUL": (TRAIN, text("run.toml", '"model"', '"mo\\u0000del"'), "without NUL characters"),
    "one of two types": (
        TRAIN,
        text("run.toml", "[optim]", '[train]\nmax_k3 = "on"\n[optim]'),
        "expected learn or off, or a number",
    ),
    "another architecture": (TRAIN, text("model/config.json", "qwen3_moe", "mamba"), "'mamba'"),
    "no tokenizer": (
        "sft run.toml",
        lambda: Path("model/tokenizer.json").unlink(),
        "tokenizer: none in model",
    ),
    "no weights": (TRAIN, lambda: [p.unlink() for p in Path("model").glob("*.safetensors")], "has no *.safe"),
    "data is empty": (TRAIN, whole("task/train.jsonl", b""), "expected at least one example"),
    "data is no JSON": (TRAIN, whole("task/train.jsonl", b"{\n"), "task/train.jsonl:1"),
    "data without answers": (TRAIN, whole("task/train.jsonl", b'{"prompt": "1="}\n'), "task/train.jsonl:1"),
    "a checkpoint half written": (
        "convert run/checkpoints/step_0000001 out",
        whole("run/checkpoints/step_0000001/metadata.json", b"{}"),
        "step_0000001",
    ),
    "an empty trace": ("trace inspect empty", whole("empty", b""), "(it is empty); expected routing traces"),
    "a type in the file": (
        TRAIN,
        text("run.toml", "[optim]", "[train]\nreplay = 3\n[optim]"),
        "found 3, expected none,",
    ),
    "a name that is too long": (f"{TRAIN} --data.train {'a' * 300}.jsonl", lambda: None, "File name too long"),
}


@pytest.mark.parametrize(
    ("command", "prepare", "expected"),
    [
        *(pytest.param(*case, id=name) for name, case in CASES.items()),
        *((command, lambda: None, told) for command, told in (row.split(" | ") for row in COMMANDS.splitlines()[1:])),
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
