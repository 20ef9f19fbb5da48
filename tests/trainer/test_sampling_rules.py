"""Each rule of adaptive sampling for a few steps of real training, and what the steps record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from train_world import World, trainer_of

from megarl.megatron import distributed
from megarl.run.metrics_log import read_metrics, without_timing

ADA_EST: dict[str, Any] = {"sampling__rule": "ada_est", "sampling__max_samples": 12}
RULES: dict[str, dict[str, Any]] = {
    "one over p": {**ADA_EST, "estimate__objective": "inverse:1"},
    "log": {**ADA_EST, "estimate__objective": "log"},
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
