"""Every rank gets the rows of its tokens and layers, and no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from matrix_world import LAYOUTS, NUM_EXPERTS, Variant, build, settings_of
from megatron.core import parallel_state
from ranks import Case
from tiny_world import batch_of, config, join, local_routes, micro_batches, own_share, rollouts

from megarl.errors import TraceError
from megarl.megatron import distributed
from megarl.megatron.passes.forward import _padding_mask
from megarl.megatron.passes.micro_batches import micro_batch, router_tokens
from megarl.megatron.rollout_routes import Placement, deliver_routes, exchange
from megarl.replay import MicroRoutes, RoutingReplay
from megarl.replay.megatron_state import unwrap

DELIVERED = [
    "dp2", "cp2", "pp2", "tp2", "pp2 vpp2", "ep2", "cp4", "pp4", "tp4", "dp4",
    "cp2 tp2 ep2 etp1", "cp2 pp2 vpp2", "tp2 pp2 ep2 etp1", "cp2 ep2",
]  # fmt: skip
WIDE = (("router", "softmax"), ("num_experts", 384))
"""Their numbers travel as two bytes."""
DELIVERED_CASES = [
    Case(LAYOUTS[name][0], "test_megatron_route_exchange:delivered", LAYOUTS[name][1], arguments)
    for name, arguments in [*((name, ()) for name in DELIVERED), ("pp2", WIDE), ("cp2", WIDE)]
]


@pytest.mark.multirank
@pytest.mark.parametrize("case", DELIVERED_CASES, ids=str)
def test_routes_reach_the_routers_that_need_them(case: Case, outcome: dict[str, Any]) -> None:
    sizes = dict(case.layout)
    assert all(outcome["same"])
    for lost, layers, slots, found in zip(*(outcome[n] for n in ("lost", "layers", "slots", "bytes")), strict=True):
        assert "no rank has its route" in lost or not layers
        tokens = slots // (sizes.get("tp", 1) * sizes.get("cp", 1))
        assert found == tokens * layers * 2 * (2 if case.arguments else 1)


@pytest.mark.multirank
@pytest.mark.parametrize(
    "case", [Case(4, "test_megatron_route_exchange:padding_masks", (("pp", 2), ("tp", 2)))], ids=["tp2-pp2"]
)
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


def test_rows_are_found_by_sequence_position_and_layer_or_named(alone: dist.ProcessGroup) -> None:
    rows = torch.arange(30, dtype=torch.uint8).view(5, 3, 2)
    have = Placement.of_sequences([0, 1], [3, 2], (1, 2, 5))
    found = exchange(have, rows, Placement.of_sequences([1, 0], [2, 3], (5, 1)), alone)
    assert torch.equal(found, rows[[3, 4, 0, 1, 2]][:, [2, 0]])
    with pytest.raises(TraceError, match="sequence 1, token 2: no rank has its route in layer 1"):
        exchange(have, rows, Placement.of_sequences([1], [4], (1,)), alone)
    with pytest.raises(TraceError, match=r"sequence 0, token 0: no rank has its route in layer 7 \(3 such rows\)"):
        exchange(have, rows, Placement.of_sequences([0], [3], (7,)), alone)
    with pytest.raises(TraceError, match="expected 5 rows of 3 layers"):
        exchange(have, rows[:4], have, alone)


def delivered(layout: dict[str, Any], router: str = "dense_first", num_experts: int = NUM_EXPERTS) -> dict[str, Any]:
    """Each sequence's routes lie on one rank of its model copy, in turn; every rank gets its own rows."""
    settings = settings_of(layout, Variant(router=router))
    join(settings)
    model = build(settings, Variant(router=router))
    layers = RoutingReplay(model.chunks).layers
    shape = replace(model.shape, fields={**model.shape.fields, "num_moe_experts": num_experts})
    everything = _with_gates(
        _typed(rollouts(30, len(shape.moe_layers), min(num_experts, 256), shape.topk), num_experts)
    )
    mine = everything[own_share(len(everything))]
    micros = micro_batches(settings, batch_of(mine))
    copy = distributed.model_group()
    scattered = [
        rollout if index % copy.size() == copy.rank() else replace(rollout, routed_experts=None)
        for index, rollout in enumerate(mine)
    ]
    found = deliver_routes(scattered, micros, layers, shape)
    expected = [local_routes(micro, layers, shape) for micro in micros]
    gated = deliver_routes(scattered, micros, layers, shape, gates=True)
    report = {
        "same": all(
            _same(a, c) and _same(b, c) and a.gates is None for a, b, c in zip(found, gated, expected, strict=True)
        )
        and all(torch.equal(micro.gates, _gates_of(micro.experts)) for micro in gated),
        "bytes": sum(routes.experts.untyped_storage().nbytes() for routes in found[:1]),
        "slots": sum(micro.num_slots for micro in micros),
        "layers": len(layers),
        "lost": _error(lambda: deliver_routes([replace(r, routed_experts=None) for r in mine], micros, layers, shape)),
    }
    return _by_rank(report)


def _typed(made: list[Any], num_experts: int) -> list[Any]:
    """With more than 256 experts, numbers of two bytes that need both."""
    if num_experts <= 256:
        return made
    return [replace(r, routed_experts=r.routed_experts.astype(np.uint16) + (num_experts - 256)) for r in made]


def _gates_of(experts: Any) -> Any:
    """Fractions that only float32 holds, so that gates tell whose they are; 0 as the expert of padding."""
    return experts / np.float32(3.0) if isinstance(experts, np.ndarray) else experts.float() / 3.0


def _with_gates(made: list[Any]) -> list[Any]:
    return [replace(rollout, gate_weights=_gates_of(rollout.routed_experts.astype(np.float32))) for rollout in made]


def _same(a: MicroRoutes, b: MicroRoutes) -> bool:
    present = torch.ones(len(a.experts), dtype=torch.bool) if b.present is None else b.present
    alike = (a.present is None) == (b.present is None) and (a.present is None or torch.equal(a.present, b.present))
    return alike and torch.equal(a.experts[present], b.experts[present])


def padding_masks(layout: dict[str, Any]) -> dict[str, Any]:
    """What each stage is told of padding, against the places without a token that its routers see."""
    settings = settings_of(layout, Variant())
    join(settings)
    gpt = unwrap(build(settings, Variant()).chunks[0])
    batch = batch_of(rollouts(30, 4, NUM_EXPERTS, 2))
    micro = micro_batch(batch, batch.num_tokens + 8 - batch.num_tokens % 4)
    tp = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    empty = router_tokens(batch.cu_seqlens, micro.num_slots, (1, 0) if gpt.pre_process else tp, (1, 0)) < 0
    mask = _padding_mask(gpt, micro)
    assert mask is not None
    return _by_rank({"same": torch.equal(mask[0], empty), "padding": int(mask.sum()), "first": gpt.pre_process})


def _by_rank(report: dict[str, Any]) -> dict[str, Any]:
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    return {key: [one[key] for one in reports] for key in report}


def _error(call: Any) -> str:
    try:
        call()
    except TraceError as error:
        return str(error)
    return ""
