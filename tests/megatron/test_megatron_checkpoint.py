"""Checkpoints: an interrupted run goes on as if nothing had happened."""

from __future__ import annotations

from typing import Any

import cases_checkpoint
import pytest
import torch
from ranks import Case, case

INTERRUPTED = "cases_checkpoint:interrupted"


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert sorted(found) == sorted(expected)
    return max(float((found[name].double() - expected[name].double()).abs().max()) for name in expected)


@pytest.mark.parametrize(
    "overrides",
    [{}, {"parallel__distributed_optimizer": False}, {"model__dtype": "bf16"}],
    ids=["distributed-optimizer", "plain-optimizer", "bf16"],
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    overrides: dict[str, Any], in_model_folder: None, tmp_path: Any
) -> None:
    found = cases_checkpoint.interrupted({}, name=f"{tmp_path}/run", **overrides)
    assert found["resumed"] == found["straight"][2:]
    assert largest_difference(found["resumed_weights"], found["straight_weights"]) == 0
    assert largest_difference(found["saved_weights"], found["straight_weights"]) > 0
    rates = [rate for _, _, rate in found["straight"]]
    assert len(set(rates[1:])) == 3  # the schedule moves, so continuing it is not trivial
    assert found["loop"]["position"] == 7
    assert found["loop"]["step"] == 2


@pytest.mark.multirank
@pytest.mark.parametrize(
    "case",
    [
        case(2, INTERRUPTED, "ep2"),
        case(2, INTERRUPTED, "tp2"),
        case(2, INTERRUPTED, "pp2 vpp2"),
        case(2, INTERRUPTED, "ep2", then="tp2 ep2 etp1"),
        case(4, INTERRUPTED, "ep2", then="pp2 ep2"),
    ],
    ids=str,
)
def test_a_run_resumes_in_its_own_and_in_other_layouts(case: Case, outcome: dict[str, Any]) -> None:
    assert largest_difference(outcome["loaded_weights"], outcome["saved_weights"]) == 0
    for resumed, straight in zip(outcome["resumed"], outcome["straight"][2:], strict=True):
        assert resumed == pytest.approx(straight, rel=1e-5)
    # a step moves a weight by about 1e-3
    assert largest_difference(outcome["resumed_weights"], outcome["straight_weights"]) <= 1e-6
    assert outcome["folder"] == ["step_0000002"]
