"""Every rank gets the rows of its tokens and layers, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases_exchange import placement_of_one
from matrix_world import LAYOUTS
from ranks import Case
from tiny_world import config, join

from megarl.errors import TraceError
from megarl.megatron.rollout_routes import Placement, exchange

DELIVERED = [
    "dp2", "cp2", "pp2", "tp2", "pp2 vpp2", "ep2", "cp4", "pp4", "tp4", "dp4",
    "cp2 tp2 ep2 etp1", "cp2 pp2 vpp2", "tp2 pp2 ep2 etp1", "cp2 ep2",
]  # fmt: skip
DELIVERED_CASES = {name: Case(LAYOUTS[name][0], "cases_exchange:delivered", LAYOUTS[name][1]) for name in DELIVERED}
MANY_EXPERTS = (("router", "softmax"), ("num_experts", 384))
WIDE_CASES = {
    name: Case(LAYOUTS[name][0], "cases_exchange:delivered", LAYOUTS[name][1], MANY_EXPERTS) for name in ("pp2", "cp2")
}


def _ids(cases: dict[str, Case]) -> list[str]:
    return [name.replace(" ", "-") for name in cases]


@pytest.mark.multirank
@pytest.mark.parametrize(("name", "case"), DELIVERED_CASES.items(), ids=_ids(DELIVERED_CASES))
def test_routes_reach_the_routers_that_need_them(name: str, case: Case, outcome: dict[str, Any]) -> None:
    sizes = dict(case.layout)
    assert all(outcome["same"])
    assert all(
        "no rank has its route" in message for message, n in zip(outcome["lost"], outcome["layers"], strict=True) if n
    )
    per_copy = [outcome["slots"][rank] for rank in range(case.world_size)]
    for rank in range(case.world_size):
        tokens = per_copy[rank] // (sizes.get("tp", 1) * sizes.get("cp", 1))
        assert outcome["bytes"][rank] == tokens * outcome["layers"][rank] * 2, (name, rank)


@pytest.mark.multirank
@pytest.mark.parametrize("case", WIDE_CASES.values(), ids=_ids(WIDE_CASES))
def test_more_than_256_experts_travel_as_two_bytes(case: Case, outcome: dict[str, Any]) -> None:
    assert all(outcome["same"])
    sizes = dict(case.layout)
    for slots, layers, found in zip(outcome["slots"], outcome["layers"], outcome["bytes"], strict=True):
        assert found == slots // sizes.get("cp", 1) * layers * 2 * 2


@pytest.mark.multirank
@pytest.mark.parametrize("case", [Case(4, "cases_exchange:padding_masks", (("pp", 2), ("tp", 2)))], ids=["tp2-pp2"])
def test_later_stages_are_told_of_the_padding_in_their_slice(case: Case, outcome: dict[str, Any]) -> None:
    assert all(outcome["same"])
    first, later = (
        [n for n, f in zip(outcome["padding"], outcome["first"], strict=True) if f == flag] for flag in (1, 0)
    )
    assert first[0] == sum(later) > 0
    assert later[0] != later[1]


@pytest.fixture
def alone(one_rank: None, tmp_path: Any) -> dist.ProcessGroup:
    join(config(tmp_path))
    group = dist.group.WORLD
    assert group is not None
    return group


def test_rows_are_found_by_sequence_position_and_layer(alone: dist.ProcessGroup) -> None:
    have, rows = placement_of_one([3, 2], (1, 2, 5))
    want = Placement.of_sequences([1, 0], [2, 3], (5, 1))
    found = exchange(have, rows, want, alone)
    assert torch.equal(found, rows[[3, 4, 0, 1, 2]][:, [2, 0]])


def test_rows_that_nobody_has_are_named(alone: dist.ProcessGroup) -> None:
    have, rows = placement_of_one([3, 2], (1,))
    with pytest.raises(TraceError, match="sequence 1, token 2: no rank has its route in layer 1"):
        exchange(have, rows, Placement.of_sequences([1], [4], (1,)), alone)
    with pytest.raises(TraceError, match=r"sequence 0, token 0: no rank has its route in layer 7 \(3 such rows\)"):
        exchange(have, rows, Placement.of_sequences([0], [3], (7,)), alone)


def test_rows_that_do_not_fit_their_placement_are_refused(alone: dist.ProcessGroup) -> None:
    have, rows = placement_of_one([3, 2], (1,))
    with pytest.raises(TraceError, match="expected 5 rows of 1 layers"):
        exchange(have, rows[:4], have, alone)
