"""Cases that run on several ranks: routes travel from where they were sampled to where they are replayed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from matrix_world import NUM_EXPERTS, Variant, build, settings_of
from megatron.core import parallel_state
from tiny_world import batch_of, join, local_routes, micro_batches, own_share, rollouts

from megarl.errors import TraceError
from megarl.megatron import distributed
from megarl.megatron.passes.forward import _padding_mask
from megarl.megatron.passes.micro_batches import micro_batch, router_tokens
from megarl.megatron.rollout_routes import Placement, deliver_routes
from megarl.replay import MicroRoutes, RoutingReplay
from megarl.replay.megatron_state import unwrap


def delivered(layout: dict[str, Any], router: str = "dense_first", num_experts: int = NUM_EXPERTS) -> dict[str, Any]:
    """Each sequence's routes lie on one rank of its model copy, in turn; every rank gets its own rows."""
    settings = settings_of(layout, Variant(router=router))
    join(settings)
    model = build(settings, Variant(router=router))
    layers = RoutingReplay(model.chunks).layers
    shape = replace(model.shape, fields={**model.shape.fields, "num_moe_experts": num_experts})
    everything = _typed(rollouts(30, len(shape.moe_layers), min(num_experts, 256), shape.topk), num_experts)
    mine = everything[own_share(len(everything))]
    micros = micro_batches(settings, batch_of(mine))
    copy = distributed.model_group()
    scattered = [
        rollout if index % copy.size() == copy.rank() else replace(rollout, routed_experts=None)
        for index, rollout in enumerate(mine)
    ]
    found = deliver_routes(scattered, micros, layers, shape)
    expected = [local_routes(micro, layers, shape) for micro in micros]
    report = {
        "same": all(_same(a, b) for a, b in zip(found, expected, strict=True)),
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


def placement_of_one(lengths: list[int], layers: tuple[int, ...]) -> tuple[Placement, torch.Tensor]:
    """Whole sequences with distinct rows, for tests without ranks."""
    rows = np.arange(sum(lengths) * len(layers) * 2, dtype=np.uint8).reshape(-1, len(layers), 2)
    return Placement.of_sequences(range(len(lengths)), lengths, layers), torch.from_numpy(rows)
