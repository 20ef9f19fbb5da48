"""A step on a fixed batch of rollouts is the same step in every layout."""

from __future__ import annotations

from typing import Any

import pytest
from forks import Job, run_jobs
from train_jobs import steps
from train_world import Taken, World

LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"parallel__ep": 2},
    "tp2": {"parallel__tp": 2},
    "pp2": {"parallel__pp": 2},
    "dp2": {},
}
REPLAY = ("r3", "r2", "none")


@pytest.fixture(scope="module")
def taken(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Taken]]:
    """By layout ("single" is one rank) and replay mode."""
    # A process for each layout: groups that are left behind keep their gloo threads.
    jobs = [
        Job(name, 2, "train_jobs:steps", {"world": world, "variants": variants})
        for name, layout in LAYOUTS.items()
        for variants in [{mode: {**layout, "train__replay": mode} for mode in REPLAY}]
    ]
    ended = run_jobs(jobs, tmp_path_factory.mktemp("layouts"))
    alone = steps(world, {mode: {"train__replay": mode} for mode in REPLAY})
    return {
        "single": alone,
        **{name: ended[name].checked() for name in LAYOUTS},
    }


@pytest.mark.multirank
@pytest.mark.parametrize("replay", REPLAY)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_acceptance_same_rollouts_same_losses_in_every_layout(
    taken: dict[str, dict[str, Taken]], layout: str, replay: str
) -> None:
    alone, found = taken["single"][replay], taken[layout][replay]
    assert len(found.updates) == len(alone.updates) == 2
    for index, (one, two) in enumerate(zip(alone.updates, found.updates, strict=True)):
        for name in ("loss", "grad_norm", "entropy", "loss_tokens", "lr"):
            assert two[name] == pytest.approx(one[name], rel=5e-5, abs=1e-6), (index, name)
        # Quantiles come from a histogram, so a token on an edge may move one by 7.5 %.
        exact = {name: value for name, value in one.items() if "/p" not in name}
        assert {name: two[name] for name in exact} == pytest.approx(exact, rel=2e-3, abs=2e-5)
        assert set(two) == set(one)


@pytest.mark.multirank
@pytest.mark.parametrize("layout", LAYOUTS)
def test_router_disagreement_is_the_same_in_every_layout(taken: dict[str, dict[str, Taken]], layout: str) -> None:
    for replay in REPLAY:
        alone, found = taken["single"][replay].step, taken[layout][replay].step
        assert set(found) == set(alone)
        for name in (name for name in alone if name.startswith("router/")):
            assert found[name] == pytest.approx(alone[name], abs=1e-12), (replay, name)
        for name in ("rollout/k1", "rollout/k3", "rollout/entropy"):
            assert found[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-6), (replay, name)
    assert taken[layout]["r3"].step["router/flip"] == 0.0
