"""examples/rl_step.py learns, and computes the very numbers of the trainer's step."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import preloaded
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from megarl.core.metrics import finalize
from megarl.data.tiny import write_tiny_model
from megarl.engines.local.engine import LocalEngine
from megarl.megatron import distributed
from megarl.megatron.policy import Policy, schedule_of
from megarl.trainer.mini_batch import StepPlan
from megarl.trainer.step import TrainStep

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "rl_step.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    sys.path.insert(0, str(EXAMPLE.parent))
    return importlib.import_module("rl_step")


def test_the_reward_rises_and_replay_closes_the_gap() -> None:
    words = [sys.executable, str(EXAMPLE), "--steps", "6"]
    done = preloaded.run(words, timeout=3600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = re.findall(
        r"^step .* reward (\S+)  flip (\S+)% \(native (\S+)%\)  k3 (\S+) \(native (\S+)\)", done.stdout, re.MULTILINE
    )
    rewards, flips, native, gaps, native_gaps = np.array(lines, dtype=float).T
    assert len(rewards) == 6
    assert rewards[-1] > rewards[0] + 0.1
    assert (flips == 0).all()
    assert (native > 0).all()
    assert (gaps < native_gaps)[:3].all()


@pytest.mark.parametrize("replay", ["r3", "none"])
def test_a_step_of_the_example_is_a_step_of_the_trainer(example: ModuleType, tmp_path: Path, replay: str) -> None:
    model = write_tiny_model(tmp_path / "model", hidden_size=32, num_experts=8, expert_width=16)
    config = example.configure(model, 1)
    config = config.model_copy(update={"train": config.train.model_copy(update={"replay": replay})})
    distributed.shutdown()  # an earlier test of this process may have left its groups
    distributed.initialize(config)
    try:
        first, second = (Policy(config, schedule_of(config)) for _ in range(2))
        engine = LocalEngine(AutoConfig.from_pretrained(model), fp8_rounding=True)
        engine.update_weights(first.export(), version=0)
        rollouts = example.sample(engine, AutoTokenizer.from_pretrained(model), 0)
        advantages = np.random.default_rng(0).normal(size=len(rollouts))
        parts = np.array_split(np.arange(len(rollouts)), example.MINI_BATCHES)

        minis = [example.make_batch(config, first, [rollouts[i] for i in part], advantages[part]) for part in parts]
        gaps = [finalize(example.run_old_pass(first, mini, replay == "r3")) for mini in minis]
        updates = [example.update(first, mini, replay == "r3") for mini in minis]

        step = TrainStep(config, second, example.OBJECTIVE)
        theirs = [step.prepare([rollouts[i] for i in part], advantages[part]) for part in parts]
        plan = StepPlan.of(config, config.run.steps)
        theirs = [step.old_pass(plan, mini) for mini in theirs]
        expected_gaps, expected = [finalize(mini.statistics) for mini in theirs], []
        for index in range(len(theirs)):
            theirs, statistics = step.update(plan, theirs, index)
            expected.append(finalize(statistics))
        for found, wanted in zip([*gaps, *updates], [*expected_gaps, *expected], strict=True):
            assert found == pytest.approx({name: wanted[name] for name in found}, rel=1e-6, abs=0)
        assert {"loss", "grad_norm"} <= set(updates[0])
        assert all(
            torch.equal(mine, other) for (_, mine), (_, other) in zip(first.export(), second.export(), strict=True)
        )
    finally:
        distributed.shutdown()
