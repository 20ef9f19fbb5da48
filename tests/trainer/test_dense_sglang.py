"""A dense model's RL run whose engine is a real SGLang server: sampled, trained and sent again, without routes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from train_world import World, trainer_of

from megarl.data.tiny import Family, write_sort_task, write_tiny_model
from megarl.megatron import distributed
from megarl.run.metrics_log import read_metrics

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_the_engines_agree_after_every_sync(family: Family, sglang_python: Path, tmp_path: Path) -> None:
    """k3 is that of rounding alone; nothing asks for routes."""
    world = World(tmp_path)
    write_tiny_model(world.model, family=family, hidden_size=64, num_layers=2, max_positions=64, initializer_range=0.15)
    write_sort_task(tmp_path / "task", num_train=32, num_heldout=4, num_demonstrations=0, digits=3)
    settings = world.settings(
        **{"run__dir": str(tmp_path / "run"), "train__replay": "none", "optim__lr": 0.01},
        **{"rollout__engine": "sglang", "rollout__fp8_rounding": False, "sglang__python": str(sglang_python)},
        **{"sglang__mem_fraction": 0.05, "sglang__max_total_tokens": 4096},
    )
    distributed.initialize(settings)
    trainer = trainer_of(settings)
    trainer.run()
    trainer.log.close()
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(record["grad_norm"] > 0 for record in records if record["kind"] == "minibatch")  # the weights move
    steps = [record for record in records if record["kind"] == "step"]
    assert len(steps) == 2
    for step in steps:
        assert 0.0 <= step["rollout/k3"] < 1e-9
        assert step["rollout/wrong_answers"] == 0
        assert math.isfinite(step["rollout/entropy"])
        assert not [name for name in step if "router" in name or "flip" in name or "routes" in name]
    log = (tmp_path / "run" / "sglang" / "server0.log").read_text()
    assert "--enable-return-routed-experts" not in log.splitlines()[0]
