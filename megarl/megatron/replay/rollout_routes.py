"""Routes between the trainer's rollouts and its micro-batches: check, deliver to routers, compare afterwards.

``exchange`` moves the rows. A loop that builds ``MicroRoutes`` itself needs nothing of this.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.core.routing import RoutingTrace
from megarl.core.routing.trace import narrow_dtype
from megarl.core.types import Rollout, TrainBatch
from megarl.errors import TraceError
from megarl.megatron.distributed import all_gather, model_group
from megarl.megatron.passes.micro_batches import MicroBatch, gather_slots, router_tokens
from megarl.megatron.replay.exchange import Placement, exchange
from megarl.megatron.replay.records import MicroRoutes
from megarl.models.shapes import ModelShape


def check_rollouts(rollouts: Sequence[Rollout], shape: ModelShape) -> None:
    """TraceError naming the first rollout whose routes cannot be of this model. Called before a step.

    A rollout that has only a ``routed_mask`` has its routes on another rank, which checks them.
    """
    expected = (len(shape.moe_layers), shape.topk)
    for rollout in rollouts:
        label = f"group {rollout.group} sample {rollout.sample}"
        if rollout.routed_experts is None and rollout.routed_mask is not None:
            continue
        if rollout.routed_experts is None:
            raise TraceError(f"{label}: no routed experts, but replay needs them: was the engine asked for routes?")
        trace = RoutingTrace(rollout.routed_experts, shape.num_experts, rollout.routed_mask, label)
        if trace.experts.shape[1:] != expected:
            raise TraceError(
                f"{label}: routes of {trace.experts.shape[1]} layers and top-{trace.experts.shape[2]}, but the model "
                f"has {expected[0]} MoE layers and top-{expected[1]}: engine and trainer run different models"
            )


def deliver_routes(
    rollouts: Sequence[Rollout], micro_batches: Sequence[MicroBatch], layers: Sequence[int], shape: ModelShape
) -> list[MicroRoutes]:
    """R3: bring routes from the ranks that sampled to the ranks that replay; a collective call of a model copy.

    ``rollouts`` are the mini-batch that ``micro_batches`` split. Each has its ``routed_experts`` on at least one of the
    ranks. Padding, and rows that ``routed_mask`` excludes, are not present in the result.
    """
    here = {index: r.routed_experts for index, r in enumerate(rollouts) if r.routed_experts is not None}
    dtype = narrow_dtype(shape.num_experts, signed=True)
    empty = np.empty((0, len(shape.moe_layers), shape.topk), dtype)
    held = np.concatenate([empty, *(trace.astype(dtype, copy=False) for trace in here.values())])
    have = Placement.of_sequences(list(here), [len(trace) for trace in here.values()], shape.moe_layers)
    want = Placement.of_micro_batches(micro_batches, layers)
    received = exchange(have, torch.from_numpy(held), want, model_group())
    found = []
    for micro, experts in zip(micro_batches, received.split(want.rows_by_piece()), strict=True):
        token = router_tokens(micro.batch.cu_seqlens, micro.num_slots, want.tp, want.cp)
        found.append(select_routes(token, experts, micro.batch))
    return found


def select_routes(token: torch.Tensor, experts: torch.Tensor, batch: TrainBatch) -> MicroRoutes:
    """Experts [T_local, L_local, K] of ``router_tokens`` as MicroRoutes; missing rows and padding are not present."""
    assert batch.routed_mask is not None
    place = token.clamp(min=0)
    present = (token >= 0) & batch.routed_mask[place]
    return MicroRoutes(experts, None if bool(present.all()) else present, batch.tokens[place])


def reshard(
    recorded: Sequence[MicroRoutes],
    recorded_in: Placement,
    wanted_in: Placement,
    group: dist.ProcessGroup,
) -> list[MicroRoutes]:
    """R2: rearrange recorded routes for other micro-batches of the same sequences; a collective call.

    Sequences may move to another micro-batch. With a ``group`` over model copies, and ids that these share, they may
    move to another data-parallel rank. Absent rows stay absent.
    """
    parts = [_with_presence(routes) for routes in recorded]
    rows = torch.cat(parts) if parts else torch.zeros(len(recorded_in.rows()), 0, 0, dtype=torch.uint8)
    sizes = wanted_in.rows_by_piece()
    found = exchange(recorded_in, rows, wanted_in, group).split(sizes)
    if not wanted_in.layers:
        return [MicroRoutes(part) for part in found]
    present = [part[:, 0, -1] > 0 for part in found]  # exchange leaves padding at 0
    return [
        MicroRoutes(part[:, :, :-1].contiguous(), None if bool(there.all()) else there)
        for part, there in zip(found, present, strict=True)
    ]


def _with_presence(routes: MicroRoutes) -> torch.Tensor:
    """[T, L, K + 1]: the experts, and 1 where the row is there."""
    experts = routes.experts.cpu()
    present = torch.ones(len(experts), dtype=torch.bool) if routes.present is None else routes.present.cpu()
    return torch.cat([experts, present[:, None, None].expand(-1, experts.size(1), 1).to(experts.dtype)], 2)


def gather_shared(
    shared: Sequence[torch.Tensor], micro_batches: Sequence[MicroBatch], layers: Sequence[int]
) -> list[np.ndarray]:
    """How many experts training and rollout share: per micro-batch int64 [T', L], for the T' tokens with a rollout row.

    ``shared`` uint8 [T_local, L_local] has this rank's tokens and ``layers`` (``Recording.shared``). A collective call:
    tensor- and context-parallel ranks contribute their tokens, pipeline stages their layers. A stage without MoE layers
    passes tensors without columns.
    """
    found = []
    for share, micro in zip(shared, micro_batches, strict=True):
        of_context_rank = all_gather(share, parallel_state.get_tensor_model_parallel_group()).flatten(0, 1)
        by_token = gather_slots(of_context_rank, micro)[micro.slots.to(share.device)].cpu()
        assert micro.batch.routed_mask is not None
        found.append(by_token[micro.batch.routed_mask].numpy().astype(np.int64))
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return found
    stages: list[tuple[Sequence[int], list[np.ndarray]]] = [([], [])] * group.size()
    dist.all_gather_object(stages, (layers, found), group=group)
    order = np.argsort([layer for of_stage, _ in stages for layer in of_stage])
    return [np.concatenate(parts, 1)[:, order] for parts in zip(*(counts for _, counts in stages), strict=True)]
