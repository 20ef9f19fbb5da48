from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_configs import run_text

from megarl import cli, commands
from megarl.config.file import split_overrides
from megarl.errors import DataError

HEAVY = ("torch", "megatron.core", "transformers", "plotly", "datasets")


@pytest.fixture
def config_path(tmp_path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(run_text())
    return path


def megarl(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user does, with the log of every import on stderr."""
    words = [sys.executable, "-X", "importtime", "-m", "megarl.cli", *map(str, arguments)]
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(words, capture_output=True, text=True, env={**clean, **environment}, timeout=600)


def split_stderr(result: subprocess.CompletedProcess[str]) -> tuple[list[str], set[str]]:
    """Lines that the user sees, modules that were imported."""
    lines = result.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    return [line for line in lines if not line.startswith("import time:")], imported


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--rollout.temperature", "hot"], "--rollout.temperature: found 'hot'"),
        (["--steps", "3"], "unrecognized arguments: --steps 3; did you mean --run.steps or --sft.steps?"),
    ],
)
def test_a_wrong_setting_costs_one_line_and_exit_code_2_before_anything_heavy_is_imported(
    config_path, arguments, expected
):
    result = megarl("train", config_path, *arguments)
    lines, imported = split_stderr(result)
    assert (result.returncode, len(lines), result.stdout) == (2, 1, ""), lines
    assert lines[0].startswith("megarl: error: ")
    assert expected in lines[0]
    assert "megarl.config" in imported
    assert not imported.intersection(HEAVY)


def test_under_torchrun_the_layout_is_checked_and_only_the_first_rank_complains(config_path):
    first, second = (megarl("train", config_path, RANK=rank, WORLD_SIZE="3") for rank in ("0", "1"))
    assert first.returncode == second.returncode == 2
    assert "256 responses, expected a multiple of train.mini_batches * dp" in split_stderr(first)[0][0]
    assert split_stderr(second)[0] == []
    assert not split_stderr(second)[1].intersection(HEAVY)


def test_words_become_the_values_of_a_command():
    words = ["a", "b", "--dtype", "bf16", "--drop", "mtp.*", "*.eh", "--shard-gib", "3"]
    parsed = cli.parse_command(["convert", *words])
    assert parsed == commands.Convert(Path("a"), Path("b"), dtype="bf16", drop=("mtp.*", "*.eh"), shard_gib=3.0)
    assert cli.parse_command(["trace", "diff", "a", "b"]).files == (Path("a"), Path("b"))
    assert cli.parse_command(["doctor"]).config is None


def test_flags_win_over_the_file_and_have_the_type_of_their_key(config_path):
    words = ["train", str(config_path), "--rollout.temperature", "2", "--run.name=7", "--run.deterministic"]
    words += ["--parallel.etp", "none", "--recompute.granularity", "selective", "--recompute.modules", '["moe"]']
    words += ["--megatron.moe_aux_loss_coeff", "1e-3", "--megatron.moe_router_dtype", "fp32"]
    words += ["--train.objective_overrides.factors.0.high", "off", "--checkpoint.resume", "false"]
    rest, overrides = split_overrides(words)
    assert rest == ["train", str(config_path)]
    config = cli.config_file.load(config_path, overrides)
    assert config.rollout.temperature == 2.0
    assert config.run.name == "7"
    assert config.run.deterministic
    assert config.parallel.etp is None
    assert config.recompute.modules == ["moe"]
    assert config.megatron == {"moe_aux_loss_coeff": 1e-3, "moe_router_dtype": "fp32"}
    assert config.train.resolved_objective.factors[0].high is None
    assert not config.checkpoint.resume
    assert config.rollout.group_size == 8


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, "text", "with: colon", 1.5, [], ["a", 'b "c"']),
        {"policies": "old_mu", "high": 2.0, "strict": True},
        [{"policies": "theta_mu", "é.b": [1, 2]}, "package.module:function"],
    ],
)
def test_a_value_is_read_as_it_was_passed_on(value):
    """`megarl launch` passes flags on to every rank, tables among them."""
    key = "run.dir" if value is None else "train.objective_overrides.masks.1"
    assert split_overrides([f"--{key}", cli.config_file.as_flag(value)]) == ([], {key: value})


def test_errors_of_a_running_command_name_the_rank(monkeypatch, capsys, config_path):
    def fail(*arguments):
        raise DataError("train.jsonl, line 3:\n found no answer")

    monkeypatch.setattr(commands.Train, "load_for_ranks", fail)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train", str(config_path)]) == 2
    assert capsys.readouterr().err == "megarl: error (rank 1): train.jsonl, line 3: found no answer\n"


def test_a_module_beside_the_file_is_found_from_any_folder_by_the_console_script(tmp_path: Path):
    settings, elsewhere = tmp_path / "settings", tmp_path / "elsewhere"
    settings.mkdir()
    elsewhere.mkdir()
    (settings / "beside_the_file.py").write_text(
        "from dataclasses import replace\n"
        "from megarl.config.plugs import ENGINES\n"
        "from megarl.core.choices.parts import Factor\n"
        "from megarl.core.choices.table import OBJECTIVES\n"
        'factor = Factor("theta_old", fn="power", power=1.5)\n'
        'engine, objective = ENGINES["local"], replace(OBJECTIVES["power"], factors=(factor,))\n'
    )
    (settings / "run.toml").write_text(run_text(train__objective="beside_the_file:objective"))
    script = Path(sys.executable).with_name("megarl")
    words = [script, "doctor", "../settings/run.toml", "--rollout.engine", "beside_the_file:engine"]
    result = subprocess.run(words, cwd=elsewhere, capture_output=True, text=True, timeout=600)
    assert result.stdout.splitlines()[:1] == ["not ready for ../settings/run.toml: model.path, data.train"], (
        result.stderr
    )
    words = [script, "train", "../settings/run.toml", "--train.objective", "beside_it:objective"]
    result = subprocess.run(words, cwd=elsewhere, capture_output=True, text=True, timeout=600)
    assert result.returncode == 2
    assert "cannot import 'beside_it' (ModuleNotFoundError: No module named 'beside_it'); put the" in result.stderr
