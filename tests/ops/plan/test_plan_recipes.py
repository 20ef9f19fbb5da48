"""The recipes: valid, planned on the GPUs that they name, and what the paper and the quickstart say."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from plan_worlds import ROOT

from megarl import cli
from megarl.config import file as config_file
from megarl.data.tiny import write_tiny_model
from megarl.models.shapes import read_shape
from megarl.ops.plan.plan import plan
from megarl.ops.quickstart import RANKS, config_text
from megarl.ops.shipped import MODELS, RECIPES

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


@pytest.mark.parametrize("name", LARGE)
def test_a_recipe_is_the_papers(name: str) -> None:
    """Clip 0.2/0.27, cap 5, mini-batches of 64 x 16, 32768 tokens, FP8 rollout, BF16 training; on-policy."""
    config = config_file.load(RECIPES / f"{name}.toml")
    objective = config.train.resolved_objective
    (mask,), (factor,) = objective.records, objective.factors
    assert (mask.policies, mask.low, mask.high, mask.sign) == ("theta_old", 0.8, 1.27, "outward")
    assert (factor.policies, factor.high) == ("theta_mu", 5.0)
    assert (config.rollout.prompts_per_step, config.rollout.group_size, config.train.mini_batches) == (64, 16, 1)
    assert config.rollout.max_response_tokens == (7168 if "moonlight" in name else 32768)
    assert (config.train.replay, config.model.dtype) == ("none", "bf16")
    assert config.sglang.fp8 == ("glm" not in name)
    assert config.launch.gpu_memory_gib in (79.0, 140.0)


def test_off_policy_flags_are_those_of_the_paper() -> None:
    """R2 for N = 2, R3 for 4 and 8; every mini-batch keeps its 1024 responses."""
    assert [re.findall(r"mini_batches (\d) .*replay (r\d)", flags)[0] for flags in OFF_POLICY] == [
        ("2", "r2"),
        ("4", "r3"),
        ("8", "r3"),
    ]


@pytest.mark.parametrize("flags", OFF_POLICY)
@pytest.mark.parametrize("name", LARGE)
def test_off_policy_variants_are_planned(name: str, flags: str) -> None:
    _, overrides = config_file.split_overrides(flags.split())
    path = RECIPES / f"{name}.toml"
    config = config_file.load(path, overrides)
    assert config.responses_per_step // config.train.mini_batches == 1024
    plan(config)


@pytest.mark.parametrize(("name", "gpus"), [("8gpu", 8), ("32gpu", 32), ("64gpu", 64)])
def test_qwen3_30b_uses_the_gpus_of_its_name(name: str, gpus: int) -> None:
    path = RECIPES / f"qwen3-30b-a3b-{name}.toml"
    config = config_file.load(path)
    found = plan(config)
    apart = found.server_gpus if config.launch.apart else 0
    assert found.layout.world_size + apart == gpus


def test_the_cpu_recipe_is_the_quickstart() -> None:
    folder = "runs/quickstart"
    paths = {name: Path(folder, name) for name in ("config", "run", "model", "task")}
    recipe = tomllib.loads((RECIPES / "cpu-quickstart.toml").read_text())
    assert recipe == tomllib.loads(config_text("qwen3_moe", **paths))
    assert recipe["launch"] == {"ranks_per_node": RANKS}


def test_the_shipped_model_of_the_quickstart_is_the_one_that_it_makes(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", seed=0)
    assert read_shape(MODELS / "quickstart") == read_shape(tmp_path / "model")


def test_a_recipe_on_smaller_gpus_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(RECIPES)
    words = ["plan", "qwen3-30b-a3b-8gpu.toml", "--launch.gpu_memory_gib", "79"]
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megarl: error: launch.gpu_memory_gib: a rank of stage 0 with a server on its GPU needs")
