"""Each rule of adaptive sampling for a few steps of real training, and what the steps record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from train_jobs import recorded, sampler_of
from train_world import NUM_GROUPS, World, trainer_of, training

from megarl.core.choices.stopping import Allotted
from megarl.megatron import distributed
from megarl.run.metrics_log import read_metrics, without_timing

ADA_EST: dict[str, Any] = {"sampling__rule": "ada_est", "sampling__max_samples": 12}
RULES: dict[str, dict[str, Any]] = {
    "one over p": {**ADA_EST, "estimate__objective": "inverse:1"},
    "log": {**ADA_EST, "estimate__objective": "log"},
    "probe, fixed training size": {**ADA_EST, "estimate__probe": 2, "sampling__train_size": 2},
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


def test_with_a_probe_the_first_step_is_adaptive_already(world: World) -> None:
    overrides = {**ADA_EST, "estimate__probe": 2, "estimate__objective": "inverse:1"}
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
