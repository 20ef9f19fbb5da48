"""No command removes, replaces or empties what megarl did not write: each is sent to a place with files of others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from run_configs import TRAINABLE

from megarl import cli
from megarl.errors import ConfigError
from megarl.files.outputs import begin, free_name, marked, partial_of, remove_own, replace_folder, require_own, seal
from megarl.megatron import distributed

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
    "convert": "convert model theirs --overwrite",
    "convert, unasked": "convert model theirs",
    "convert, unfinished": "convert model new",
    "convert, a file": "convert model theirs/page.html --overwrite",
    "convert back": "convert converted theirs --overwrite",
    "quantize": "quantize model theirs --overwrite",
    "data prepare": "data prepare task/train.jsonl theirs --overwrite",
    "report": "report made --out theirs/page.html",
    "report, inside": "report theirs",
    "quickstart": "quickstart --out theirs",
    "train": "train run.toml --run.dir theirs",
    "eval": "eval run.toml --out theirs",
}

REFUSED = ("megarl did not write", "would replace its own source", "is no folder", "no run wrote it", "--out theirs")


@pytest.fixture(scope="module")
def made(trainable: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(trainable, tmp_path_factory.mktemp("made") / "files")
    text = TRAINABLE.replace("[sft]", '[sft]\nout = "theirs"').replace(
        "[data]", '[data]\nheldout = "task/heldout.jsonl"'
    )
    (folder / "run.toml").write_text(text)
    (folder / "made").mkdir()
    (folder / "made" / "metrics.jsonl").write_text(STEP)
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


def change_content(folder: Path) -> None:
    (folder / "a.txt").write_text("A.txt")
    os.utime(folder / "a.txt", ns=(1, 1))


TOUCHED: dict[str, Callable[[Path], object]] = {
    "a file more": lambda folder: (folder / "notes.txt").write_text("mine"),
    "an empty folder more": lambda folder: (folder / "mine").mkdir(),
    "a link more": lambda folder: (folder / "mine").symlink_to(folder.parent),
    "another content": change_content,
    "no mark": lambda folder: (folder / ".megarl.json").unlink(),
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
