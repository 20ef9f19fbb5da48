"""Replay is proven at the token dispatcher: every token goes to the experts of its rollout, in every pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases_replay
import pytest
from cases_replay import World
from dispatch_probe import DispatchProbe
from ranks import Case, case
from tiny_world import batch_of, rollouts

RECORDED = "cases_replay:recorded"
MOE_LAYERS = {0, 2, 3}

AGAIN: dict[str, set[int]] = {"none": set(), "uniform": MOE_LAYERS, "block": {0}, "moe": MOE_LAYERS}
"""MoE layers that activation checkpointing runs twice, from Megatron's documentation of the settings."""


@pytest.mark.parametrize(
    ("model", "recompute"), [*(("base", recompute) for recompute in AGAIN), ("qwen3_next", "uniform")]
)
def test_tokens_are_sent_to_the_experts_of_their_rollout_in_every_pass(
    model: str, recompute: str, models: dict[str, Path], one_rank: None
) -> None:
    """On one rank, scoring too; ``test_megatron_matrix`` has the layouts."""
    world = World(models[model], recompute)
    chunks, micros = world.policy.chunks, range(len(world.micros))
    assert len(micros) > 1
    native = DispatchProbe(chunks, world.micros)
    world.run()
    native.remove()
    assert native.violations(rollouts(), (0, 2, 3))  # without replay tokens go elsewhere: the probe can see it
    once = {(layer, micro, False): 1 for layer in MOE_LAYERS for micro in micros}
    again = {(layer, micro, True): 1 for layer in AGAIN[recompute] for micro in micros}
    for training in (False, True):
        world.policy.zero_grad()
        probe = DispatchProbe(chunks, world.micros)
        with world.replay.replay(world.routes):
            world.run(backward=training)
        probe.remove()
        assert probe.violations(rollouts(), (0, 2, 3)) == []
        assert probe.largest_gate_error() < 1e-5
        assert probe.counts() == (once | again if training else once)
    routers = [p for chunk in chunks for name, p in chunk.named_parameters() if name.endswith("router.weight")]
    assert len(routers) == len(MOE_LAYERS)
    assert all(float(p.main_grad.abs().max()) > 0 for p in routers)


def test_a_router_with_a_bias_replays(models: dict[str, Path], one_rank: None) -> None:
    """gpt-oss: the gates are of the replayed experts' logits, bias included, and the bias is trained."""
    made = rollouts(num_layers=4)
    world = World(models["gpt_oss"], batch=batch_of(made))
    probe = DispatchProbe(world.policy.chunks, world.micros)
    with world.replay.replay(world.routes):
        world.run(backward=True)
    probe.remove()
    assert probe.violations(made, (0, 1, 2, 3)) == []
    assert probe.largest_gate_error() < 1e-5
    (chunk,) = world.policy.chunks
    biases = [p for name, p in chunk.named_parameters() if name.endswith("router.bias")]
    assert len(biases) == 4
    assert all(float(bias.main_grad.abs().max()) > 0 for bias in biases)


RECORDED_CASES = [
    case(2, RECORDED, "ep2", recompute="uniform"),
    case(2, RECORDED, "tp2 ep2 etp1", recompute="moe"),
    case(2, RECORDED, "pp2 vpp2", recompute="none"),
    case(2, RECORDED, "ep2", recompute="none", dispatcher="allgather"),
    case(2, RECORDED, "tp2 ep2 etp1", recompute="uniform", model="qwen3_next"),
    case(2, RECORDED, "tp2 ep2 etp1", recompute="uniform", model="glm_moe_dsa"),
    case(4, RECORDED, "tp2 ep2 etp1 pp2", recompute="block"),
    case(4, RECORDED, "cp2 tp2 ep2 etp1", recompute="uniform"),
]


def assert_no_op(found: dict[str, Any]) -> None:
    assert found["wrong"] == []
    assert found["same"]
    assert all(found["same"])
    assert all(found["shared_as_counted"])
    shared = {count for of_micro in found["counted"] for row in of_micro for count in row}
    assert shared == {0, 1, 2}  # random routes: the comparison is not trivial


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("case", RECORDED_CASES, ids=str)
def test_replay_of_a_recording_changes_no_bit_while_the_weights_do_not_change(
    case: Case, outcome: dict[str, Any]
) -> None:
    assert_no_op(outcome)


def test_replay_of_a_recording_changes_no_bit_on_one_rank(in_model_folder: None) -> None:
    assert_no_op(cases_replay.recorded({}, "uniform"))
