"""What ranks receive of a step's routes: tensors, and each rank those of its own tokens."""

from __future__ import annotations

from typing import Any

import pytest
from forks import Job, run_jobs
from train_world import NUM_GROUPS, NUM_MOE_LAYERS, TOP_K, World

pytestmark = pytest.mark.multirank

STEP: dict[str, Any] = {"rollout__prompts_per_step": NUM_GROUPS, "train__replay": "r3", "train__mini_batches": 1}


def test_a_rank_receives_routes_of_its_own_tokens(world: World, tmp_path: Any) -> None:
    """A step of 32 responses on one model copy of two ranks."""
    layouts = {"tp2": {**STEP, "parallel__tp": 2}}
    job = Job("one", 2, "train_jobs:transferred", {"world": world, "layouts": layouts})
    found = run_jobs([job], tmp_path)["one"].checked()["tp2"]
    for rank in range(2):
        # It gets the routes of its half of the tokens that the other rank has drawn, one byte per expert.
        assert 0 < found["routes"][rank] < found["tokens"][rank] / 2 * NUM_MOE_LAYERS * TOP_K
