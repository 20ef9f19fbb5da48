"""From packed columns to what a Megatron model is fed, and back.

Here, and only here, columns that are aligned with tokens meet a model whose output at position ``t`` is about token
``t + 1``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.core.packing import partition, select
from megarl.core.routing import RoutingTrace, shared_experts
from megarl.core.types import Rollout, TrainBatch
from megarl.errors import ConfigError, TraceError
from megarl.megatron.attention import PackedSequences
from megarl.megatron.distributed import largest
from megarl.megatron.model import ModelShape
from megarl.megatron.replay import MicroRoutes


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass of one rank: whole sequences back to back, then alignment padding up to S slots."""

    batch: TrainBatch
    """The sequences, T tokens, without padding."""
    input_ids: torch.Tensor
    """int64 [1, S]."""
    labels: torch.Tensor
    """int64 [S], the token that follows each position; 0 where none does."""
    padding_mask: torch.Tensor | None
    """bool [1, S], True on padding, for the routers' statistics; None without padding."""
    packing: PackedSequences
    sequences: tuple[int, ...] = ()
    """Which sequences of the mini-batch these are, in order."""

    @property
    def num_slots(self) -> int:
        return self.input_ids.size(1)


def split_micro_batches(
    batch: TrainBatch, max_tokens: int, padded_to_max: bool = False, multiple_of: int = 1
) -> list[MicroBatch]:
    """Cut this rank's share of a mini-batch into micro-batches of at most ``max_tokens`` tokens; a collective call.

    All data-parallel ranks get the same number of micro-batches, because expert parallelism lets them meet in every
    layer. Slots are a multiple of the tensor-parallel size. With pipeline parallelism, or an all-gather dispatcher
    (``padded_to_max``), every micro-batch has as many slots as the longest one, because shapes are then exchanged in
    advance. ``multiple_of``: the interleaved schedule wants a multiple of the pipeline size.
    """
    lengths = (batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).tolist()
    group = parallel_state.get_data_parallel_group()
    try:
        bins = partition(lengths, max_tokens)
    except ValueError as error:
        raise ConfigError(f"train.micro_batch_tokens: {error}") from error
    wanted = -(-largest(len(bins), group) // multiple_of) * multiple_of
    if wanted > len(lengths):
        raise ConfigError(
            f"a mini-batch gives this rank {len(lengths)} sequences, but the schedule needs {wanted} micro-batches "
            "of at least one; lower train.mini_batches or raise rollout.prompts_per_step"
        )
    bins = partition(lengths, max_tokens, min_bins=wanted)
    parts = [select(batch, sequences) for sequences in bins]
    align = parallel_state.get_tensor_model_parallel_world_size()
    slots = [-(-part.num_tokens // align) * align for part in parts]
    if padded_to_max:
        slots = [largest(max(slots), group)] * len(slots)
    elif parallel_state.get_pipeline_model_parallel_world_size() > 1:
        slots = [max(slots)] * len(slots)
    return [
        replace(micro_batch(part, size), sequences=tuple(sequences))
        for part, size, sequences in zip(parts, slots, bins, strict=True)
    ]


def micro_batch(batch: TrainBatch, num_slots: int) -> MicroBatch:
    """Pad packed sequences to ``num_slots`` slots; the padding is a sequence of its own, which nobody attends to."""
    padding = num_slots - batch.num_tokens
    device = torch.cuda.current_device()
    input_ids = torch.nn.functional.pad(batch.tokens, (0, padding)).to(device)
    labels = torch.nn.functional.pad(batch.tokens[1:], (0, padding + 1)).to(device)
    cu_seqlens = batch.cu_seqlens.to(device)
    padding_mask = None
    if padding:
        cu_seqlens = torch.cat([cu_seqlens, cu_seqlens.new_tensor([num_slots])])
        padding_mask = (torch.arange(num_slots, device=device) >= batch.num_tokens)[None]
    return MicroBatch(batch, input_ids[None], labels, padding_mask, PackedSequences.of(cu_seqlens))


def to_tokens(output: torch.Tensor, batch: TrainBatch, fill: float = 0.0) -> torch.Tensor:
    """Align a model output with tokens: [S] about the next token -> [T] about the token itself.

    The first token of a sequence was predicted by nothing and gets ``fill``. Keeps gradients.
    """
    shifted = torch.cat([output.new_full((1,), fill), output[: batch.num_tokens - 1]])
    first = torch.zeros(batch.num_tokens, dtype=torch.bool, device=output.device)
    first[batch.cu_seqlens[:-1].to(output.device)] = True
    return torch.where(first, fill, shifted)


def local_routes(micro: MicroBatch, layers: Sequence[int], shape: ModelShape) -> MicroRoutes:
    """The rows of a micro-batch's ``routed_experts`` column that the routers of this rank use.

    ``layers`` are the 0-based global layers of the rank (``RoutingReplay.layers``). Missing rows and padding are marked
    absent, so that they route natively. Sequence parallelism leaves each tensor-parallel rank a contiguous share of the
    slots.
    """
    batch = micro.batch
    if batch.routed_experts is None or batch.routed_mask is None:
        raise TraceError("the batch has no routed_experts column, but replay needs one: sample with routes, or use r2")
    columns = [shape.moe_layers.index(layer) for layer in layers]
    padding = micro.num_slots - batch.num_tokens
    experts = torch.nn.functional.pad(batch.routed_experts[:, columns], (0, 0, 0, 0, 0, padding))
    present = torch.nn.functional.pad(batch.routed_mask, (0, padding))
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    share = micro.num_slots // ranks
    own = slice(share * parallel_state.get_tensor_model_parallel_rank(), None)
    experts, present = experts[own][:share], present[own][:share]
    return MicroRoutes(experts.contiguous(), None if bool(present.all()) else present.contiguous())


def check_routes(rollouts: Sequence[Rollout], shape: ModelShape) -> None:
    """TraceError naming the first rollout whose routes cannot be of this model: before a step, not in it."""
    expected = (len(shape.moe_layers), shape.topk)
    for rollout in rollouts:
        label = f"group {rollout.group} sample {rollout.sample}"
        if rollout.routed_experts is None:
            raise TraceError(f"{label}: no routed experts, but replay needs them: was the engine asked for routes?")
        trace = RoutingTrace(rollout.routed_experts, shape.num_experts, rollout.routed_mask, label)
        if trace.experts.shape[1:] != expected:
            raise TraceError(
                f"{label}: routes of {trace.experts.shape[1]} layers and top-{trace.experts.shape[2]}, but the model "
                f"has {expected[0]} MoE layers and top-{expected[1]}: engine and trainer run different models"
            )


def shared_with_rollout(
    recorded: Sequence[MicroRoutes], micro_batches: Sequence[MicroBatch], layers: Sequence[int], shape: ModelShape
) -> list[np.ndarray]:
    """How many experts training and rollout share: per micro-batch int64 [T', L], for the T' tokens with a rollout row.

    A collective call: tensor-parallel ranks put their tokens together, pipeline stages their layers.
    """
    columns = [shape.moe_layers.index(layer) for layer in layers]
    found = []
    for routes, micro in zip(recorded, micro_batches, strict=True):
        used = _whole_sequence(routes.experts)[: micro.batch.num_tokens]
        assert micro.batch.routed_experts is not None
        assert micro.batch.routed_mask is not None
        present = micro.batch.routed_mask
        rollout = micro.batch.routed_experts[present][:, columns]
        found.append(shared_experts(used.cpu()[present].numpy(), rollout.numpy()))
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return found
    stages: list[tuple[Sequence[int], list[np.ndarray]]] = [([], [])] * group.size()
    dist.all_gather_object(stages, (layers, found), group=group)
    order = np.argsort([layer for of_stage, _ in stages for layer in of_stage])
    return [np.concatenate(parts, 1)[:, order] for parts in zip(*(counts for _, counts in stages), strict=True)]


def _whole_sequence(share: torch.Tensor) -> torch.Tensor:
    """The rows of all tensor-parallel ranks, which sequence parallelism has dealt out in contiguous shares."""
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return share
    parts = [torch.empty_like(share) for _ in range(group.size())]
    dist.all_gather(parts, share.contiguous(), group=group)
    return torch.cat(parts)
