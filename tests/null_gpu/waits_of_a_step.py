"""Counts the waits of a training step with Megatron's local layers: ``waits_of_a_step.py MODELS`` prints them as JSON.

In a process of its own, because Transformer Engine, once imported, is used by everything in a process.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.modules["transformer_engine"] = None  # type: ignore[assignment] # Python's way to say that an import fails
TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "megatron")]

import numpy as np  # noqa: E402
from null_gpu.computing import computing  # noqa: E402
from null_gpu.counting import host_waits  # noqa: E402
from tiny_world import config, policy_of, rollouts  # noqa: E402

from megarl.core.objectives import OBJECTIVES  # noqa: E402
from megarl.megatron.distributed import collect  # noqa: E402
from megarl.trainer.mini_batch import MiniBatch, StepPlan  # noqa: E402
from megarl.trainer.step import TrainStep  # noqa: E402

PACKAGE = TESTS.parent / "megarl"


def waits_of(action: Callable[[], Any]) -> dict[str, dict[str, int]]:
    """By file of megarl, and by file of Megatron."""
    with host_waits() as lines:
        action()
    files = [Path(line.rpartition(":")[0]) for line in lines]
    own = [str(file.relative_to(PACKAGE)) for file in files if PACKAGE in file.parents]
    others = [file.name for file in files if PACKAGE not in file.parents]
    return {"megarl": Counter(own), "megatron": Counter(others)}


def step(model: Path) -> dict[str, Any]:
    """Waits of the passes and of the update of one mini-batch under R3."""
    settings = config(model, model__dtype="bf16", train__replay="r3", train__mini_batches=2)
    trained = TrainStep(settings, policy_of(settings), OBJECTIVES["minirl"])
    made = rollouts()
    minis: list[MiniBatch] = []
    metrics: list[Any] = []
    found: dict[str, Any] = {}
    advantages = np.random.default_rng(1).normal(size=len(made))
    found["prepare"] = waits_of(lambda: minis.append(trained.prepare(made, advantages)))
    (mini,) = minis
    found["micro_batches"] = len(mini.micro_batches)
    plan = StepPlan.of(settings, settings.run.steps)
    found["old"] = waits_of(lambda: minis.append(trained.old_pass(plan, mini)))
    found["update"] = waits_of(lambda: metrics.append(trained.update(plan, minis[1:], 0)[1]))
    found["metrics"] = waits_of(lambda: collect([minis[1].statistics, *metrics]))
    found["offload"] = waits_of(trained.policy.offload)
    found["reload"] = waits_of(trained.policy.reload)
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    models = Path(sys.argv[1])
    with computing():
        print(json.dumps(step(models / "bf16")))
