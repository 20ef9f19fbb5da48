"""Parts of the user's own in a run: an engine and an objective that the configuration names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_engines import local_engine
from run_configs import records_of
from safetensors.torch import load_file
from train_world import World
from transformers import AutoConfig

from megarl.core.types import SampleRequest
from megarl.engines.local.engine import LocalEngine
from megarl.engines.protocol import SamplingParams
from megarl.errors import ConfigError, NumericsError
from megarl.run.metrics_log import read_metrics
from megarl.trainer.engines import make_local_engine
from megarl.trainer.loop import train

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("engine", ["own_parts:counting", "own_parts:named"])
def test_an_own_engine_trains_as_the_engine_that_it_wraps(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    found = {}
    for name in ("local", engine):
        folder = tmp_path / name.replace(":", "-")
        train(world.settings(run__dir=str(folder), run__steps=1, rollout__fp8_rounding=False, rollout__engine=name))
        found[name] = records_of(folder)
    assert found[engine] == found["local"]
    assert "own engine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("engine", "counts"),
    [
        ("counts_cleared", [1, 1, 1]),  # of each step alone, without the evaluations between
        ("counts_readonly", [2, 4, 6]),  # what the engine says: all its sessions, those of evaluations too
    ],
)
def test_counts_of_answers_are_of_the_step_unless_they_are_read_only(
    world: World, tmp_path: Path, engine: str, counts: list[int]
) -> None:
    settings = {"run__steps": 3, "eval__every": 1, "rollout__fp8_rounding": False}
    train(world.settings(run__dir=str(tmp_path / "run"), rollout__engine=f"own_parts:{engine}", **settings))
    records = records_of(tmp_path / "run")
    assert [record["rollout/wrong_answers"] for record in records if record["kind"] == "step"] == counts
    assert [record["step"] for record in records if record["kind"] == "eval"] == [0, 1, 2, 3]


@pytest.mark.parametrize("settings", [{}, {"fp8_activations": True}, {"fp8_kv_cache": True}])
def test_the_settings_of_fp8_reach_the_local_engine(world: World, settings: dict[str, bool]) -> None:
    config = world.settings(**{f"rollout__{name}": value for name, value in settings.items()})
    requests = [SampleRequest(np.arange(3, 9), group, 0, group) for group in range(4)]
    found = {}
    for name in ("configured", "direct"):
        engine = LocalEngine(AutoConfig.from_pretrained(world.model), fp8_rounding=True, **settings)
        engine = make_local_engine(config, print) if name == "configured" else engine
        engine.update_weights(load_file(world.model / "model.safetensors").items(), 0)
        rollouts = engine.generate(requests, SamplingParams(max_response_tokens=8))
        found[name] = np.concatenate([rollout.rollout_logprobs for rollout in rollouts])
    assert np.array_equal(found["configured"], found["direct"])
    plain = local_engine(world.model, fp8_rounding=True)
    without = [rollout.rollout_logprobs for rollout in plain.generate(requests, SamplingParams(max_response_tokens=8))]
    assert np.array_equal(found["direct"], np.concatenate(without)) == (not settings)


@pytest.mark.parametrize(
    ("engine", "changes", "told"),
    [
        ("vllm", {}, "engine: found 'vllm', expected local, sglang or package.module:name"),
        ("own_parts:not_an_engine", {}, "engine: found int at 'own_parts:not_an_engine'"),
        ("own_parts:without_routes", {}, 'train.replay: found "r3" with rollout.engine = "own_parts:'),
        ("own_parts:counting", {"rollout__fp8_rounding": True}, "rollout.fp8_rounding: found true, which goes only"),
        ("own_parts:counting", {"rollout__top_p": 0.9}, "rollout.top_p: found 0.9, expected 1"),
        ("own_parts:without_sets", {"rollout__top_p": 0.9}, "rollout.keep_sampling_mask: found true with top_p = 0.9"),
        ("own_parts:counting", {"rollout__one_step_off": True}, "rollout.one_step_off: found true"),
        ("own_parts:counting", {"rollout__max_staleness": 1}, "which goes only with an engine that can pause"),
    ],
)
def test_an_own_engine_that_cannot_is_refused(world: World, engine: str, changes: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        world.settings(**{"rollout__engine": engine, "rollout__fp8_rounding": False, **changes})


def records(world: World, folder: Path, objective: str, **overrides: Any) -> list[dict[str, Any]]:
    """The records of a run of one step with two updates."""
    train(world.settings(run__dir=str(folder), run__steps=1, train__objective=objective, **overrides))
    return records_of(folder)


def test_an_own_objective_trains_as_the_same_row_of_the_table(world: World, tmp_path: Path) -> None:
    own, row = (
        records(world, tmp_path / name[:3], name, train__objective_overrides={"masks": {"0": mask}})
        for name, mask in (("own_parts:my_grpo", {"low": 0.9}), ("grpo", {"low": 0.9, "high": 1.28}))
    )
    assert own == row


def test_an_own_function_trains_as_the_row_that_it_computes(world: World, tmp_path: Path) -> None:
    own, row = (records(world, tmp_path / str(len(name)), name) for name in ("own_parts:minirl", "minirl"))
    computed = [(record["loss"], record["grad_norm"]) for record in own if record["kind"] == "minibatch"]
    assert computed == [(record["loss"], record["grad_norm"]) for record in row if record["kind"] == "minibatch"]
    assert all("own/outside" in record for record in own if record["kind"] == "minibatch")


def test_the_documented_parts_train(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for page in ("objectives", "sampling"):
        text = (ROOT / "docs" / f"{page}.md").read_text()
        for code, name in re.findall(r"^```python\n(# (my_\w+)\.py.*?)^```", text, re.MULTILINE | re.DOTALL):
            (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    own: dict[str, Any] = {"factors": {"0": {"fn": "my_parts:damped"}}, "masks": ["my_parts:engines_agree"]}
    own["advantage"] = "my_parts:over_median"
    rule = {"sampling__rule": "my_rules:until_mixed", "sampling__max_samples": 12, "reward__threshold": 0.3}
    run = records(world, tmp_path / "run", "grpo", train__objective_overrides=own, **rule)
    steps = [record for record in run if record["kind"] == "step"]
    assert steps[0]["sampling/samples_per_prompt"] > 2
    updates = [record for record in run if record["kind"] == "minibatch"]
    assert all(record["grad_norm"] > 0 and "clip/own" in record for record in updates)


def test_an_own_part_that_is_none_is_refused_before_the_run(world: World, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"function own_parts:truncated raised AttributeError: .*'logprobs'"):
        records(world, tmp_path, "grpo", train__objective_overrides={"factors": {"0": {"fn": "own_parts:truncated"}}})
    assert not (tmp_path / "metrics.jsonl").exists() or not read_metrics(tmp_path / "metrics.jsonl")


def test_an_own_part_that_fails_in_the_run_is_named(world: World, tmp_path: Path) -> None:
    parts = {"factors": {"0": {"fn": "own_parts:not_finite_later"}}}
    told = r"fn: the function own_parts:not_finite_later returned nan at token \d+ of \d+"
    with pytest.raises(NumericsError, match=told):
        records(world, tmp_path, "grpo", train__objective_overrides=parts)


@pytest.mark.parametrize(
    ("objective", "overrides", "told"),
    [
        ("grpo", {"masks": {"1": "own_parts:nothing"}}, "own_parts.py has nothing named 'nothing'"),
        ("grpo", {"factors": {"0": {"fn": "own_parts:my_grpo"}}}, "fn: found Objective at 'own_parts:my_grpo', expe"),
        ("grpo", {"advantage": "own_parts:root"}, "parameters (ratios: 'torch.Tensor') -> 'torch.Tensor' (too many"),
        ("grpo", {"masks": {"0": {"scope": "own_parts:root"}}}, "scope is 'own_parts:root', expected 'token'"),
        ("no_such_module:f", {}, "train.objective: found 'no_such_module:f', but cannot import"),
        ("own_parts:not_an_engine", {}, "train.objective: found int at 'own_parts:not_an_engine', expected an Obj"),
        ("own_parts:two_arguments", {}, "has the parameters (columns: 'TokenColumns', more: 'int')"),
        ("own_parts:truncated", {"factors": "off"}, "train.objective_overrides.factors: found with the function"),
        ("own_parts:truncated", {"kl_coef": 0.1}, "A KL in the loss is a penalty"),
    ],
)
def test_an_own_objective_that_is_none_is_refused(
    world: World, objective: str, overrides: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        world.settings(train__objective=objective, train__objective_overrides=overrides)


def test_credit_does_not_replace_an_own_advantage_unseen(world: World) -> None:
    changes = {"sampling__train_size": 2, "train__objective_overrides": {"advantage": "own_parts:standardized"}}
    with pytest.raises(ConfigError, match=r'sampling.advantages: found "credit".*or are your own'):
        world.settings(**changes)
    assert not world.settings(**changes, sampling__advantages="objective").sampling.uses_credit


BALANCED = {"run__steps": 1, "reward__threshold": 0.3, "sampling__max_samples": 9, "sampling__train_size": 4}


def test_an_own_sampling_rule_trains_as_the_rule_that_it_computes(world: World, tmp_path: Path) -> None:
    found = []
    for name in ("ada_seq_balance", "own_parts:balanced"):
        rounds = {"sampling__round_size": 3} if name == "ada_seq_balance" else {}
        train(world.settings(run__dir=str(tmp_path / str(len(name))), sampling__rule=name, **BALANCED, **rounds))
        found.append(records_of(tmp_path / str(len(name))))
    assert found[0] == found[1]
    assert found[0][-1]["sampling/rounds"] > 1


def test_an_own_rule_that_fails_in_the_run_is_named(world: World, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rule: the function own_parts:fails_later raised ZeroDiv.*own_parts.py:\d+"):
        train(world.settings(run__dir=str(tmp_path), sampling__rule="own_parts:fails_later", **BALANCED))


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ("dapo", "sampling.rule: found 'dapo', expected uniform, ada_seq_pos, "),
        ("own_parts:not_an_engine", "sampling.rule: found int at 'own_parts:not_an_engine', expected a function (ask"),
        ("own_parts:truncated", "has the parameters (columns: 'TokenColumns')"),
        ("own_parts:fractional", "the function own_parts:fractional returned 1.5 for asked = 0, positives = 0, negat"),
        ("own_parts:never", "the function own_parts:never returned 0 before the first sample"),
        ("own_parts:negative", "returned -1 for asked = 4, positives = 0, negatives = 4"),
        ("own_parts:raises", "sampling.rule: the function own_parts:raises raised SystemExit: 3"),
    ],
)
def test_an_own_rule_that_is_none_is_refused_before_the_run(world: World, rule: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        world.settings(sampling__rule=rule)
