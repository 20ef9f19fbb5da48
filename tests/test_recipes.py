"""`megarl recipes`: what is listed, what is copied, and that nothing is overwritten."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.ops import shipped


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_list_describes_every_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    listed = [line.split() for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert [words[0] for words in listed] == sorted(path.stem for path in shipped.RECIPES.glob("*.toml"))
    assert all(len(words) > 3 for words in listed)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "qwen3-30b-a3b-8gpu",
            {"qwen3-30b-a3b-8gpu.toml", "colocated.sbatch", "local.sh", "models/Qwen3-30B-A3B/config.json"},
        ),
        (
            "qwen3-30b-a3b-32gpu",
            {
                "qwen3-30b-a3b-32gpu.toml",
                "disaggregated.sbatch",
                "heterogeneous.sbatch",
                "models/Qwen3-30B-A3B/config.json",
            },
        ),
        ("cpu-quickstart", {"cpu-quickstart.toml", "local.sh"}),
        ("starter", {"starter.toml", "local.sh"}),
        ("colocated.sbatch", {"colocated.sbatch"}),
        ("Containerfile", {"Containerfile", "requirements-sglang.txt", "requirements-trainer.txt"}),
    ],
)
def test_a_copy_brings_what_the_recipe_needs(
    name: str, expected: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", "copy", name, str(tmp_path / "new" / "folder")]) == 0
    folder = tmp_path / "new" / "folder"
    assert files(folder) == expected
    assert capsys.readouterr().out.split() == [str(folder / file) for file in shipped._parts(name)]
    for file in expected:
        assert os.access(folder / file, os.X_OK) == file.endswith((".sh", ".sbatch"))


def test_what_is_there_already_is_copied_again_only_if_it_is_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["recipes", "copy", "cpu-quickstart", str(tmp_path)]
    assert main(words) == main(words) == 0
    (tmp_path / "local.sh").write_text("mine\n")
    (tmp_path / "cpu-quickstart.toml").unlink()
    assert main(words) == 2
    assert f"{tmp_path}/local.sh exists and is another file; nothing was copied" in capsys.readouterr().err
    assert files(tmp_path) == {"local.sh"}
    assert (tmp_path / "local.sh").read_text() == "mine\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["copy", "qwen3-30b-a3b-8gp"], "did you mean qwen3-30b-a3b-8gpu?"),
        (["path", "../shipped"], "found no recipe or script '../shipped'"),
        (["copy"], "megarl recipes copy: found no name"),
        (["copy", "cpu-quickstart", "file"], "found a file, expected a folder or nothing"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert main(["recipes", *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert files(tmp_path) == {"file"}
