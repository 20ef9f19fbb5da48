"""The old-log-prob pass: which mini-batches do without it and still train the same, and steps without any."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from forks import Job, run_jobs
from tampered_engine import glue, shift_routes
from train_jobs import both_ways
from train_world import (
    NUM_SEQUENCES,
    ROWS,
    Going,
    Taken,
    World,
    counted_passes,
    old_logprobs,
    step_on,
    take_step,
    training,
    weights_of,
)

from megarl.core.types import Rollout
from megarl.errors import RolloutError

NARROW: dict[str, Any] = {"train__max_k3": 0.05, "train__max_native_flip": 0.3}
FULL = {"recompute__granularity": "full", "recompute__method": "uniform", "recompute__num_layers": 1}
BALANCED = {"megatron__moe_router_load_balancing_type": "aux_loss", "megatron__moe_aux_loss_coeff": 0.1}
VARIANTS: dict[str, dict[str, Any]] = {
    **{replay: {"train__replay": replay} for replay in ("none", "r2", "r3")},
    "four": {"train__mini_batches": 4},
    "gspo": ROWS["gspo"],
    "adaptive_power": ROWS["adaptive_power"],
    "minirl k3": ROWS["minirl k3"],
    "r2 recomputed": {"train__replay": "r2", **FULL},
    "r3 balanced": {"train__replay": "r3", **BALANCED},
}
"""Settings under which the first mini-batch does without the pass."""
FEW = ("none", "r2", "r3", "r2 recomputed")


def with_wrong(world: World) -> list[Rollout]:
    """The fixed batch with a wrong response in either of two mini-batches."""
    rollouts = world.rollouts()
    wrong = {3: glue(rollouts[3], rollouts[8]), 17: shift_routes(rollouts[17])}
    return [wrong.get(index, rollout) for index, rollout in enumerate(rollouts)]


def same_to_the_bit(found: list[Any]) -> None:
    (forced, weights), (skipped, others) = found
    assert all(np.array_equal(weights[name], others[name]) for name in weights)
    if forced is None:
        return
    assert isinstance(skipped, Taken)
    assert skipped == forced  # all metrics, of updates and step
    for one, two in zip(forced.coefficients, skipped.coefficients, strict=True):
        assert one.keys() == two.keys()
        assert all(np.array_equal(one[sequence], two[sequence]) for sequence in one)
    assert skipped.updates[0]["ratio/min"] == skipped.updates[0]["ratio/max"] == 1.0
    assert skipped.updates[1]["ratio/max"] > 1.001


@pytest.mark.parametrize("name", VARIANTS)
def test_acceptance_a_step_is_the_same_to_the_bit_where_the_pass_leaves_out_the_first_mini_batch(
    world: World, name: str
) -> None:
    settings = world.settings(**VARIANTS[name])
    assert settings.old_passes == settings.train.mini_batches - 1
    same_to_the_bit(both_ways(world, world.rollouts(), {name: VARIANTS[name]})[name])


@pytest.mark.parametrize("replay", ["none", "r2", "r3"])
def test_tripwires_judge_the_whole_step_before_the_first_update_either_way(world: World, replay: str) -> None:
    variant: dict[str, Any] = {"train__replay": replay, **NARROW}
    (found,) = both_ways(world, with_wrong(world), {replay: variant}).values()
    same_to_the_bit(found)
    assert found[1][0].step["tripwires/dropped"] == 2
    for taken, _ in found:  # one of each mini-batch
        assert not np.any(taken.coefficients[0][3])
        assert not np.any(taken.coefficients[1][17])


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"parallel__ep": 2}),
    "pp2": (2, {"parallel__pp": 2}),
    "cp2 tp2": (4, {"parallel__cp": 2, "parallel__tp": 2}),
}


@pytest.mark.multirank
def test_acceptance_it_is_the_same_step_on_several_ranks(
    world: World, tmp_path_factory: pytest.TempPathFactory
) -> None:
    wrong = with_wrong(world)
    jobs = [
        Job(
            name,
            ranks,
            "train_jobs:both_ways",
            {"world": world, "rollouts": wrong, "variants": {key: VARIANTS[key] | layout | NARROW for key in FEW}},
        )
        for name, (ranks, layout) in LAYOUTS.items()
    ]
    ended = run_jobs(jobs, tmp_path_factory.mktemp("both"))
    for name in LAYOUTS:
        for found in ended[name].checked().values():
            same_to_the_bit(found)
            assert found[1][0].step["tripwires/dropped"] == 2


def test_the_pass_runs_over_all_mini_batches_but_the_first_unless_something_needs_it_before(world: World) -> None:
    replayed = {**ROWS["minirl k3"], "train__replay": "r2", "train__replay_reference": True}
    for settings, mini_batches, expected in (
        (ROWS["minirl"], 1, 0),
        (ROWS["minirl"], 4, 3),
        (ROWS["minirl k3"], 1, 0),
        (ROWS["kl_grpo"], 1, 1),
        (ROWS["kl_grpo current"], 2, 2),
        (ROWS["adaptive_power"], 2, 1),
        (ROWS["adaptive theta/mu"], 1, 1),
        (ROWS["adaptive old/mu"], 2, 2),
        (replayed, 1, 1),
        ({**replayed, "train__replay": "r3"}, 2, 1),
        ({"train__replay": "r2"}, 2, 1),
        ({"train__replay": "r2", **BALANCED}, 2, 2),
        ({"train__replay": "r3", **BALANCED}, 2, 1),
        ({"train__old_logprobs": "rollout"}, 4, 0),
    ):
        found = world.settings(train__mini_batches=mini_batches, **settings)
        assert found.old_passes == expected, settings


def test_a_step_takes_as_many_passes_as_the_configuration_says(world: World) -> None:
    def passes(settings: dict[str, Any]) -> int:
        with training(world.settings(**settings)) as step, counted_passes() as counts:
            take_step(step, world.rollouts())
        return len(counts)

    assert passes({}) == 1 + 2
    assert passes({"train__mini_batches": 4}) == 3 + 4
    assert passes({"train__mini_batches": 4, "train__old_logprobs": "rollout"}) == 4
    assert passes(ROWS["kl_grpo"]) == 2 + 2 + 2  # the reference too


ROLLOUT: dict[str, Any] = {"train__old_logprobs": "rollout"}


@pytest.mark.parametrize("row", ["minirl", "grpo", "gspo", "ctpo", "minirl k3", "adaptive theta/mu"])
def test_acceptance_if_the_engine_gave_pi_old_both_ways_train_the_same(world: World, row: str) -> None:
    """Then mu is old, whoever computes it, also after the weights have moved."""
    with training(world.settings(**ROWS[row])) as step:
        going = Going(step, world.rollouts(), old_pass=True).look()
        exact = list(world.rollouts())
        for mini, part in zip(going.minis, going.owned, strict=True):
            for micro, old in zip(mini.micro_batches, old_logprobs(mini), strict=True):
                columns = np.split(old.numpy(), micro.batch.cu_seqlens[1:-1].tolist())
                for sequence, column in zip(micro.sequences, columns, strict=True):
                    index = part[sequence]
                    exact[index] = replace(exact[index], rollout_logprobs=column.astype(np.float32))
    found = []
    for settings in ({}, ROLLOUT):
        with training(world.settings(optim__lr=0.01, **ROWS[row], **settings)) as step:
            taken = take_step(step, exact)
            assert taken is not None
            found.append((taken, weights_of(step.policy)))
    (recomputed, weights), (rollout, others) = found
    for one, two in zip(recomputed.coefficients, rollout.coefficients, strict=True):
        assert all(np.array_equal(one[sequence], two[sequence]) for sequence in one)
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert recomputed.updates[1]["ratio/max"] > 1.001


def test_only_the_first_mini_batch_is_compared_with_the_engine(world: World) -> None:
    """Its weights have not moved; what later ones find is the gap and staleness together, in their ``ratio``."""
    with training(world.settings()) as step:
        (mini, _) = Going(step, world.rollouts(), old_pass=True).look().minis
        expected = {name: stat for name, stat in mini.statistics.items() if not name.startswith("tripwires/")}
    with training(world.settings(**ROLLOUT, optim__lr=0.01)) as step:
        going = Going(step, world.rollouts()).look()
        going.update(0)
        going.update(1)
        assert step.tripwires.verdict is not None
        judged = step.tripwires.verdict.judged
    first, second = going.minis
    found = {name: stat for name, stat in first.statistics.items() if not name.startswith("tripwires/")}
    assert found.keys() == expected.keys()
    assert {"rollout/k3", "router/native/flip", "rollout/entropy"} <= found.keys()
    for name, stat in found.items():
        assert torch.equal(stat.sums, expected[name].sums), name
    assert second.statistics == {}
    assert len(judged) == NUM_SEQUENCES // 2


def test_without_the_pass_tripwires_drop_in_the_first_mini_batch_and_stop_before_a_weight_moves(world: World) -> None:
    found = step_on(world.settings(**ROLLOUT, **NARROW), with_wrong(world))
    assert found.step["tripwires/dropped"] == 1
    assert not np.any(found.coefficients[0][3])
    assert np.any(found.coefficients[1][17])  # unseen, as the run's warning says
    shifted = [shift_routes(rollout) for rollout in world.rollouts()]
    with training(world.settings(**ROLLOUT)) as step:
        before = weights_of(step.policy)
        with pytest.raises(RolloutError, match=r"self-test.*no weight has changed"):
            take_step(step, shifted)
        assert all(torch.equal(value, before[name]) for name, value in weights_of(step.policy).items())
