"""No command removes, replaces or empties what megarl did not write: each is sent to a place with files of others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megarl import cli
from megarl.data.tiny import write_sort_task, write_tiny_model
from megarl.errors import ConfigError, MegarlError
from megarl.files.outputs import begin, free_name, marked, partial_of, remove_own, replace_folder, require_own, seal
from megarl.megatron import distributed
from megarl.ops.quickstart import quickstart
from megarl.routes import RoutingTrace
from megarl.routes.trace_file import TracedSequence, TraceInfo, write_traces

CONFIG = """
[run]
steps = 2
dir = "run"
[model]
path = "model"
dtype = "fp32"
[data]
train = "task/train.jsonl"
heldout = "task/heldout.jsonl"
max_prompt_tokens = 32
[rollout]
prompts_per_step = 4
group_size = 2
max_response_tokens = 8
[optim]
lr = 1e-3
[sft]
data = "task/demonstrations.jsonl"
out = "theirs"
steps = 1
batch_size = 4
lr = 1e-3
"""
STEP = '{"kind": "step", "step": 1, "minibatch": null, "wall_s": 1.0, "loss": 1.0}\n'
NAMES = (
    *("model.safetensors.index.json", "model-00001.safetensors", "config.json", "manifest.json", ".metadata"),
    *("common.pt", ".git/HEAD", "notes/thesis.tex", "train.jsonl", "heldout.jsonl", "page.html", "quickstart.toml"),
    *("config.toml", "metrics.jsonl", "samples.jsonl", "status.json", "checkpoints/step_0000001/thesis.tex"),
    *("eval.json", "heldout/responses.jsonl", "report/index.html"),
)
COMMANDS = {
    "sft": "sft run.toml",
    "sft, unfinished": "sft run.toml --sft.out new",
    "sft, its model": "sft run.toml --sft.out model",
    "sft, around its model": "sft run.toml --sft.out .",
    "sft, a link": "sft run.toml --sft.out link",
    "sft, a file": "sft run.toml --sft.out theirs/page.html",
    "convert": "convert model theirs --overwrite",
    "convert, unasked": "convert model theirs",
    "convert, unfinished": "convert model new",
    "convert, a link": "convert model link --overwrite",
    "convert, a file": "convert model theirs/page.html --overwrite",
    "convert back": "convert converted theirs --overwrite",
    "quantize": "quantize model theirs --overwrite",
    "init": "init theirs/config.toml --model model --data task/train.jsonl --gpus 0 --force",
    "report": "report made --out theirs/page.html",
    "report, inside": "report theirs",
    "trace": "trace diff a b --out theirs/page.html",
    "simulate": "simulate --rates 0.5:4 --out theirs/page.html",
    "quickstart": "quickstart --out theirs",
    "quickstart, other files": "quickstart --out theirs/notes",
    "train": "train run.toml --run.dir theirs",
    "eval": "eval run.toml --out theirs",
}

REFUSED = ("megarl did not write", "would replace its own source", "is no folder", "no run wrote it", "--out theirs")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    write_tiny_model(folder / "model", hidden_size=16, num_layers=1, num_experts=2, expert_width=8)
    write_sort_task(folder / "task", num_train=16, num_heldout=4, num_demonstrations=16)
    (folder / "run.toml").write_text(CONFIG)
    (folder / "made").mkdir()
    (folder / "made" / "metrics.jsonl").write_text(STEP)
    experts = np.array([[[0, 1]], [[2, 3]]], np.int32)
    for name in ("a", "b"):
        write_traces(folder / name, TraceInfo("tiny", (0,), 4, 2), [TracedSequence("s", RoutingTrace(experts, 4))])
    assert cli.main(["convert", str(folder / "model"), str(folder / "converted")]) == 0
    return folder


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of change of every file."""
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("name", COMMANDS)
def test_files_of_others_stay(
    name: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = shutil.copytree(made, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(here)
    for folder in ("theirs", "new.partial", "new.old"):
        for file in NAMES:
            (here / folder / file).parent.mkdir(parents=True, exist_ok=True)
            (here / folder / file).write_text(STEP if file == "metrics.jsonl" else f"mine = '{file}'")
    (here / "link").symlink_to("theirs")
    before = tree(here)
    try:
        assert cli.main(COMMANDS[name].split()) == 2
    finally:
        if dist.is_initialized():
            distributed.shutdown()
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert [word for word in REFUSED if word in told], told
    assert {path: state for path, state in tree(here).items() if path in before} == before


def write(folder: Path, *names: str) -> None:
    begin(folder, ["*.txt", "in/*.txt"])
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    seal(folder)


def change_size(folder: Path) -> None:
    (folder / "a.txt").write_text("longer than before")


def change_content(folder: Path) -> None:
    (folder / "a.txt").write_text("A.txt")
    os.utime(folder / "a.txt", ns=(1, 1))


TOUCHED: dict[str, Callable[[Path], object]] = {
    "a file more": lambda folder: (folder / "notes.txt").write_text("mine"),
    "a file more, below": lambda folder: (folder / "in" / "notes").write_text("mine"),
    "an empty folder more": lambda folder: (folder / "mine").mkdir(),
    "a link more": lambda folder: (folder / "mine").symlink_to(folder.parent),
    "a link in place of a file": lambda folder: (
        (folder / "a.txt").unlink(),
        (folder / "a.txt").symlink_to("/dev/null"),
    ),
    "another size": change_size,
    "another content": change_content,
    "no mark": lambda folder: (folder / ".megarl.json").unlink(),
    "a mark that is none": lambda folder: (folder / ".megarl.json").write_text("[1]"),
    "a mark of other types": lambda folder: (folder / ".megarl.json").write_text('{"files": [], "patterns": {}}'),
}


@pytest.mark.parametrize("name", TOUCHED)
def test_a_folder_that_was_touched_is_not_replaced(name: str, tmp_path: Path) -> None:
    out, new = tmp_path / "out", tmp_path / "out.partial"
    write(out, "a.txt", "in/b.txt")
    require_own(out)
    TOUCHED[name](out)
    before = tree(tmp_path)
    for refused in (lambda: require_own(out), lambda: begin(out, ["*"])):
        with pytest.raises(ConfigError, match=r"out holds .*, which megarl did not write or which was changed since"):
            refused()
    assert tree(tmp_path) == before
    write(new, "c.txt")
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match=r"out\.partial is whole: rename it"):
        replace_folder(new, out)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_of_megarl_is_replaced_as_a_whole(
    exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr("megarl.files.outputs.exchange", lambda first, second: False)
    out = tmp_path / "out"
    write(out, "a.txt", "in/b.txt")
    (out / "a.txt").unlink()  # what is gone is nobody's
    begin(partial_of(out), ["*.txt"])
    (partial_of(out) / "half.txt").write_text("")  # a kill leaves this
    write(partial_of(out), "c.txt")
    assert not (partial_of(out) / "half.txt").exists()
    (partial_of(out) / "appeared").write_text("mine")  # is put in place, but not listed
    replace_folder(partial_of(out), out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert sorted(path.name for path in out.iterdir()) == [".megarl.json", "appeared", "c.txt"]
    assert remove_own(out, marked(out)) == ["appeared"]
    assert [path.name for path in out.iterdir()] == ["appeared"]
    (tmp_path / "link").symlink_to(out)
    assert remove_own(tmp_path / "link", lambda name, found: True) == []
    assert (out / "appeared").exists()
    assert free_name(out / "appeared") == out / "appeared-2"


def test_a_folder_stays_of_megarl_where_flushing_sets_the_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = os.fsync

    def flush_and_set_time(descriptor: int) -> None:
        flush(descriptor)
        os.utime(descriptor, (1_700_000_000, 1_700_000_000))

    monkeypatch.setattr(os, "fsync", flush_and_set_time)
    write(tmp_path / "out", "a.txt", "in/b.txt")
    require_own(tmp_path / "out")


def test_a_finished_quickstart_is_named_also_where_its_configuration_was_edited(tmp_path: Path) -> None:
    page, settings = tmp_path / "run" / "report" / "index.html", tmp_path / "quickstart.toml"
    page.parent.mkdir(parents=True)
    page.write_text("")
    (tmp_path / "run" / "metrics.jsonl").write_text(STEP)
    settings.write_text("# mine")
    with pytest.raises(MegarlError, match=r"finished quickstart, see .*index\.html; to train on"):
        quickstart(tmp_path)
    assert settings.read_text() == "# mine"
