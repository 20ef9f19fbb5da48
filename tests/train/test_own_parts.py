"""Parts of the user's own in a run: an engine and an objective that the configuration names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import own_parts
import pytest
from train_world import World

from megarl.core.choices.table import OBJECTIVES
from megarl.errors import ConfigError
from megarl.run.metrics_log import read_metrics, without_timing
from megarl.train.loop import train


@pytest.mark.parametrize("engine", ["own_parts:counting", "own_parts:named"])
def test_an_own_engine_trains_as_the_engine_that_it_wraps(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    found = {}
    for name in ("local", engine):
        folder = tmp_path / name.replace(":", "-")
        train(world.settings(run__dir=str(folder), run__steps=1, rollout__fp8_rounding=False, rollout__engine=name))
        found[name] = without_timing(read_metrics(folder / "metrics.jsonl"))
    assert found[engine] == found["local"]
    assert "own engine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rollout__engine": "vllm"}, 'engine: found \'vllm\', expected "local" or "sglang", or package.module:name'),
        ({"rollout__engine": "no_such_module:engine"}, "cannot import 'no_such_module'"),
        ({"rollout__engine": "own_parts:nothing"}, "own_parts.py has nothing named 'nothing'"),
        ({"rollout__engine": "own_parts:not_an_engine"}, "engine: found int at 'own_parts:not_an_engine'"),
        ({"rollout__engine": "own_parts:without_routes"}, 'train.replay: found "r3" with rollout.engine = "own_parts:'),
        (
            {"rollout__engine": "own_parts:counting", "rollout__fp8_rounding": True},
            "rollout.fp8_rounding: found true with engine",
        ),
        ({"rollout__engine": "own_parts:counting", "rollout__top_p": 0.9}, "rollout.top_p: found 0.9, expected 1"),
        ({"rollout__engine": "own_parts:counting", "rollout__one_step_off": True}, "rollout.one_step_off: found true"),
    ],
)
def test_an_own_engine_that_cannot_is_refused(world: World, changes: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        world.settings(**{"rollout__fp8_rounding": False, **changes})
    assert told in str(caught.value)


def records(world: World, folder: Path, objective: str, **overrides: Any) -> list[dict[str, Any]]:
    """The records of a run of one step with two updates."""
    train(world.settings(run__dir=str(folder), run__steps=1, train__objective=objective, **overrides))
    return without_timing(read_metrics(folder / "metrics.jsonl"))


def test_an_own_objective_trains_as_the_same_row_of_the_table(world: World, tmp_path: Path) -> None:
    own = records(world, tmp_path / "own", "own_parts:my_grpo", train__objective_overrides={"eps_low": 0.1})
    row = records(world, tmp_path / "row", "grpo", train__objective_overrides={"eps_low": 0.1, "eps_high": 0.28})
    assert own == row


def test_an_own_function_trains_as_the_row_that_it_computes(world: World, tmp_path: Path) -> None:
    own, row = (records(world, tmp_path / str(len(name)), name) for name in ("own_parts:minirl", "minirl"))
    computed = [(record["loss"], record["grad_norm"]) for record in own if record["kind"] == "minibatch"]
    assert computed == [(record["loss"], record["grad_norm"]) for record in row if record["kind"] == "minibatch"]
    assert all("own/outside" in record for record in own if record["kind"] == "minibatch")


def test_what_a_function_does_not_compute_is_set_by_parts(world: World) -> None:
    changes = {"advantage": "grpo", "aggregation": "token-mean"}
    settings = world.settings(train__objective="own_parts:truncated", train__objective_overrides=changes)
    expected = replace(OBJECTIVES["minirl"], weight="none", mask="none", cap=None, **changes)
    assert settings.train.resolved_objective == expected
    assert settings.train.objective_function is own_parts.truncated
    assert settings.warnings == ()
    assert world.settings(train__objective="own_parts:my_grpo").train.objective_function is None


@pytest.mark.parametrize(
    ("objective", "overrides", "told"),
    [
        ("no_such_module:f", {}, "train.objective: found 'no_such_module:f', but cannot import"),
        ("own_parts:nothing", {}, "own_parts.py has nothing named 'nothing'"),
        (
            "own_parts:not_an_engine",
            {},
            "train.objective: found int at 'own_parts:not_an_engine', expected an Obj",
        ),
        ("own_parts:two_arguments", {}, "has the parameters (columns: 'TokenColumns', more: 'int')"),
        ("own_parts:truncated", {"cap": 2.0}, "train.objective_overrides.cap: found with the function"),
        ("own_parts:truncated", {"kl": "k3"}, "need a kl_coef above 0"),
        ("own_parts:my_grpo", {"kl": "k3"}, "need a kl_coef above 0"),
    ],
)
def test_an_own_objective_that_is_none_is_refused(
    world: World, objective: str, overrides: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        world.settings(train__objective=objective, train__objective_overrides=overrides)
    assert told in str(caught.value)


BALANCED: dict[str, Any] = {
    "run__steps": 1,
    "reward__threshold": 0.3,
    "sampling__max_samples": 9,
    "sampling__train_size": 4,
}


def test_an_own_sampling_rule_trains_as_the_rule_that_it_computes(world: World, tmp_path: Path) -> None:
    found = []
    for name in ("ada_seq_balance", "own_parts:balanced"):
        rounds = {"sampling__round_size": 3} if name == "ada_seq_balance" else {}
        train(world.settings(run__dir=str(tmp_path / str(len(name))), sampling__rule=name, **BALANCED, **rounds))
        found.append(without_timing(read_metrics(tmp_path / str(len(name)) / "metrics.jsonl")))
    assert found[0] == found[1]
    assert found[0][-1]["sampling/rounds"] > 1


def test_an_own_rule_that_fails_in_the_run_is_named(world: World, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rule: the function own_parts:fails_later raised ZeroDiv.*own_parts.py:\d+"):
        train(world.settings(run__dir=str(tmp_path), sampling__rule="own_parts:fails_later", **BALANCED))


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ("dapo", "sampling.rule: found 'dapo', expected one of uniform, ada_seq_pos, "),
        ("own_parts:nothing", "own_parts.py has nothing named 'nothing'"),
        (
            "own_parts:not_an_engine",
            "sampling.rule: found int at 'own_parts:not_an_engine', expected a function (asked",
        ),
        ("own_parts:truncated", "has the parameters (columns: 'TokenColumns')"),
        ("own_parts:fractional", "the function own_parts:fractional returned 1.5 for asked = 0, positives = 0, negat"),
        ("own_parts:never", "the function own_parts:never returned 0 before the first sample"),
        ("own_parts:negative", "returned -1 for asked = 4, positives = 0, negatives = 4"),
        ("own_parts:raises", "sampling.rule: the function own_parts:raises raised SystemExit: 3"),
    ],
)
def test_an_own_rule_that_is_none_is_refused_before_the_run(world: World, rule: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        world.settings(sampling__rule=rule)
    assert told in str(caught.value)
