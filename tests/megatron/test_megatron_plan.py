"""`megarl plan` against what a real Policy allocates on a CPU: parameters, states, and an update of the engine.

Measured are the bytes of tensors, each storage once; neither the allocator's rounding nor what is there only inside of
an operation. What passes hold is measured on the null GPU (tests/null_gpu/test_plan.py).
"""

from __future__ import annotations

import cases_plan
import pytest
from ranks import Case, case
from tiny_families import FAMILIES

WITHIN = 0.10
LATE = 0.3
"""gloo lets go of the buffers of a call when its thread comes to it: some are there a moment longer, by chance."""
STATES, EXPORT = "cases_plan:states", "cases_plan:export_peak"


def assert_states(found: list[dict[str, tuple[int, int]]]) -> None:
    for rank, sizes in enumerate(found):
        measured, planned = sizes["parameters"]
        assert planned == measured, f"rank {rank}"
        for name, (measured, planned) in sizes.items():
            assert planned == pytest.approx(measured, rel=WITHIN), f"rank {rank}: {name}"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", FAMILIES)
def test_states_of_one_rank(model: str, dtype: str, one_rank: None) -> None:
    assert_states(cases_plan.states({}, model, dtype))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_states_without_the_distributed_optimizer(dtype: str, one_rank: None) -> None:
    assert_states(cases_plan.states({}, "qwen3_moe", dtype, sharded=False))


@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3", "mixtral", "qwen3"])
def test_weights_that_one_rank_holds_are_hardly_copied(model: str, one_rank: None) -> None:
    """Queries, keys and values are, whose rows Megatron mixes."""
    ((measured, planned),) = cases_plan.export_peak({}, model)
    assert measured < planned / 2


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize(
    "case",
    [
        *(case(2, EXPORT, layout, model="mixtral") for layout in ("tp2", "ep2", "pp2")),
        case(2, EXPORT, "tp2", model="qwen3"),
        case(4, EXPORT, "tp2 ep2 etp1 pp2", model="deepseek_v3"),
    ],
    ids=str,
)
def test_an_update_takes_no_more_on_any_rank(case: Case, outcome: list[tuple[int, int]]) -> None:
    for measured, planned in outcome:
        assert planned / 2 < measured < planned * (1 + LATE), outcome


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize(
    "case",
    [
        *(case(2, STATES, layout, model="qwen3_moe", dtype="bf16") for layout in ("tp2", "ep2", "pp2", "cp2")),
        case(2, STATES, "", model="qwen3_moe", dtype="fp32"),
        case(2, STATES, "", model="qwen3_moe", dtype="bf16", sharded=False),
        *(case(2, STATES, layout, model="deepseek_v3", dtype="bf16") for layout in ("tp2 ep2 etp1", "pp2")),
        case(2, STATES, "tp2 ep2 etp1", model="glm4_moe", dtype="fp32"),
        case(2, STATES, "pp2", model="qwen3", dtype="bf16"),
        case(2, STATES, "pp2 vpp2", model="qwen3_moe", dtype="bf16"),
        case(4, STATES, "tp2 ep2 etp1 pp2", model="deepseek_v3", dtype="bf16"),
    ],
    ids=str,
)
def test_states_of_every_rank(case: Case, outcome: list[dict[str, tuple[int, int]]]) -> None:
    assert_states(outcome)
