"""A few rows of other tokens in one response of a deep model: found by the pass that trains, and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_world import World, training

from megarl.core.types import Rollout, SampleRequest
from megarl.data.tiny import write_sort_task, write_tiny_model
from megarl.engines.local.engine import LocalEngine
from megarl.engines.protocol import SamplingParams
from megarl.trainer.mini_batch import StepPlan

DEPTHS = {48: 8, 4: 32}
"""Layers, and the length of the run."""
NUM_SEQUENCES, PROMPT, RESPONSE = 16, 40, 60


def made(folder: Path, num_layers: int) -> tuple[World, list[Rollout]]:
    """A model, and the responses of an engine in bf16, which flips some experts."""
    world = World(folder)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_experts": 16, "top_k": 4, "expert_width": 8, "max_positions": 128}
    write_tiny_model(world.model, num_layers=num_layers, num_heads=2, num_kv_heads=1, initializer_range=0.1, **sizes)
    write_sort_task(world.folder / "task", num_train=64, num_heldout=16, num_demonstrations=256, digits=3)
    engine = LocalEngine.from_pretrained(world.model, dtype=torch.bfloat16)
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, 32, (NUM_SEQUENCES, PROMPT)).astype(np.int32)
    requests = [SampleRequest(prompt, s // 4, s % 4, seed=s) for s, prompt in enumerate(prompts)]
    rollouts = engine.generate(requests, SamplingParams(1.0, 1.0, RESPONSE, (), True, None))
    engine.close()
    return world, rollouts


Change = Callable[[np.ndarray, np.ndarray, slice], np.ndarray]
FAULTS: dict[str, tuple[int, Change]] = {
    "of another response, in the prompt": (3, lambda experts, other, rows: other[rows]),
    "of another response, across the boundary": (PROMPT - 4, lambda experts, other, rows: other[rows]),
    "of the slot's earlier owner": (50, lambda experts, other, rows: other[-9 - rows.stop + rows.start : -9]),
    "zeros": (44, lambda experts, other, rows: np.arange(experts.shape[2])),
    "one row repeated": (60, lambda experts, other, rows: other[5]),
    "of other layers": (20, lambda experts, other, rows: np.roll(experts[rows], 1, 1)),
}


@pytest.mark.parametrize("num_layers", DEPTHS)
def test_acceptance_a_short_run_of_foreign_rows_is_dropped_and_named(tmp_path: Path, num_layers: int) -> None:
    world, rollouts = made(tmp_path, num_layers)
    size, places = DEPTHS[num_layers], {}
    for index, (first, change) in enumerate(FAULTS.values()):
        mine, other = (rollouts[place].routed_experts for place in (2 * index, 2 * index + 1))
        assert mine is not None
        assert other is not None
        places[2 * index] = rows = slice(first, first + size)
        changed = mine.copy()
        changed[rows] = change(mine, other, rows)
        rollouts[2 * index] = replace(rollouts[2 * index], routed_experts=changed)
    for replay in ("r3", "none"):
        limits: dict[str, Any] = {"train__micro_batch_tokens": 2048, "train__max_bad_steps": 0}
        with training(world.settings(train__replay=replay, **limits)) as step:
            mini = step.prepare(rollouts, np.ones(NUM_SEQUENCES))
            ([mini], _) = step.tripwires.judge([step.old_pass(StepPlan.of(step.config, 1), mini)])
            verdict = step.tripwires.verdict
        assert verdict is not None
        flip = mini.statistics["router/native/flip" if replay == "r3" else "router/flip"].sums
        assert float(flip[0] / flip[1]) > 0
        found = {int(index): tuple(verdict.gaps[index, 10:12]) for index in verdict.over[:, 2].nonzero()[0]}
        assert set(found) == set(places), replay
        for index, rows in places.items():
            assert np.abs(np.subtract(found[index], (rows.start, rows.stop - 1))).max() <= 2, (replay, index)
            assert f"rows {found[index][0]:.0f} to {found[index][1]:.0f}" in verdict.reasons()[index // 4, index % 4]
