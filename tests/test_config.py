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
from pydantic import ValidationError

from megarl.config import Config
from megarl.config import file as config_file
from megarl.config.tables.base import Table
from megarl.core.choices.parts import PARTS as OBJECTIVE_PARTS
from megarl.core.choices.parts import Factor, Mask, Penalty
from megarl.core.choices.table import OBJECTIVES
from megarl.errors import ConfigError

SMALLEST: dict[str, Any] = {
    "run": {"steps": 3},
    "model": {"path": "models/tiny"},
    "data": {"train": "train.jsonl", "max_prompt_tokens": 16},
    "rollout": {"prompts_per_step": 32, "group_size": 8, "max_response_tokens": 10},
    "optim": {"lr": 1e-4},
}
RECIPES = Path(__file__).parents[1] / "launch"
SFT = {"data": "demos.jsonl", "steps": 5, "batch_size": 6, "lr": 1e-3}


def parsed(**overrides: Any) -> Config:
    return config_file.parse(SMALLEST, {key.replace("__", "."): value for key, value in overrides.items()})


def refusal(**overrides: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(**overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


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


def test_overrides_do_not_change_the_table_they_are_laid_over():
    before = str(SMALLEST)
    parsed(rollout__temperature=0.7, sft__lr=1.0, sft__data="d", sft__steps=1, sft__batch_size=1)
    assert str(SMALLEST) == before


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


def test_the_reference_is_the_model_unless_named():
    assert parsed().reference_path == "models/tiny"
    assert parsed(model__reference="models/other").reference_path == "models/other"


def test_frozen():
    with pytest.raises(ValidationError):
        parsed().run.steps = 4  # type: ignore[misc]


def test_off_stands_for_none_in_objective_overrides():
    config = parsed(train__objective_overrides={"factors": {"0": {"high": "off"}}, "masks": "off"})
    assert config.train.resolved_objective == dataclasses.replace(
        OBJECTIVES["minirl"], masks=(), factors=(Factor("theta_mu"),)
    )
    one = parsed(train__objective="icepop", train__objective_overrides={"masks": {"1": "off"}})
    assert one.train.resolved_objective.masks == OBJECTIVES["grpo"].masks


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"rollout__temprature": 1.0}, ["rollout.temprature: unknown key", "did you mean rollout.temperature?"]),
        ({"temperature": 1.0}, ["temperature: unknown key", "rollout.temperature or eval.temperature"]),
        ({"optim": {}}, ["optim.lr: missing", "--optim.lr"]),
        (
            {"parallel": {}, "data": 1, "reward": 2},
            ["2 problems", "data: found 1", "a table [data]", "reward: found 2"],
        ),
        ({"rollout__temperature": "a"}, ["rollout.temperature: found 'a'", "number"]),
        ({"rollout__temperature": 0.0}, ["rollout.temperature: found 0.0"]),
        ({"rollout__temperature": "a", "run__steps": 0}, ["run.steps", "rollout.temperature", "2 problems"]),
        ({"rollout__top_p": 1.01}, ["rollout.top_p: found 1.01"]),
        ({"data__heldout_split": "test"}, ["heldout_split: found 'test' without heldout"]),
        ({"rollout__prompts_per_step": True}, ["rollout.prompts_per_step: found True", "integer"]),
        ({"rollout__prompts_per_step": 3.0}, ["rollout.prompts_per_step: found 3.0", "integer"]),
        ({"run__steps": "3"}, ["run.steps: found '3'", "integer"]),
        ({"optim__lr": float("nan")}, ["optim.lr: found nan", "finite"]),
        ({"optim__lr": float("inf")}, ["optim.lr: found inf", "finite"]),
        ({"optim__min_lr": 1.0}, ["optim.min_lr: found 1.0", "at most lr"]),
        ({"optim__warmup_steps": 5, "optim__decay_steps": 5}, ["optim.warmup_steps: found 5", "decay_steps = 5"]),
        ({"model": 3}, ["model: found 3", "a table [model]"]),
        ({"model__path__deeper": 3}, ["model.path.deeper", "a table was expected"]),
        ({"model__dtype": "fp16"}, ["model.dtype: found 'fp16'", "'fp32' or 'bf16'"]),
        ({"parallel__tp": 2, "parallel__etp": 1}, ["parallel.etp: found 1 with tp = 2 and ep = 1"]),
        ({"parallel__etp": 2, "parallel__ep": 2}, ["parallel.etp: found 2 with tp = 1"]),
        ({"parallel__vpp": 2}, ["parallel.vpp: found 2 with pp = 1"]),
        ({"parallel__pp": 2, "parallel__vpp": 1}, ["parallel.vpp: found 1"]),
        ({"train__objective": "ppo2"}, ["train.objective: found 'ppo2'", "minirl"]),
        ({"train__objective_overrides": {"mask": 1}}, ["train.objective_overrides: mask: unknown part", "mean masks?"]),
        ({"train__objective_overrides": {"masks": [1]}}, ["objective_overrides: masks is (1,)", "a table of Mask"]),
        (
            {"train__objective_overrides": {"masks": {"0": {"hihg": 1}}}},
            ["train.objective_overrides: masks.0.hihg: unknown part", "did you mean high?"],
        ),
        ({"train__objective_overrides": {"masks": {"2": {"high": 1}}}}, ["masks.2: expected a number from 0 to 1"]),
        ({"train__objective_overrides": {"masks": [{"high": 1}]}}, ["masks.0.policies: missing", "'theta_old'"]),
        (
            {"train__objective_overrides": {"factors": {"0": {"high": "x"}}}},
            ["train.objective_overrides: factor: high is 'x'", "finite number"],
        ),
        ({"train__objective_overrides": {"factors": {"0": {"high": True}}}}, ["high is True", "finite number"]),
        ({"train__objective_overrides": {"std_eps": float("nan")}}, ["std_eps is nan", "finite number"]),
        ({"train__objective_overrides": {"gate": "sapo"}}, ["gate is 'sapo'", "a table of Gate"]),
        ({"train__objective_overrides": {"gate": {"kind": "sapo"}}}, ["gate.positive: missing"]),
        ({"train__objective_overrides": {"std_ddof": 1.0}}, ["std_ddof is 1.0", "whole number"]),
        ({"train__objective_overrides": {"aggregation": "mean"}}, ["aggregation is 'mean'", "'token-mean'"]),
        ({"train__objective_overrides": {"advantage": "off"}}, ["advantage is None", "'group_mean'"]),
        (
            {"train__objective_overrides": {"factors": {"1": {"policies": "old_mu"}}}},
            ["'theta_mu' and 'old_mu' count the same policy twice"],
        ),
        ({"train__objective": "dppo_topk"}, ['train.objective: found "dppo_topk"', "use dppo_tv"]),
        (
            {"sampling__rule": "gvm", "gvm__block": "output_layer", "rollout__top_p": 0.9},
            ['gvm.block: found "output_layer"', "keep_sampling_mask"],
        ),
        ({"train__objective_overrides": {"kl_coef": 0.1}}, ["kl_coef is 0.1", "A KL in the loss is a penalty"]),
        (
            {"train__objective": "kl_grpo", "train__objective_overrides": {"selection": "positive"}},
            ["selection 'positive'", "'mixed_groups'"],
        ),
        ({"train__replay": "r4"}, ["train.replay: found 'r4'", "'none', 'r2' or 'r3'"]),
        ({"train__micro_batch_tokens": 25}, ["train.micro_batch_tokens: found 25", "at least", "= 26"]),
        (
            {"train__micro_batch_tokens": 27, "parallel__tp": 2},
            ["train.micro_batch_tokens: found 27", "multiple of parallel.tp"],
        ),
        ({"train__mini_batches": 3}, ["train.mini_batches: found 3", "divisor", "256"]),
        ({"eval__every": 3}, ["eval.every: found 3 without data.heldout"]),
        (
            {"eval__every": 3, "eval__sets": {"a": "a.jsonl"}, "checkpoint__keep_best": "b"},
            ['checkpoint.keep_best: found "b" with eval.every = 3', "pooled or a"],
        ),
        ({"eval__sets": {"pooled": "a.jsonl"}}, ["eval.sets: found the name pooled"]),
        ({"checkpoint__keep_best": "pooled"}, ['checkpoint.keep_best: found "pooled" with eval.every = 0']),
        (
            {"checkpoint__every": 2, "checkpoint__keep_every": 3},
            ["checkpoint.keep_every: found 3, expected a multiple of checkpoint.every = 2"],
        ),
        ({"checkpoint__keep_every": 3}, ["checkpoint.keep_every: found 3", "checkpoint.every = 0"]),
        (
            {"reward__function": "reward_model"},
            ["reward_model.urls: found []", 'with reward.function = "reward_model"'],
        ),
        ({"reward_model__urls": ["http://a:1"]}, ["reward_model.urls: found ['http://a:1']", '"exact_match"']),
        ({"recompute__granularity": "full"}, ['recompute.granularity: found "full" without method']),
        ({"recompute__num_layers": 1}, ["recompute.num_layers: goes only with"]),
        ({"recompute__modules": ["moe"]}, ["recompute.modules: goes only with"]),
        ({"sft": {"steps": 3}}, ["sft.data, sft.batch_size, sft.lr: missing"]),
        ({"megatron__num_layers": 4}, ["megatron.num_layers", "use model.path instead"]),
        ({"megatron__tensor_model_parallel_size": 2}, ["use parallel.tp instead"]),
        ({"megatron__lr": 2.0}, ["use optim.lr instead"]),
        ({"megatron__bf16": True}, ["use model.dtype instead"]),
        ({"megatron__moe_z_loss_coef": 2.0}, ["megatron.moe_z_loss_coef", "did you mean moe_z_loss_coeff"]),
        ({"megatron__moe_z_loss_coeff": "a"}, ["megatron.moe_z_loss_coeff: found 'a'", "Optional[float]"]),
    ],
)
def test_a_mistake_costs_one_line_that_names_key_and_finding(overrides, expected):
    message = refusal(**overrides)
    for part in expected:
        assert part in message


KL = {"train__objective": "kl_grpo", "train__objective_overrides": {"kl_coef": 0.1}}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"train__replay": "r2"}, ['train.replay = "r2"', "there is none"]),
        (KL, ['"token_level_kl"', "before the first update"]),
        (
            {"train__objective_overrides": {"factors": [{"policies": "old_mu"}]}},
            ['objective "minirl"', "nothing to correct"],
        ),
        ({"train__objective": "icepop"}, ["nothing to correct"]),
        ({"train__objective": "kpop"}, ['objective "kpop"', "nothing to correct"]),
        ({"log__traces_every": 2, "train__mini_batches": 2}, ["log.traces_every = 2", "train.mini_batches = 2"]),
    ],
)
def test_old_logprobs_of_the_rollout_are_refused_where_a_pass_is_needed_or_nothing_is_corrected(overrides, expected):
    message = refusal(train__old_logprobs="rollout", **overrides)
    for part in ['train.old_logprobs: found "rollout" with', *expected]:
        assert part in message
    parsed(**overrides)


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


@pytest.mark.parametrize(
    "settings",
    [
        {"moe_router_fusion": True},
        {"moe_router_load_balancing_type": "sinkhorn"},
        {"moe_expert_capacity_factor": 1.0},
        {"moe_router_force_load_balancing": True},
        {"overlap_moe_expert_parallel_comm": True},
        {"cuda_graph_impl": "local"},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn", "moe_router"]},
        {"cuda_graph_impl": "local", "cuda_graph_scope": ["attn"]},
        {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"},
        {"enable_cuda_graph": True},
        {"external_cuda_graph": True},
    ],
)
def test_settings_that_bypass_the_replay_hook_are_refused_unless_nothing_is_replayed(settings):
    for replay in ("r2", "r3"):
        message = refusal(megatron=settings, train__replay=replay)
        assert f"megatron.{next(iter(settings))}" in message
        assert 'train.replay = "none"' in message
    assert parsed(megatron=settings, train__replay="none").megatron == settings


@pytest.mark.parametrize(
    "settings",
    [
        {"moe_router_fusion": False},
        {"moe_router_load_balancing_type": "none"},
        {"moe_router_load_balancing_type": ["seq_aux_loss"], "moe_aux_loss_coeff": [0.1]},
        {"moe_expert_capacity_factor": -1.0},
        {"cuda_graph_impl": "none"},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn"]},
        {"moe_permute_fusion": True},
    ],
)
def test_settings_that_keep_the_hook_pass(settings):
    assert parsed(megatron=settings).megatron == settings


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
        ConfigError, match=r"config: run\.steps, model\.path, .*: missing, but needed; .* tables \[run\], "
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
    ("sglang", "told"),
    [
        ({"urls": ["127.0.0.1:30000"]}, "sglang.urls: found 127.0.0.1:30000"),
        ({"urls": ["http://127.0.0.1:30000/"]}, "sglang.urls: found http://127.0.0.1:30000/"),
        ({"urls": ["http://a:1", "http://a:1"]}, "expected each server once"),
        *(
            ({"urls": [f"http://{host}"]}, f"sglang.urls: found http://{host}, expected each server once, as http://ho")
            for host in ("2001:db8::7:30000", "::1:30000", "2001:db8::7", "a:port", ":30000", "[::1:30000")
        ),
        ({"urls": ["http://a:1"], "gpus": [0]}, "sglang.gpus: found together with urls"),
        ({"gpus": [0, 0], "servers": 2}, "expected each GPU once"),
    ],
)
def test_servers_that_cannot_work_are_refused(sglang: dict[str, Any], told: str):
    assert told in refusal(**{f"sglang__{name}": value for name, value in sglang.items()})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rollout__one_step_off": True}, 'rollout.one_step_off: found true with engine = "local"'),
        ({"sglang__fp8": True, "rollout__dtype": "fp32"}, "whose kernels compute in bf16 only"),
        ({"sglang__fp8": True, "rollout__fp8_rounding": True}, "whose weights are in FP8 already"),
        ({"sglang__gpus": [0, 1, 2], "sglang__tp": 2}, "sglang.gpus: found 3, expected servers * tp = 2"),
        ({"rollout__fp8_activations": True}, "rollout.fp8_activations: found true without fp8_rounding"),
        (
            {"rollout__engine": "sglang", "rollout__fp8_rounding": True, "rollout__fp8_activations": True},
            'rollout.fp8_activations: found true with engine = "sglang"',
        ),
        ({"rollout__engine": "sglang", "rollout__fp8_kv_cache": True}, "fp8_kv_cache: found true with engine"),
    ],
)
def test_sampling_that_cannot_work_is_refused(changes: dict[str, Any], told: str):
    assert told in refusal(**changes)


def test_ranks_wait_longer_for_each_other_than_for_a_server():
    assert parsed().collective_timeout_s == 1800.0
    served = parsed(rollout__engine="sglang", sglang__deadline_s=1000.0, sglang__attempts=3)
    assert served.collective_timeout_s > 3000.0 + served.sglang.start_deadline_s


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
    ],
)
def test_how_weights_reach_the_servers_of_a_recipe(recipe: str, expected: str):
    """Servers of a disaggregated job have GPUs with the same numbers, on nodes of their own."""
    config = config_file.load(RECIPES / f"{recipe}.toml")
    assert (config.sglang.sync, config.weight_sync) == ("auto", expected)
    apart = config_file.load(RECIPES / f"{recipe}.toml", {"sglang.gpus": [], "sglang.urls": ["http://a:1"]})
    assert apart.weight_sync == "distributed"  # as the trainer of a disaggregated job gets it


def test_every_recipe_says_how_weights_reach_its_servers():
    (marks,) = (
        mark for mark in test_how_weights_reach_the_servers_of_a_recipe.pytestmark if mark.name == "parametrize"
    )
    assert {path.stem for path in RECIPES.glob("*.toml")} == {recipe for recipe, _ in marks.args[1]}


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


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sglang__sync": "ipc", "sglang__urls": ["http://a:1"]}, 'sglang.sync: found "ipc" with sglang.urls'),
        (
            {"sglang__sync": "ipc", "launch__layout": "disaggregated", "launch__server_nodes": 1},
            'sglang.sync: found "ipc" with launch.layout = "disaggregated"',
        ),
        ({"sglang__sync": "distributed", "sglang__gpus": [0]}, "NCCL refuses two ranks on one GPU"),
    ],
)
def test_a_way_that_weights_cannot_take_is_refused(changes: dict[str, Any], told: str):
    assert told in refusal(rollout__engine="sglang", **changes)
