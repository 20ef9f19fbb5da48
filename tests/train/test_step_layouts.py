"""A step on a fixed batch of rollouts is the same step in every layout."""

from __future__ import annotations

from typing import Any

import pytest
from forks import Job, run_jobs
from train_jobs import rows, steps
from train_world import ROWS, Taken, World

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


@pytest.fixture(scope="module")
def rows_taken(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[Taken]]]:
    """Two steps of every row on one rank and on two expert-parallel ones."""
    pipelines = {name: {**ROWS[name], "parallel__pp": 2} for name in ("kl_grpo", "minirl k3", "adaptive theta/mu")}
    jobs = [
        Job("ep2", 2, "train_jobs:rows", {"world": world, "variants": {n: {**r, **_EP2} for n, r in ROWS.items()}}),
        Job("pp2", 2, "train_jobs:rows", {"world": world, "variants": pipelines}),
    ]
    ended = run_jobs(jobs, tmp_path_factory.mktemp("rows"))
    return {"single": rows(world, ROWS), **{job.name: ended[job.name].checked() for job in jobs}}


_EP2 = {"parallel__ep": 2}


@pytest.mark.multirank
@pytest.mark.parametrize("name", ROWS)
def test_every_row_trains_two_steps_the_same_on_two_expert_parallel_ranks(
    rows_taken: dict[str, dict[str, list[Taken]]], name: str
) -> None:
    _same_steps(rows_taken["single"][name], rows_taken["ep2"][name])


@pytest.mark.multirank
def test_rows_with_passes_beforehand_train_the_same_on_two_pipeline_stages(
    rows_taken: dict[str, dict[str, list[Taken]]],
) -> None:
    for name, found in rows_taken["pp2"].items():
        _same_steps(rows_taken["single"][name], found)


def _same_steps(alone: list[Taken], found: list[Taken]) -> None:
    assert len(alone) == len(found) == 2
    for index, (one, two) in enumerate(zip(alone, found, strict=True)):
        assert set(two.step) == set(one.step)
        for number, (a, b) in enumerate(zip(one.updates, two.updates, strict=True)):
            assert set(b) == set(a)
            assert a["grad_norm"] > 0
            # What float noise does to the first updates, Adam carries on.
            rel, tiny = (1e-4, 1e-6) if index == number == 0 else (5e-3, 1e-4)
            for key in ("loss", "grad_norm", "entropy", "loss_tokens", "kl/penalty", "tis/power", "tis/weight/mean"):
                if key in a:
                    assert b[key] == pytest.approx(a[key], rel=rel, abs=tiny), (index, number, key)
