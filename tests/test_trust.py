"""A configuration that somebody else may have written runs nothing and sends nothing, unless the user trusts it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_configs import run_text

from megarl import cli, commands
from megarl.config import file as config_file
from megarl.config.trust import PLUGS, POWERS
from megarl.engines.sglang import spec
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec
from megarl.engines.sglang.versions import installed_release, require_own
from megarl.errors import ConfigError
from megarl.ops.doctor import machine
from megarl.ops.evaluate.request import WITHOUT_TRAINING
from megarl.ops.launch.steps import Step

STRANGER = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a module that leaves a file behind when it is imported."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("strange_module", "marker"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    made = tmp_path / "theirs"
    made.mkdir()
    (made / "strange_module.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('marker').touch()\n"
        "from megarl.config.plugs import EngineKind\nmine = EngineKind('x:y', routes=True)\n"
    )
    return made


def write(folder: Path, **overrides: object) -> Path:
    path = folder / "run.toml"
    path.write_text(run_text(sft={"data": "demos.jsonl", "steps": 1, "batch_size": 1, "lr": 1e-4}, **overrides))
    return path


def give_away(*paths: Path) -> None:
    for path in paths:
        os.chown(path, STRANGER, -1)


ENGINE = {"rollout__engine": "strange_module:mine"}
COMMANDS = [name for name, command in commands.COMMANDS.items() if issubclass(command, commands.OnConfiguration)]


@pytest.mark.parametrize("command", [*COMMANDS, "doctor"])
def test_a_file_of_a_stranger_runs_nothing(folder: Path, command: str, capsys: pytest.CaptureFixture[str]):
    path = write(folder, **ENGINE)
    give_away(path)
    before = [*sys.path]
    assert cli.main([command, str(path)]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"{path} is not trusted: {path} belongs to" in told
    assert "rollout.engine = 'strange_module:mine'" in told
    assert "--trust" in told
    assert not (folder / "marker").exists()
    assert sys.path == before
    if command in ("plan", "doctor"):
        cli.main([command, "--trust", str(path)])
        assert (folder / "marker").exists()
        assert "not trusted" not in capsys.readouterr().err


def test_the_ranks_of_a_launch_are_told_of_the_trust(folder: Path, monkeypatch: pytest.MonkeyPatch):
    launched: list[list[str]] = []
    monkeypatch.setattr("megarl.ops.launch.supervisor.launch", lambda config, words: launched.append(words) or 0)
    monkeypatch.setattr("megarl.ops.doctor.inputs.require_inputs", lambda *_: None)  # there is no model
    path = write(folder, **ENGINE)
    give_away(path)
    assert cli.main(["launch", "--trust", str(path), "--run.steps", "4"]) == 0
    words = ["--trust", "--checkpoint", "a folder", "--data", "a.jsonl", "b.jsonl", "--k", "1", "4", "--samples", "4"]
    assert cli.main(["launch", "eval", str(path), *words, "--eval.temperature", "0.5"]) == 0
    (train, evaluation) = launched
    assert train == ["train", str(path), "--trust", "--run.steps", "4"]
    assert evaluation[:2] == ["eval", str(path)]
    read, overrides = config_file.split_overrides(evaluation[2:])
    assert sorted(read) == sorted(words)
    assert overrides == {**WITHOUT_TRAINING, "eval.temperature": 0.5}
    words, overrides = config_file.split_overrides(launched[0])
    assert (words, overrides) == (["train", str(path), "--trust"], {"run.steps": 4})


def test_every_key_that_may_name_code_is_in_the_list():
    named = {key for key, info in config_file.keys().items() if "package.module:" in (info.description or "")}
    assert named >= {"reward.function", "rollout.engine", "environment.tools"}
    assert named <= set(PLUGS)
    assert {*PLUGS, *POWERS} <= set(config_file.keys())


def test_data_of_a_stranger_is_read_without_their_folder(folder: Path):
    path = write(folder, environment={"function": "tools", "tools": ["calculator"]}, sglang__servers=2)
    give_away(folder, path)
    before = [*sys.path]
    assert config_file.load(path).sglang.servers == 2
    assert sys.path == before
    assert config_file.load(write(folder, **ENGINE), {"rollout.engine": "local"}).rollout.engine == "local"
    assert sys.path == before


def test_an_interpreter_in_the_folder_of_a_stranger_is_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Nor one behind a link to a good folder: Python reads pyvenv.cfg beside the link, and packages as it says."""
    python = folder / ".venv-sglang" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\ntouch {folder}/marker\necho 0.5.23\n")
    python.chmod(0o755)
    monkeypatch.chdir(folder)
    relative = Path(".venv-sglang/bin/python")
    for place in (python, python.parent):
        give_away(place)
        told = machine._check_sglang(None, None).says()
        assert "is not trusted" in told
        with pytest.raises(ConfigError, match="is not trusted"):
            Server(ServerSpec("model", relative, "float32", folder / "log")).start()
        os.chown(place, 0, 0)
    assert not (folder / "marker").exists()
    give_away(python)
    assert installed_release(python) == "0.5.23"  # the user has named it
    os.chown(python, 0, 0)
    assert installed_release(relative) == "0.5.23"
    real = Path(sys.executable).resolve()
    (folder / "linked").mkdir()
    (folder / "linked" / "bin").symlink_to(real.parent)
    require_own(Path("linked/bin") / real.name)
    give_away(folder / "linked")
    with pytest.raises(ConfigError, match=r"linked belongs to user"):
        require_own(Path("linked/bin") / real.name)


def test_programs_import_nothing_from_the_current_folder(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """csv is imported by importlib.metadata."""
    (folder / "csv.py").write_text(f"open({str(folder / 'marker')!r}, 'w')\n")
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match="has no SGLang"):
        installed_release(Path(sys.executable))
    environment = spec.environment(ServerSpec("model", sys.executable, "float32", folder / "log"))
    subprocess.run([sys.executable, "-c", "import csv"], env=environment, check=True)
    step = Step("step", [sys.executable, "-c", "import csv"])
    while step.code is None:
        time.sleep(0.05)
    assert step.code == 0
    assert not (folder / "marker").exists()
