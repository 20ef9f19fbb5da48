"""Each rule of adaptive sampling for a few steps of real training, and what the steps record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forks import Job, run_jobs
from model_jobs import ADVANTAGES, REWARDS, Case, case_training, tied_model, variances
from test_step_oracle import logprobs_of, model_at
from train_jobs import recorded, sampler_of
from train_world import GROUP_SIZE, NUM_GROUPS, World, trainer_of, training

from megarl.core.choices.stopping import Allotted
from megarl.core.metrics import finalize
from megarl.megatron import distributed
from megarl.run.metrics_log import read_metrics, without_timing
from megarl.trainer.mini_batch import Judged
from megarl.trainer.sampling.gradient_norms import gradient_variance
from megarl.trainer.sampling.step_rollouts import StepRollouts

ADA_EST: dict[str, Any] = {"sampling__rule": "ada_est", "sampling__max_samples": 12}
RULES: dict[str, dict[str, Any]] = {
    "one over p": {**ADA_EST, "estimate__objective": "inverse:1"},
    "log": {**ADA_EST, "estimate__objective": "log"},
    "probe, fixed training size": {**ADA_EST, "estimate__probe": 2, "sampling__train_size": 2},
    "value head with a probe": {**ADA_EST, "estimate__probe": 2, "estimate__by": "value_head"},
    "tiers": {"sampling__rule": "tiers", "sampling__tiers": [2, 4, 12]},
    "gvm": {"sampling__rule": "gvm", "gvm__pre_samples": 2, "gvm__refresh_every": 2},
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_trains_and_resumes(world: World, tmp_path: Path, rule: str) -> None:
    """Four steps at once, and two and two: the same records. Costs add up what was drawn."""
    table = {**RULES[rule], "reward__function": "train_rewards:starts_low", "checkpoint__every": 2}
    records = []
    for name, parts in (("whole", (4,)), ("parts", (2, 4))):
        for steps in parts:
            settings = world.settings(run__dir=str(tmp_path / name), **table, run__steps=steps, optim__lr=1e-3)
            distributed.initialize(settings)
            trainer = trainer_of(settings)
            trainer.run()
            trainer.log.close()
            distributed.shutdown()
        found = without_timing(read_metrics(tmp_path / name / "metrics.jsonl"))
        records.append([record for record in found if record["kind"] == "step"])
    assert records[0] == records[1]
    stage = {key: [step.get(f"gvm/first_stage_{key}", 0.0) for step in records[0]] for key in ("samples", "tokens")}
    for key in ("samples", "tokens"):
        drawn = np.add([step[f"sampling/{key}"] for step in records[0]], stage[key])
        np.testing.assert_allclose([step[f"cost/{key}"] for step in records[0]], np.cumsum(drawn))
    assert [step["cost/updates"] for step in records[0]] == [2, 4, 6, 8]
    assert (np.sum(stage["samples"]) > 0) == (rule == "gvm")
    if rule == "probe, fixed training size":
        assert all(step["sampling/trained"] <= 2 * NUM_GROUPS for step in records[0])
        assert max(step["sampling/rounds"] for step in records[0]) > 1


@pytest.mark.parametrize("by", ["counts", "value_head"])
def test_with_a_probe_the_first_step_is_adaptive_already(world: World, by: str) -> None:
    overrides = {**ADA_EST, "estimate__probe": 2, "estimate__objective": "inverse:1", "estimate__by": by}
    overrides["reward__function"] = "train_rewards:starts_low"
    with training(world.settings(**overrides)) as step:
        made = sampler_of(world, step.config, step)
        selections = recorded(made)
        made.sample_step(0)
        made.close()
        made.engine.close()
    (selection,) = selections
    assert isinstance(selection.rule, Allotted)
    assert selection.rule.counts == (2,) * NUM_GROUPS
    rows = selection.rule.more
    assert all(row[0] > row[1] > row[2] for row in rows)
    for pool in selection.pools:
        positives = sum(pool.rewards[sample] > 0.7 for sample in (0, 1))  # type: ignore[operator]
        assert pool.asked == [2, rows[pool.prompt][positives]][: 1 + bool(rows[pool.prompt][positives])]


def test_variance_is_that_of_gradients_by_autograd(world: World) -> None:
    rollouts = world.rollouts("fp32")[:8]
    model = model_at(world.model)
    scores = []
    for rollout in rollouts:
        model.zero_grad()
        logprobs_of(model, rollout, 1.0)[rollout.loss_mask].sum().backward()
        scores.append(model.model.embed_tokens.weight.grad.double().flatten().numpy().copy())
    gradients, squares = ADVANTAGES[:, None] * np.array(scores), (np.array(scores) ** 2).sum(1)
    groups = np.arange(8) // 4
    found = variances(world, {"one": Case({}, (8,))})["one"]
    variance = (gradients**2).sum(1).sum() - 8 * (gradients.mean(0) ** 2).sum()
    assert found["variance/gradient"] == pytest.approx(variance / 7, rel=2e-3)
    best = [float((squares * REWARDS)[groups == g].sum() / squares[groups == g].sum()) for g in (0, 1)]
    assert found["baseline/optimal"] == pytest.approx(np.mean(best), rel=1e-4)
    assert found["baseline/mean"] == pytest.approx(REWARDS.mean())


R3: dict[str, Any] = {"train__replay": "r3"}
ALONE = {"untied": Case({}, (8,)), "tied": Case({}, (8,), tied=True), "r3": Case(R3, (8,), engine="fp8")}
ON_TWO = {
    "untied ep2": Case({"parallel__ep": 2, "megatron__overlap_grad_reduce": True}, (8, 0)),
    "tied dp2": Case({}, (5, 3), tied=True),
    "tied tp2": Case({"parallel__tp": 2}, (8,), tied=True),
    "tied pp2": Case({"parallel__pp": 2}, (8,), tied=True),
    "r3 cp2": Case({**R3, "parallel__cp": 2}, (8,), engine="fp8"),
}


@pytest.mark.slow(minutes=2)
@pytest.mark.multirank
def test_variance_is_the_same_in_every_layout(world: World, tmp_path: Path) -> None:
    tied_model(world)
    alone = variances(world, ALONE)
    job = Job("two", 2, "model_jobs:variances", {"world": world, "cases": ON_TWO})
    for name, found in run_jobs([job], tmp_path)["two"].checked().items():
        assert found == pytest.approx(alone[name.split()[0]], rel=1e-3), name


def test_a_step_without_advantages_has_no_negative_variance_and_one_without_responses_has_none(world: World) -> None:
    rollouts = world.rollouts("fp32")[:8]
    silent = [replace(rollout, loss_mask=np.zeros_like(rollout.loss_mask)) for rollout in rollouts]
    judged = Judged(np.zeros(9), np.append(np.arange(8) // 4, -1), [list(range(8))])
    with case_training(world, Case({}, (8,))) as step:
        found, nothing = (
            finalize(gradient_variance(step, StepRollouts([part], [np.zeros(8)], judged, {}, None, 0, [])))
            for part in (rollouts, silent)
        )
    assert found["variance/gradient"] > 0
    assert found["baseline/variance_ratio"] == 1.0
    assert nothing == {}


def test_a_run_records_its_variance_now_and_then(world: World, tmp_path: Path) -> None:
    """And measuring it changes nothing else."""
    records = []
    for every in (2, 0):
        settings = world.settings(run__dir=str(tmp_path / str(every)), run__steps=2, log__variance_every=every)
        distributed.initialize(settings)
        trainer = trainer_of(settings)
        trainer.run()
        trainer.log.close()
        distributed.shutdown()
        lines = (tmp_path / str(every) / "metrics.jsonl").read_text().splitlines()
        records.append([record for record in map(json.loads, lines) if record["kind"] == "step"])
    names = [{name for name in record if name.startswith(("variance/", "baseline/"))} for record in records[0]]
    assert not names[0]
    assert len(names[1]) == 5
    assert 0 < records[0][1]["baseline/variance_ratio"] <= 1
    assert records[0][1]["variance/gradient"] > 0
    for name in ("loss", "reward/mean", "grad_norm"):
        if name in records[1][1]:
            assert records[0][1][name] == records[1][1][name]
    assert GROUP_SIZE == 4
