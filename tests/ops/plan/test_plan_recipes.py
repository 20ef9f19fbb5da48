"""The recipes: planned on the GPUs that they name, what the paper and the quickstart say, copied as a whole."""

from __future__ import annotations

import itertools
import json
import os
import re
import tomllib
from pathlib import Path

import pytest
from plan_worlds import ROOT

from megarl import cli
from megarl.config import file as config_file
from megarl.data.tiny import write_tiny_model
from megarl.files.hf_config import MoeShape
from megarl.models.shapes import read_shape
from megarl.ops import shipped
from megarl.ops.plan.plan import plan
from megarl.ops.quickstart import RANKS, config_text
from megarl.ops.shipped import MODELS, RECIPES

SCRIPTS = ("colocated.sbatch", "disaggregated.sbatch", "heterogeneous.sbatch", "local.sh")

NAMES = sorted(path.stem for path in RECIPES.glob("*.toml"))
LARGE = [name for name in NAMES if name not in ("cpu-quickstart", "starter")]
OFF_POLICY = re.findall(r"`(--rollout\.prompts_per_step[^`]*)`", (ROOT / "docs/recipes.md").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_planned_where_it_says(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(RECIPES)
    model = ["--model", str(MODELS / "Moonlight-16B-A3B")] if name == "starter" else []
    assert cli.main(["plan", f"{name}.toml", *model]) == 0
    told = capsys.readouterr().out
    assert "trainer's GPU, with reserves" in told
    if gpus := re.fullmatch(r"qwen3-30b-a3b-(\d+)gpu", name):
        config = config_file.load(f"{name}.toml")
        found = plan(config)
        assert config.launch.ranks + (found.server_gpus if config.launch.apart else 0) == int(gpus[1])


@pytest.mark.parametrize("name", LARGE)
def test_a_recipe_is_the_papers(name: str) -> None:
    """Clip 0.2/0.27, cap 5, mini-batches of 64 x 16, 32768 tokens, FP8 rollout, BF16 training; on-policy, but R3."""
    config = config_file.load(RECIPES / f"{name}.toml")
    objective = config.train.resolved_objective
    (mask,), (factor,) = objective.records, objective.factors
    assert (mask.policies, mask.low, mask.high, mask.sign) == ("theta_old", 0.8, 1.27, "outward")
    assert (factor.policies, factor.high) == ("theta_mu", 5.0)
    assert (config.rollout.prompts_per_step, config.rollout.group_size, config.train.mini_batches) == (64, 16, 1)
    assert config.rollout.max_response_tokens == (7168 if "moonlight" in name else 32768)
    assert config.model.dtype == "bf16"
    in_high_precision = ("glm", "gpt-oss", "qwen3-next")
    assert config.sglang.fp8 == (not name.startswith(in_high_precision))
    assert config.launch.gpu_memory_gib in (79.0, 140.0)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_replays_as_the_readme_says_and_tells_the_cost(name: str) -> None:
    """The comment's bytes are those of plan, and "none" would save none of them."""
    (recommended,) = re.findall(r'`train\.replay = "(\w+)"`', (ROOT / "README.md").read_text())
    text, config = (RECIPES / f"{name}.toml").read_text(), config_file.load(RECIPES / f"{name}.toml")
    assert config.train.replay == recommended == type(config.train).model_fields["replay"].default
    if name not in LARGE:
        return
    found = plan(config)
    assert found == plan(config_file.load(RECIPES / f"{name}.toml", {"train.replay": "none"}))
    folder = MODELS / Path(config.model.path).name
    moe = MoeShape.of(json.loads((folder / "config.json").read_text()))
    per_token = len(moe.moe_layers) * moe.topk * (1 if moe.num_experts <= 256 else 2)
    assert f"Cost: {per_token} bytes of routes per token, {found.memory.recorded / 2**20:g} MiB on a GPU" in text
    if name == "qwen3-30b-a3b-64gpu":
        told = (ROOT / "docs/recipes.md").read_text()
        for cost in (per_token, f"{found.memory.recorded >> 20} MiB", f"{found.memory.host_routes >> 20} MiB"):
            assert f"| {cost}" in told


def test_off_policy_variants_are_those_of_the_paper_and_planned() -> None:
    """R2 for N = 2, R3 for 4 and 8; every mini-batch keeps its 1024 responses."""
    found = [re.findall(r"mini_batches (\d) .*replay (r\d)", flags)[0] for flags in OFF_POLICY]
    assert found == [("2", "r2"), ("4", "r3"), ("8", "r3")]
    for name, flags in itertools.product(LARGE, OFF_POLICY):
        config = config_file.load(RECIPES / f"{name}.toml", config_file.split_overrides(flags.split())[1])
        assert config.responses_per_step // config.train.mini_batches == 1024
        plan(config)


def test_the_cpu_recipe_is_the_quickstart_and_so_is_its_model(tmp_path: Path) -> None:
    folder = "runs/quickstart"
    paths = {name: Path(folder, name) for name in ("config", "run", "model", "task")}
    recipe = tomllib.loads((RECIPES / "cpu-quickstart.toml").read_text())
    assert recipe == tomllib.loads(config_text("qwen3_moe", **paths))
    assert recipe["launch"] == {"ranks_per_node": RANKS}
    write_tiny_model(tmp_path / "model", seed=0)
    assert read_shape(MODELS / "quickstart") == read_shape(tmp_path / "model")


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_list_describes_every_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes"]) == 0
    listed = [line.split() for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert [words[0] for words in listed] == sorted(path.stem for path in RECIPES.glob("*.toml"))
    assert all(len(words) > 3 for words in listed)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "qwen3-30b-a3b-32gpu",
            {"qwen3-30b-a3b-32gpu.toml", *SCRIPTS, "models/Qwen3-30B-A3B/config.json"},
        ),
        ("starter", {"starter.toml", *SCRIPTS}),
        ("Containerfile", {"Containerfile", "requirements-sglang.txt", "requirements-trainer.txt"}),
    ],
)
def test_a_copy_brings_what_the_recipe_needs(
    name: str, expected: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["recipes", "copy", name, str(tmp_path / "new" / "folder")]) == 0
    folder = tmp_path / "new" / "folder"
    assert files(folder) == expected
    assert capsys.readouterr().out.split() == [str(folder / file) for file in shipped._parts(name)]
    for file in expected:
        assert os.access(folder / file, os.X_OK) == file.endswith((".sh", ".sbatch"))


def test_what_is_there_already_is_copied_again_only_if_it_is_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["recipes", "copy", "cpu-quickstart", str(tmp_path)]
    assert cli.main(words) == cli.main(words) == 0
    (tmp_path / "local.sh").write_text("mine\n")
    (tmp_path / "cpu-quickstart.toml").unlink()
    assert cli.main(words) == 2
    assert f"{tmp_path}/local.sh exists and is another file; nothing was copied" in capsys.readouterr().err
    assert files(tmp_path) == {*SCRIPTS}
    assert (tmp_path / "local.sh").read_text() == "mine\n"
