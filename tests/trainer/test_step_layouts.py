"""A step on a fixed batch of rollouts is the same step in every layout, with overlap, and around an offload."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forks import Job, run_jobs
from train_jobs import rows, steps
from train_world import NUM_MOE_LAYERS, NUM_SEQUENCES, ROWS, TOP_K, Taken, World, take_step, training, weights_of

from megarl.errors import ConfigError

LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"parallel__ep": 2},
    "tp2": {"parallel__tp": 2},
    "pp2": {"parallel__pp": 2},
    "dp2": {},
    "pp4": {"parallel__pp": 4},
}
"""The second of pp4's stages holds the dense layer alone: it has no router, but takes part in what is collective."""
REPLAY: dict[str, dict[str, Any]] = {
    **{mode: {"train__replay": mode} for mode in ("r3", "r2", "none")},
    "r3 without weak experts": {"train__replay": "r3", "train__replay_min_score": 0.9},
}


@pytest.fixture(scope="module")
def taken(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Taken]]:
    """By layout ("single" is one rank) and replay mode."""
    # A process for each layout: groups that are left behind keep their gloo threads.
    jobs = [
        Job(name, 4 if name == "pp4" else 2, "train_jobs:steps", {"world": world, "variants": variants})
        for name, layout in LAYOUTS.items()
        for variants in [{mode: {**layout, **settings} for mode, settings in REPLAY.items()}]
    ]
    ended = run_jobs(jobs, tmp_path_factory.mktemp("layouts"))
    alone = steps(world, REPLAY)
    return {"single": alone, **{name: ended[name].checked() for name in LAYOUTS}}


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
    weak = taken[layout]["r3 without weak experts"]
    assert "router/replaced_fraction" not in taken[layout]["r3"].updates[0]
    first = weak.updates[0]["router/replaced_fraction"]
    assert first == pytest.approx(taken["single"]["r3 without weak experts"].updates[0]["router/replaced_fraction"])
    assert 0 < first < 0.2


ROW_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"parallel__ep": 2}),
    "cp2": (2, {"parallel__cp": 2}),
}
FEW_ROW_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {"parallel__pp": 2}),
    "tp2": (2, {"parallel__tp": 2}),
    "cp2 ep2": (4, {"parallel__cp": 2, "parallel__ep": 2}),
}
REPLAYED = {**ROWS["kl_grpo current"], "train__replay_reference": True}
EVERY_ROW = {**ROWS, "kl_grpo replayed": REPLAYED}
BEFOREHAND = ("kl_grpo", "kl_grpo replayed", "minirl k3", "adaptive theta/mu", "m2po")
"""Rows that need the reference, or log-probabilities of the whole mini-batch, before the update."""


@pytest.fixture(scope="module")
def rows_taken(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[Taken]]]:
    """A step of every row on one rank and on several, two of those that look at the old weights beforehand.

    No objective keeps anything from one step to the next but the weights: a row's second mini-batch reads moved ones.
    """

    def job(name: str, ranks: int, names: Iterable[str], layout: dict[str, Any]) -> Job:
        variants = {n: EVERY_ROW[n] | layout for n in names}
        return Job(name, ranks, "train_jobs:rows", {"world": world, "variants": variants, "twice": BEFOREHAND})

    jobs = [job(name, ranks, EVERY_ROW, layout) for name, (ranks, layout) in ROW_LAYOUTS.items()]
    jobs += [job(name, ranks, BEFOREHAND, layout) for name, (ranks, layout) in FEW_ROW_LAYOUTS.items()]
    ended = run_jobs(jobs, tmp_path_factory.mktemp("rows"))
    return {"single": rows(world, EVERY_ROW, BEFOREHAND), **{job.name: ended[job.name].checked() for job in jobs}}


@pytest.mark.slow(minutes=3)
@pytest.mark.multirank
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, layout) for layout in ROW_LAYOUTS for name in EVERY_ROW),
        *((name, layout) for layout in FEW_ROW_LAYOUTS for name in BEFOREHAND),
    ],
)
def test_acceptance_every_row_has_the_coefficients_of_one_process_on_several_ranks(
    rows_taken: dict[str, dict[str, list[Taken]]], name: str, layout: str
) -> None:
    _same_steps(rows_taken["single"][name], rows_taken[layout][name], 1 + (name in BEFOREHAND))


def _same_steps(alone: list[Taken], found: list[Taken], steps: int) -> None:
    assert len(alone) == len(found) == steps
    for index, (one, two) in enumerate(zip(alone, found, strict=True)):
        assert set(two.step) == set(one.step)
        for number, (a, b) in enumerate(zip(one.updates, two.updates, strict=True)):
            assert set(b) == set(a)
            assert a["grad_norm"] > 0
            # What float noise does to the first updates, Adam carries on.
            first = index == number == 0
            rel, tiny = (1e-4, 1e-6) if first else (5e-3, 1e-4)
            for key in ("loss", "grad_norm", "entropy", "loss_tokens", "kl/penalty", "tis/power", "tis/weight/mean"):
                if key in a:
                    assert b[key] == pytest.approx(a[key], rel=rel, abs=tiny), (index, number, key)
            _same_coefficients(one.coefficients[number], two.coefficients[number], first)


def _same_coefficients(alone: dict[int, np.ndarray], found: dict[int, np.ndarray], first: bool) -> None:
    """The coefficients of every token; a later mini-batch's read weights that Adam has moved by float noise."""
    assert found.keys() == alone.keys()
    assert len(alone) == NUM_SEQUENCES // 2
    one = np.concatenate([alone[sequence] for sequence in sorted(alone)])
    two = np.concatenate([found[sequence] for sequence in sorted(alone)])
    rel = 2e-5 if first else 5e-3
    np.testing.assert_allclose(two, one, rtol=rel, atol=rel * float(np.abs(one).max()))


@pytest.mark.multirank
def test_wrong_routes_of_one_rank_end_the_step_on_all_of_them(
    world: World, tmp_path_factory: pytest.TempPathFactory
) -> None:
    job = Job("misrouted", 2, "train_jobs:misrouted", {"world": world, "dp_rank": 1})
    first, second = run_jobs([job], tmp_path_factory.mktemp("misrouted"))["misrouted"].checked()
    for told in (first, second):
        assert told.startswith("RolloutError: the self-test of the engines has failed")
    assert "native flip" in second


PLAIN: dict[str, Any] = {
    "train__replay": "r3",
    "optim__lr": 0.01,
    "optim__adam_eps": 1e-4,  # the default of 1e-8 makes a step of the rounding in gradients that are almost zero
    "megatron__bucket_size": 2000,
}
OVERLAP: dict[str, Any] = {"megatron__overlap_grad_reduce": True, "megatron__overlap_param_gather": True}
RECOMPUTED = {"recompute__granularity": "full", "recompute__method": "uniform", "recompute__num_layers": 1}
OVERLAPPED: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "ep2 recomputed": (2, {"parallel__ep": 2, **RECOMPUTED}),
    "dp2 vpp": (4, {"parallel__pp": 2, "parallel__vpp": 2}),
    "dp2 tp2": (4, {"parallel__tp": 2}),
}


@pytest.mark.multirank
@pytest.mark.parametrize("name", OVERLAPPED)
def test_overlap_changes_no_number(world: World, tmp_path: Path, name: str) -> None:
    """Two steps of old-log-prob pass and two updates, the gradient norms of single samples between them."""
    ranks, layout = OVERLAPPED[name]
    variants = {"plain": {**PLAIN, **layout}, "overlap": {**PLAIN, **layout, **OVERLAP}}
    found = run_jobs([Job(name, ranks, "train_jobs:overlapped", {"world": world, "variants": variants})], tmp_path)
    plain, overlap = (found[name].checked()[key] for key in ("plain", "overlap"))
    assert not plain["overlaps"]
    assert overlap["overlaps"]
    for one, two in zip(plain["steps"], overlap["steps"], strict=True):
        for before, after in zip(one.updates, two.updates, strict=True):
            assert after == pytest.approx(before, rel=2e-4, abs=1e-6)  # the norm adds up other shares
    np.testing.assert_allclose(overlap["norms"], plain["norms"], rtol=1e-4)
    for number, (one, two) in enumerate(zip(plain["weights"], overlap["weights"], strict=True)):
        assert one.keys() == two.keys()
        for weight in one:
            np.testing.assert_allclose(two[weight], one[weight], rtol=1e-3, atol=2e-5, err_msg=f"{number} {weight}")
    moved = [np.abs(plain["weights"][1][weight] - plain["weights"][0][weight]).max() for weight in plain["weights"][0]]
    assert min(moved) > 1e-3


@pytest.mark.multirank
def test_a_rank_receives_routes_of_its_own_tokens(world: World, tmp_path: Path) -> None:
    """A step of 32 responses on one model copy of two ranks."""
    layouts = {"tp2": {"train__replay": "r3", "train__mini_batches": 1, "parallel__tp": 2}}
    job = Job("one", 2, "train_jobs:transferred", {"world": world, "layouts": layouts})
    found = run_jobs([job], tmp_path)["one"].checked()["tp2"]
    for rank in range(2):
        # It gets the routes of its half of the tokens that the other rank has drawn, one byte per expert.
        assert 0 < found["routes"][rank] < found["tokens"][rank] / 2 * NUM_MOE_LAYERS * TOP_K


def test_gradient_memory_is_given_back_and_training_goes_on_as_if_it_had_not_been(world: World) -> None:
    found = []
    for rests in (False, True):
        with training(world.settings()) as step:
            take_step(step, world.rollouts())
            if rests:
                buffers = [b.grad_data for c in step.policy.chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
                held = sum(buffer.untyped_storage().nbytes() for buffer in buffers)
                parameters = sum(p.numel() * 4 for c in step.policy.chunks for p in c.parameters())
                assert held >= parameters
                step.policy.offload()
                assert all(buffer.untyped_storage().nbytes() == 0 for buffer in buffers)
                before = weights_of(step.policy)  # what the engine would be sent meanwhile
                step.policy.reload()
                assert all(torch.equal(weight, before[name]) for name, weight in weights_of(step.policy).items())
                assert sum(buffer.untyped_storage().nbytes() for buffer in buffers) == held
                assert not any(buffer.any() for buffer in buffers)
            take_step(step, world.rollouts())
            found.append(weights_of(step.policy))
    for name, weight in found[0].items():
        assert torch.equal(weight, found[1][name]), name


def test_only_servers_beside_the_trainer_can_hand_memory_over(world: World) -> None:
    with pytest.raises(ConfigError, match=r"sglang.release_memory: found true, expected servers that share"):
        world.settings(sglang__release_memory=True)
