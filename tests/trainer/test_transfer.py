"""What ranks receive of a step's rollouts and routes: tensors, and each rank its own share."""

from __future__ import annotations

from typing import Any

import pytest
from forks import Job, run_jobs
from train_world import GROUP_SIZE, NUM_GROUPS, NUM_MOE_LAYERS, TOP_K, World

pytestmark = pytest.mark.multirank

STEP: dict[str, Any] = {"rollout__prompts_per_step": NUM_GROUPS, "train__replay": "r3", "train__mini_batches": 1}
TWICE = {**STEP, "rollout__prompts_per_step": 2 * NUM_GROUPS}
NUM_RESPONSES = NUM_GROUPS * GROUP_SIZE
REWARD_BYTES = 88
"""What all ranks know of a response: the columns of ``megarl.trainer.sampling.step_rollouts``."""
PER_TOKEN = 14
"""Bytes of a token with its log-probability, version and masks (``megarl.core.types.Rollout``)."""


@pytest.fixture(scope="module")
def received(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[int]]]:
    """A step of 32 responses on one model copy of two ranks, the same on two copies, and twice as many on those."""
    one, two = {"tp2": {**STEP, "parallel__tp": 2}}, {"tp2 dp2": {**STEP, "parallel__tp": 2}}
    two["tp2 dp2 twice"] = {**TWICE, "parallel__tp": 2}
    jobs = [
        Job("one", 2, "train_jobs:transferred", {"world": world, "layouts": one}),
        Job("two", 4, "train_jobs:transferred", {"world": world, "layouts": two}),
    ]
    found = run_jobs(jobs, tmp_path_factory.mktemp("transferred"))
    return {**found["one"].checked(), **found["two"].checked()}


def test_no_objects_travel(received: dict[str, dict[str, list[int]]]) -> None:
    for layout, kinds in received.items():
        assert "objects" not in kinds, layout


def test_a_rank_receives_what_its_copy_drew_elsewhere_and_routes_of_its_own_tokens(
    received: dict[str, dict[str, list[int]]],
) -> None:
    found = received["tp2"]
    for rank in range(2):
        tokens = found["tokens"][rank]
        # Half of the responses were drawn by the other rank of the copy; headers and placements come on top.
        assert 0.4 * PER_TOKEN * tokens < found["rollouts"][rank] < 0.6 * PER_TOKEN * tokens + 1500 * NUM_RESPONSES
        # Of the routes it gets those of its half of the tokens that the other rank has drawn, one byte per expert.
        assert 0 < found["routes"][rank] < tokens / 2 * NUM_MOE_LAYERS * TOP_K
        assert found["rewards"][rank] <= REWARD_BYTES * (NUM_RESPONSES / 2 + 1)


def test_more_nodes_do_not_bring_a_rank_more_bytes(received: dict[str, dict[str, list[int]]]) -> None:
    one, two, twice = (received[name] for name in ("tp2", "tp2 dp2", "tp2 dp2 twice"))
    print({name: {kind: max(sizes) for kind, sizes in kinds.items()} for name, kinds in received.items()})
    assert max(two["rollouts"]) < 0.65 * max(one["rollouts"])  # the same step on twice as many ranks
    assert max(two["routes"]) < max(one["routes"])
    assert max(twice["rollouts"]) < 1.25 * max(one["rollouts"])  # twice the step on twice as many ranks
    # Only rewards are known everywhere: one row of numbers per response, however long it is.
    assert max(twice["rewards"]) <= REWARD_BYTES * (2 * NUM_RESPONSES + 4)
