from __future__ import annotations

import dataclasses
import re
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import pytest
import tomli_w
import torch
from hypothesis import given
from hypothesis import strategies as st
from run_configs import SMALLEST, parsed

from megarl.config import Config
from megarl.config import file as config_file
from megarl.config.tables.base import Table
from megarl.core.choices.credit import Credit
from megarl.core.choices.parts import PARTS as OBJECTIVE_PARTS
from megarl.core.choices.parts import AdvantageName, Factor, Mask, Penalty
from megarl.core.choices.stopping import Sequential, Uniform
from megarl.core.choices.table import OBJECTIVES
from megarl.core.objectives import advantages_of, select_responses, token_advantages
from megarl.errors import ConfigError

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


@pytest.mark.parametrize(
    "key", ["model.path", "model.reference", "data.train", "data.heldout", "sft.data", "eval.sets.aime"]
)
def test_an_input_that_only_the_files_folder_has_is_an_error_that_names_both(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths are relative to the working folder, also those of flags."""
    path = tmp_path / "conf" / "run.toml"
    (tmp_path / "conf" / "things").mkdir(parents=True)
    path.write_text(tomli_w.dumps({**SMALLEST, "sft": SFT} if key == "sft.data" else {**SMALLEST}))
    overrides = {"eval.sets": {"aime": "things"}} if key.startswith("eval") else {key: "things"}
    monkeypatch.chdir(tmp_path)
    beside = re.escape(str(tmp_path / "conf" / "things"))
    with pytest.raises(ConfigError, match=f"{key}: there is no things in the working folder .*, but {beside} exists"):
        config_file.load(path, overrides, trust=True)
    monkeypatch.chdir(tmp_path / "conf")
    config_file.load("run.toml", overrides, trust=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "things").mkdir()
    config_file.load(path, overrides, trust=True)
    (tmp_path / "things").rmdir()
    (tmp_path / "conf" / "things").rmdir()
    config_file.load(path, overrides, trust=True)  # nowhere: the checks of inputs say so


@given(
    steps=st.integers(1, 10**6),
    lr=st.floats(1e-12, 1e3, allow_nan=False),
    name=st.text(st.characters(codec="utf-8", exclude_categories=("Cs",), exclude_characters="\0"), min_size=1),
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


def test_optional_fields_default_to_none_so_that_toml_can_leave_them_out():
    found = [each for info in Config.model_fields.values() for each in (info.annotation, *get_args(info.annotation))]
    tables = [each for each in found if isinstance(each, type) and issubclass(each, Table)]
    assert len(tables) >= 13
    for table in tables:
        for name, info in table.model_fields.items():
            if type(None) in get_args(info.annotation):
                assert info.default is None, f"{table.__name__}.{name}"


def test_every_row_can_be_named_and_its_parts_replaced():
    for name in OBJECTIVES.keys() - {"dppo_topk"}:
        assert parsed(train__objective=name).train.resolved_objective == OBJECTIVES[name]
    assert {field.name for field in dataclasses.fields(OBJECTIVES["minirl"])} == set(OBJECTIVE_PARTS)
    overrides = {"penalties": [{"estimator": "k3", "coef": 0.1}], "factors": {"0": {"high": 2}}}
    changed = parsed(train__objective="grpo", train__objective_overrides={**overrides, "masks": {"0": {"high": 3}}})
    parts = {"penalties": (Penalty("k3", coef=0.1),), "factors": (Factor("theta_old", high=2),)}
    expected = dataclasses.replace(OBJECTIVES["grpo"], **parts, masks=(Mask.ppo(high=3),))
    assert changed.train.resolved_objective == expected


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


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        ({"parallel__tp": 2}, 3, "found 3 ranks, expected a multiple of tp * pp * cp = 2 * 1 * 1 = 2"),
        ({"parallel__ep": 4}, 2, "found 2 ranks, expected a multiple of ep * etp * pp = 4 * 1 * 1 = 4"),
        ({}, 3, "found prompts_per_step * group_size = 256 responses, expected a multiple of train.mini_batches * dp"),
        ({"sft": SFT}, 4, "sft.batch_size: found 6, expected a multiple of dp = 4"),
        (
            {"rollout__max_staleness": 1},
            64,
            "found prompts_per_step = 32 with max_staleness = 1, expected a multiple of",
        ),
    ],
)
def test_a_world_size_that_does_not_come_out_even_is_refused(overrides, world_size, expected):
    with pytest.raises(ConfigError, match=r"expected a multiple") as caught:
        parsed(**overrides).check_world_size(world_size)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "ipc"),  # servers on the CPU
        ({"sglang__sync": "tensor"}, "ipc"),
        ({"sglang__sync": "tensor", "sglang__urls": ["http://a:1"]}, "tensor"),
        ({"sglang__deltas": True}, "tensor"),
        ({"sglang__gpus": [0]}, "ipc"),
        ({"sglang__gpus": [4, 5], "sglang__tp": 2, "launch__ranks_per_node": 4}, "distributed"),  # beside the trainer's
        ({"sglang__gpus": [0], "sglang__sync": "disk"}, "disk"),
        ({"sglang__urls": ["http://a:1"]}, "distributed"),
    ],
)
def test_how_weights_reach_the_servers(changes: dict[str, Any], expected: str):
    assert parsed(rollout__engine="sglang", **changes).weight_sync == expected


def is_refused(**changes: Any) -> bool:
    with suppress(ConfigError):
        parsed(**changes)
        return False
    with pytest.raises(ConfigError, match="compares several: every gradient would be 0"):
        parsed(**changes)
    return True


ONE: dict[str, Any] = {"rollout__group_size": 1}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_group_of_one_is_refused_where_its_advantage_is_zero(name: str) -> None:
    """The formulas themselves say which: groups of one, with rewards that differ."""
    objective = OBJECTIVES[name]
    if objective.needs_topk:
        return
    tokens = torch.full((4,), -1.0)
    values = token_advantages(
        objective, [1.0, 0.0, 0.0, 1.0], [0, 1, 2, 3], logprobs=tokens, ref_logprobs=tokens,
        loss_mask=torch.ones(4, dtype=torch.bool), cu_seqlens=torch.arange(5),
    )  # fmt: skip
    trains = select_responses(objective, [1.0, 0.0, 0.0, 1.0], [0, 1, 2, 3])
    assert is_refused(**ONE, train__objective=name) == (not (values * trains).any())
    assert not is_refused(rollout__group_size=2, train__objective=name)


@pytest.mark.parametrize("name", get_args(AdvantageName))
def test_every_advantage_in_a_group_of_one(name: str) -> None:
    if name in ("token_level_kl", "process"):  # the one has a row above, the other may have several steps
        return
    given = {"lengths": [1, 2, 3, 4], "components": ([[1.0, 0.0], [0.0, 1.0], [0.5, 0.0], [1.0, 1.0]], [1.0, 0.5])}
    objective = dataclasses.replace(OBJECTIVES["grpo"], advantage=name)
    values = advantages_of(objective, [1.0, 0.0, 0.0, 1.0], [0, 1, 2, 3], **given)
    several = {"reward__function": "rewards:mine", "reward__weights": {"right": 1.0}} if name == "gdpo" else {}
    assert is_refused(**ONE, **several, train__objective_overrides={"advantage": name}) == (not values.any())


def test_ranks_that_would_have_no_group_are_refused() -> None:
    adaptive = parsed(sampling__rule="ada_seq_balance", train__mini_batches=8)
    assert adaptive.check_world_size(4).dp == 4
    with pytest.raises(ConfigError, match=r"expected at least train.mini_batches \* dp = 8 \* 5 = 40"):
        adaptive.check_world_size(5)
    # Sequences may be dealt where groups cannot, and groups where sequences cannot.
    assert parsed(train__mini_batches=64).check_world_size(4).sequences_per_rank == 1
    assert parsed(sampling__refill=True, train__mini_batches=3).check_world_size(5).dp == 5
    with pytest.raises(ConfigError, match="expected a divisor"):
        parsed(train__mini_batches=3)


class TestDefaults:
    def test_the_rule(self) -> None:
        def rule_of(**overrides: Any) -> Any:
            config = parsed(**overrides)
            return config.sampling.rule_of(8, config.reward.threshold)

        assert rule_of() == Uniform(8)
        assert rule_of(sampling__train_size=4, reward__threshold=0.5) == Uniform(8, 4, "balance", threshold=0.5)
        assert rule_of(sampling__train_size=4, sampling__subsample="any") == Uniform(8, 4, "any")
        # group_size is what trains, and half of it what ends a prompt
        assert rule_of(sampling__rule="ada_seq_balance") == Sequential(4, 4, 8, 32, 8, "balance", 0.7)
        assert rule_of(sampling__rule="ada_seq_balance", sampling__train_size=5) == Sequential(
            2, 3, 8, 32, 5, "balance"
        )
        assert rule_of(sampling__rule="ada_seq_balance", sampling__negatives=0) == Sequential(4, 0, 8, 32, 8, "balance")
        assert rule_of(sampling__rule="ada_seq_pos") == Sequential(1, 0, 8, 32, 8, "pos", 0.7)
        assert rule_of(
            sampling__rule="ada_seq_pos", sampling__positives=3, sampling__round_size=16, sampling__max_samples=128
        ) == Sequential(3, 0, 16, 128, 8, "pos")

    @pytest.mark.parametrize(
        ("changes", "fixed", "allotted", "credit"),
        [
            ({}, True, False, False),
            ({"sampling__train_size": 4}, False, False, True),
            ({"sampling__refill": True}, False, False, False),
            ({"sampling__rule": "ada_seq_pos"}, False, False, True),
            ({"sampling__rule": "ada_seq_balance"}, False, False, True),
            ({"sampling__rule": "ada_est"}, False, True, True),
            ({"sampling__rule": "gvm"}, False, True, False),
            ({"sampling__advantages": "credit"}, True, False, True),
            ({"sampling__train_size": 4, "sampling__advantages": "objective"}, False, False, False),
        ],
    )
    def test_kinds(self, changes: dict[str, Any], fixed: bool, allotted: bool, credit: bool) -> None:
        sampling = parsed(**changes).sampling
        assert (sampling.fixed, sampling.allotted, sampling.uses_credit) == (fixed, allotted, credit)

    @pytest.mark.parametrize(
        ("changes", "record"),
        [
            ({}, Credit()),
            ({"sampling__rule": "ada_est"}, Credit(scale="root_rate", rate_eps=1e-3)),
            ({"sampling__rule": "ada_est", "estimate__eps": 0.02}, Credit(scale="root_rate", rate_eps=0.02)),
            ({"sampling__rule": "ada_est", "credit__scale": "std"}, Credit(scale="std", rate_eps=1e-3)),
            ({"sampling__rule": "ada_est", "credit__rate_eps": 0.0}, Credit(scale="root_rate")),
            ({"sampling__rule": "ada_est", "sampling__advantages": "objective"}, Credit()),
        ],
    )
    def test_credit(self, changes: dict[str, Any], record: Credit) -> None:
        assert parsed(**changes).credit_record == record

    def test_sizes_of_a_step(self) -> None:
        assert parsed().responses_per_step == 256
        assert parsed(sampling__train_size=4).responses_per_step == 128
        assert parsed(sampling__rule="ada_est").responses_per_step == 256
        assert parsed().prompts_per_step_at_most == 32
        assert parsed(sampling__refill=True).prompts_per_step_at_most == 128
        assert parsed(sampling__refill=True, sampling__max_prompts=50).prompts_per_step_at_most == 50


@pytest.mark.parametrize(
    ("old", "place"),
    [
        ("runs/a", "start"),  # read from another working folder
        ("./runs/a", "start"),
        ("runs/b", "here"),  # the run alone was moved: relative paths count from the working folder
        ("{home}/start/runs/b", "here"),
    ],
)
def test_a_saved_configuration_says_where_model_and_data_are(
    old: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, here = tmp_path / "start" / "runs" / "a", tmp_path / "here"
    step = run / "checkpoints" / "step_0000001"
    step.mkdir(parents=True)
    (run.parents[1] / "train.jsonl").touch()
    here.mkdir()
    monkeypatch.chdir(here)
    tables = {"run": {"dir": old.format(home=tmp_path)}, "model": {"path": "model"}, "data": {"train": "train.jsonl"}}
    tables["data"]["heldout"] = "owner/name"
    (run / "config.toml").write_text(tomli_w.dumps(tables))
    with pytest.raises(ConfigError, match=r"has no config\.toml of a run in it or above it: do this"):
        config_file.find_saved(step, "do this")  # anybody's file
    (run / "run_id").touch()
    for path in (run, step.parent, step):
        saved, places = config_file.find_saved(path, "")
        assert saved == run / "config.toml"
        trained = {"data.train": str(tmp_path / "start" / "train.jsonl")} if place == "start" else {}
        assert places == {"run.dir": str(run), "model.path": str(tmp_path / place / "model"), **trained}
