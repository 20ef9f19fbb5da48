"""Replay is proven at the token dispatcher: every token goes to the experts of its rollout, in every pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases_replay
import pytest
from ranks import Case, case

DISPATCHED = "cases_replay:dispatched"
RECORDED = "cases_replay:recorded"
MOE_LAYERS = {0, 2, 3}

LAYOUTS_OF_2 = ["ep2", "tp2 ep2 etp1", "pp2 vpp2"]
RECOMPUTES = ["none", "uniform", "block", "moe"]
CASES = [
    *(case(2, DISPATCHED, layout, recompute=kind) for layout in LAYOUTS_OF_2 for kind in RECOMPUTES),
    case(2, DISPATCHED, "tp2", recompute="none"),
    case(2, DISPATCHED, "tp2", recompute="uniform"),
    case(2, DISPATCHED, "pp2", recompute="block"),
    case(2, DISPATCHED, "pp2", recompute="moe"),
    case(2, DISPATCHED, "ep2", recompute="uniform", dispatcher="allgather"),
    case(2, DISPATCHED, "tp2 ep2 etp1", recompute="moe", dispatcher="allgather"),
    case(4, DISPATCHED, "tp2 ep2 etp1 pp2", recompute="uniform"),
    case(2, DISPATCHED, "cp2", recompute="none"),
    case(4, DISPATCHED, "cp2 tp2 ep2 etp1", recompute="uniform"),
    case(4, DISPATCHED, "cp2 ep2 pp2", recompute="moe", dispatcher="allgather"),
    case(4, DISPATCHED, "pp2 vpp2 ep2", recompute="uniform"),
    case(4, DISPATCHED, "pp2 vpp2 ep2", recompute="moe", dispatcher="allgather"),
]


def recomputed_layers(recompute: str, layout: dict[str, int]) -> set[int]:
    """MoE layers that activation checkpointing runs twice, from Megatron's documentation of the settings."""
    if recompute == "none":
        return set()
    if recompute != "block":
        return MOE_LAYERS
    stages = layout.get("pp", 1) * layout.get("vpp", 1)
    firsts = {stage * 4 // stages for stage in range(stages)}  # the first layer of each stage's four or fewer
    return firsts & MOE_LAYERS


def assert_dispatched(found: dict[str, Any], recompute: str, layout: dict[str, int]) -> None:
    assert found["violations"] == []
    assert found["native_violations"] > 0  # the same batch without replay goes elsewhere: the probe can see it
    assert found["gate_error"] < 1e-5
    seen: set[int] = set()
    for rank, calls in enumerate(found["calls"]):
        layers = {layer for layer, _, _ in calls["scoring"]}
        seen |= layers
        micros = range(found["num_micro_batches"][rank])
        assert len(micros) > 1
        forward = {(layer, micro, False): 1 for layer in layers for micro in micros}
        again = {(layer, micro, True): 1 for layer in layers & recomputed_layers(recompute, layout) for micro in micros}
        assert calls["scoring"] == forward
        assert calls["training"] == forward | again
    assert seen == MOE_LAYERS
    assert len(found["router_gradients"]) > 0
    assert min(found["router_gradients"].values()) > 0


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_are_sent_to_the_experts_of_their_rollout_in_every_pass(case: Case, outcome: dict[str, Any]) -> None:
    assert_dispatched(outcome, dict(case.arguments)["recompute"], dict(case.layout))


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_tokens_are_sent_to_the_experts_of_their_rollout_on_one_rank(
    recompute: str, in_model_folder: None, models: dict[str, Path]
) -> None:
    assert_dispatched(cases_replay.dispatched({}, recompute), recompute, {})


RECORDED_CASES = [
    case(2, RECORDED, "ep2", recompute="uniform"),
    case(2, RECORDED, "tp2 ep2 etp1", recompute="moe"),
    case(2, RECORDED, "pp2 vpp2", recompute="none"),
    case(2, RECORDED, "ep2", recompute="none", dispatcher="allgather"),
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
