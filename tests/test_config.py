from __future__ import annotations

import dataclasses
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_configs import SMALLEST, parsed

from megarl.config import Config
from megarl.config import file as config_file
from megarl.config.tables.base import Table
from megarl.core.choices.parts import PARTS as OBJECTIVE_PARTS
from megarl.core.choices.parts import Factor, Mask, Penalty
from megarl.core.choices.table import OBJECTIVES
from megarl.errors import ConfigError

RECIPES = Path(__file__).parents[1] / "launch" / "recipes"
SFT = {"data": "demos.jsonl", "steps": 5, "batch_size": 6, "lr": 1e-3}


def test_defaults_are_resolved_and_overrides_win():
    config = parsed(rollout__temperature=0.7)
    assert config.rollout.temperature == 0.7
    assert config.rollout.top_p == 1.0
    assert config.run.dir == "runs/run"
    assert parsed(run__name="a").run.dir == "runs/a"
    assert parsed(run__dir="elsewhere").run_dir == Path("elsewhere")
    assert str(parsed(sft=SFT).sft_out) == "runs/run/sft"
    assert config.responses_per_step == 256
    assert parsed(train__mini_batches=4).optimizer_steps == 12


@given(
    steps=st.integers(1, 10**6),
    lr=st.floats(1e-12, 1e3, allow_nan=False),
    name=st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1),
    vpp=st.none() | st.integers(2, 8),
    modules=st.none() | st.lists(st.sampled_from(["moe", "mlp", "core_attn"])),
    sft=st.booleans(),
    overrides=st.fixed_dictionaries(
        {},
        optional={
            "factors": st.fixed_dictionaries(
                {"0": st.fixed_dictionaries({"high": st.floats(0.1, 10) | st.just("off")})}
            ),
            "masks": st.just("off")
            | st.lists(st.builds(lambda high: {"policies": "old_mu", "high": high}, st.integers(1, 9))),
            "std_ddof": st.integers(0, 1),
            "penalties": st.just([{"estimator": "k2", "to": "mu", "coef": 0.5}]),
            "prefix_grad": st.just(False),
        },
    ),
)
def test_written_toml_reads_back_equal(steps, lr, name, vpp, modules, sft, overrides):
    values: dict[str, Any] = {
        "run.steps": steps,
        "run.name": name,
        "optim.lr": lr,
        "train.objective_overrides": overrides,
        "megatron": {
            "moe_z_loss_coeff": 1e-3,
            "moe_router_load_balancing_type": ["aux_loss"],
            "moe_aux_loss_coeff": [0.1],
        },
    }
    if vpp:
        values |= {"parallel.pp": 2, "parallel.vpp": vpp}
    if modules is not None:
        values |= {"recompute.granularity": "selective", "recompute.modules": modules}
    if sft:
        values["sft"] = SFT
    config = config_file.parse(SMALLEST, values)
    again = config_file.parse(tomllib.loads(config.to_toml()))
    assert again == config
    assert type(again.optim.lr) is float


def tables() -> list[type[Table]]:
    options = [
        option for info in Config.model_fields.values() for option in (info.annotation, *get_args(info.annotation))
    ]
    return [option for option in options if isinstance(option, type) and issubclass(option, Table)]


def test_optional_fields_default_to_none_so_that_toml_can_leave_them_out():
    assert len(tables()) >= 13
    for table in tables():
        for name, info in table.model_fields.items():
            if type(None) in get_args(info.annotation):
                assert info.default is None, f"{table.__name__}.{name}"


def test_every_key_is_described():
    for key, info in config_file.keys().items():
        assert info.description, key


def test_every_row_can_be_named_and_every_part_replaced():
    for name in OBJECTIVES.keys() - {"dppo_topk"}:
        assert parsed(train__objective=name).train.resolved_objective == OBJECTIVES[name]
    assert {field.name for field in dataclasses.fields(OBJECTIVES["minirl"])} == set(OBJECTIVE_PARTS)
    for part in OBJECTIVE_PARTS:
        value = as_table(getattr(OBJECTIVES["minirl"], part))
        config = parsed(train__objective_overrides={part: "off" if value is None else value})
        assert config.train.resolved_objective == OBJECTIVES["minirl"]
    overrides = {
        "penalties": [{"estimator": "k3", "coef": 0.1}],
        "factors": {"0": {"high": 2}},
        "masks": {"0": {"high": 3}},
    }
    changed = parsed(train__objective="grpo", train__objective_overrides=overrides)
    expected = dataclasses.replace(
        OBJECTIVES["grpo"],
        penalties=(Penalty("k3", coef=0.1),),
        factors=(Factor("theta_old", high=2),),
        masks=(Mask.ppo(high=3),),
    )
    assert changed.train.resolved_objective == expected


def as_table(value: Any) -> Any:
    """A part as a configuration file has it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: as_table(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {name: "off" if each is None else each for name, each in fields.items()}
    return [as_table(each) for each in value] if isinstance(value, tuple) else value


def test_off_stands_for_none_in_objective_overrides():
    config = parsed(train__objective_overrides={"factors": {"0": {"high": "off"}}, "masks": "off"})
    assert config.train.resolved_objective == dataclasses.replace(
        OBJECTIVES["minirl"], masks=(), factors=(Factor("theta_mu"),)
    )
    one = parsed(train__objective="icepop", train__objective_overrides={"masks": {"1": "off"}})
    assert one.train.resolved_objective.masks == OBJECTIVES["grpo"].masks


def test_old_logprobs_of_the_rollout_leave_later_mini_batches_unwatched_and_the_run_says_so():
    def told(**overrides):
        found = parsed(train__old_logprobs="rollout", **overrides).warnings
        return [warning for warning in found if warning.startswith("train.old_logprobs")]

    assert told() == told(log__traces_every=2) == []
    (warning,) = told(train__mini_batches=4)
    assert "first mini-batch" in warning
    assert "other 3" in warning
    for objective in ("grpo", "gspo", "ctpo", "adaptive_power", "reinforce"):
        assert told(train__objective=objective) == []


def test_world_size_divides_into_a_layout():
    layout = parsed(
        parallel__tp=2, parallel__pp=2, parallel__ep=2, parallel__etp=1, train__mini_batches=2
    ).check_world_size(8)
    assert (layout.dp, layout.edp, layout.etp) == (2, 2, 1)
    assert layout.sequences_per_rank == 256 // 2 // 2
    assert parsed(parallel__ep=2).check_world_size(2).edp == 1
    assert parsed(parallel__tp=2).check_world_size(4).etp == 2  # etp follows tp, as in Megatron
    assert parsed(parallel__tp=2).parallel.uses_sequence_parallel
    assert not parsed().parallel.uses_sequence_parallel


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        ({"parallel__tp": 2}, 3, "found 3 ranks, expected a multiple of tp * pp * cp = 2 * 1 * 1 = 2"),
        ({"parallel__ep": 4}, 2, "found 2 ranks, expected a multiple of ep * etp * pp = 4 * 1 * 1 = 4"),
        ({"parallel__ep": 2, "parallel__tp": 2}, 2, "ep * etp * pp = 2 * 2 * 1 = 4"),
        ({}, 3, "found prompts_per_step * group_size = 256 responses, expected a multiple of train.mini_batches * dp"),
        ({"train__mini_batches": 128}, 4, "128 * 4 = 512"),
        ({"sft": SFT}, 4, "sft.batch_size: found 6, expected a multiple of dp = 4"),
    ],
)
def test_a_world_size_that_does_not_come_out_even_is_refused(overrides, world_size, expected):
    with pytest.raises(ConfigError, match=r"expected a multiple") as caught:
        parsed(**overrides).check_world_size(world_size)
    assert expected in str(caught.value)


def test_a_missing_table_is_named():
    with pytest.raises(
        ConfigError, match=r"config: run, model, data, rollout, optim: missing, but needed; add to the file"
    ):
        config_file.parse({})


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        config_file.load(tmp_path / "absent.toml")
    (tmp_path / "broken.toml").write_text("[run\nsteps = 3")
    with pytest.raises(ConfigError, match=r"broken\.toml: not valid TOML: .*line 1"):
        config_file.load(tmp_path / "broken.toml")
    (tmp_path / "latin.toml").write_bytes(b"[run]\nname = '\xe9'")
    with pytest.raises(ConfigError, match="cannot be read"):
        config_file.load(tmp_path / "latin.toml")


def test_nothing_heavy_is_imported():
    heavy = ("torch", "numpy", "megatron", "transformers")
    code = f"import sys, megarl.config.file; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("cpu-quickstart", "ipc"),
        ("deepseek-v3", "distributed"),
        ("glm-4.5-air", "distributed"),
        ("moonlight-16b-a3b", "ipc"),
        ("qwen3-235b-a22b", "distributed"),
        ("qwen3-30b-a3b-8gpu", "ipc"),
        ("qwen3-30b-a3b-32gpu", "distributed"),
        ("qwen3-30b-a3b-64gpu", "distributed"),
        ("starter", "ipc"),
    ],
)
def test_how_weights_reach_the_servers_of_a_recipe(recipe: str, expected: str):
    """Servers of a disaggregated job have GPUs with the same numbers, on nodes of their own."""
    config = config_file.load(RECIPES / f"{recipe}.toml")
    assert (config.sglang.sync, config.weight_sync) == ("auto", expected)
    apart = config_file.load(RECIPES / f"{recipe}.toml", {"sglang.gpus": [], "sglang.urls": ["http://a:1"]})
    assert apart.weight_sync == "distributed"  # as the trainer of a disaggregated job gets it


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "ipc"),  # servers on the CPU
        ({"sglang__sync": "tensor"}, "ipc"),
        ({"sglang__sync": "tensor", "sglang__urls": ["http://a:1"]}, "tensor"),
        ({"sglang__sync": "distributed"}, "distributed"),
        ({"sglang__gpus": [0]}, "ipc"),
        ({"sglang__gpus": [4, 5], "sglang__tp": 2, "launch__ranks_per_node": 4}, "distributed"),  # beside the trainer's
        (
            {"sglang__gpus": [3, 4], "sglang__tp": 2, "launch__ranks_per_node": 4},
            "ipc",
        ),  # refused where ranks are known
        ({"sglang__gpus": [0], "sglang__sync": "disk"}, "disk"),
        ({"sglang__gpus": [0], "sglang__sync": "tensor"}, "tensor"),
        ({"sglang__urls": ["http://a:1"]}, "distributed"),
        ({"sglang__sync": "ipc"}, "ipc"),
    ],
)
def test_how_weights_reach_the_servers(changes: dict[str, Any], expected: str):
    assert parsed(rollout__engine="sglang", **changes).weight_sync == expected
