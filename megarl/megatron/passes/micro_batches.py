"""From packed columns to what a Megatron model is fed, and back.

Here, and only here, columns that are aligned with tokens meet a model whose output at position ``t`` is about token
``t + 1``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.core.packing import partition, select
from megarl.core.parallel import padded_cu_seqlens, padded_positions, sequence_parallel_slice, zigzag_indices
from megarl.core.ratios import segment_lengths
from megarl.core.routing import RoutingTrace
from megarl.core.types import Rollout, TrainBatch
from megarl.errors import ConfigError, TraceError
from megarl.megatron.attention import PackedSequences
from megarl.megatron.distributed import fail_together, largest
from megarl.megatron.replay import MicroRoutes
from megarl.models.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass of one model copy: whole sequences in S slots, of which a rank holds S / cp.

    A sequence starts at its own slot and is padded to a multiple of 2 cp; padding at the end is a sequence of its own.
    Without context parallelism, and with T a multiple of the tensor-parallel size, slots are simply the tokens.
    """

    batch: TrainBatch
    """The sequences, T tokens, without padding."""
    num_slots: int
    """S."""
    slots: torch.Tensor
    """int64 [T], the slot of each token."""
    held: torch.Tensor
    """int64 [S / cp], the slots that this context-parallel rank holds, in its order."""
    input_ids: torch.Tensor
    """int64 [1, S / cp]."""
    labels: torch.Tensor
    """int64 [S / cp], the token that follows each slot; 0 where none does."""
    padding_mask: torch.Tensor | None
    """bool [1, S / cp], True on padding, for the routers' statistics; None without padding on any rank."""
    packing: PackedSequences
    sequences: tuple[int, ...] = ()
    """Which sequences of the mini-batch these are, in order."""


def split_micro_batches(
    batch: TrainBatch, max_tokens: int, padded_to_max: bool = False, multiple_of: int = 1
) -> list[MicroBatch]:
    """Cut this rank's share of a mini-batch into micro-batches of at most ``max_tokens`` tokens; a collective call.

    All data-parallel ranks get the same number of micro-batches, because expert parallelism lets them meet in every
    layer. ``max_tokens`` are per rank, so a model copy takes cp times as many, padding included. With pipeline
    parallelism, or an all-gather dispatcher (``padded_to_max``), every micro-batch has as many slots as the longest
    one, because shapes are then exchanged in advance. ``multiple_of``: the interleaved schedule wants a multiple of the
    pipeline size.
    """
    cp = parallel_state.get_context_parallel_world_size()
    max_tokens *= cp
    lengths = segment_lengths(padded_cu_seqlens(batch.cu_seqlens, _sequence_multiple(cp))).tolist()
    group = parallel_state.get_data_parallel_group()
    bins, failure = [], None
    try:
        bins = partition(lengths, max_tokens)
    except ValueError as error:
        failure = ConfigError(f"train.micro_batch_tokens: {error}")
    fail_together(failure, "the cut into micro-batches")
    wanted = -(-largest(len(bins), group) // multiple_of) * multiple_of
    fewest = -largest(-len(lengths), group)
    if wanted > fewest:
        raise ConfigError(
            f"a mini-batch gives a rank {fewest} sequences, but the schedule needs {wanted} micro-batches "
            "of at least one; lower train.mini_batches or raise rollout.prompts_per_step"
        )
    bins = partition(lengths, max_tokens, min_bins=wanted)
    parts = [select(batch, sequences) for sequences in bins]
    slots = [_slots_for(sum(lengths[i] for i in sequences)) for sequences in bins]
    if padded_to_max:
        slots = [largest(max(slots), group)] * len(slots)
    elif parallel_state.get_pipeline_model_parallel_world_size() > 1:
        slots = [max(slots)] * len(slots)
    return [
        replace(micro_batch(part, size), sequences=tuple(sequences))
        for part, size, sequences in zip(parts, slots, bins, strict=True)
    ]


def split_by_sequence(batch: TrainBatch, padded_to_max: bool = False) -> list[MicroBatch]:
    """A micro-batch for each sequence of this rank, for passes of their own; a collective call.

    Their slots are as few as the layout allows; with ``padded_to_max`` as many as the longest of any rank needs.
    """
    lengths = segment_lengths(
        padded_cu_seqlens(batch.cu_seqlens, _sequence_multiple(parallel_state.get_context_parallel_world_size()))
    )
    slots = [_slots_for(length) for length in lengths.tolist()]
    if padded_to_max:
        slots = [largest(max(slots), parallel_state.get_data_parallel_group())] * len(slots)
    return [replace(micro_batch(select(batch, [index]), size), sequences=(index,)) for index, size in enumerate(slots)]


def _sequence_multiple(cp: int) -> int:
    """Two equal chunks per context-parallel rank."""
    return 2 * cp if cp > 1 else 1


def _slots_for(num_tokens: int) -> int:
    """The next number of slots that context- and sequence-parallel ranks can share equally."""
    cp, tp = parallel_state.get_context_parallel_world_size(), parallel_state.get_tensor_model_parallel_world_size()
    align = math.lcm(_sequence_multiple(cp), cp * tp)
    return -(-num_tokens // align) * align


def micro_batch(batch: TrainBatch, num_slots: int) -> MicroBatch:
    """Lay packed sequences out in ``num_slots`` slots and take this context-parallel rank's share of them."""
    cp, cp_rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    padded = padded_cu_seqlens(batch.cu_seqlens, _sequence_multiple(cp))
    slots = padded_positions(batch.cu_seqlens, padded)
    if num_slots > int(padded[-1]):
        padded = torch.cat([padded, padded.new_tensor([num_slots])])
    held = zigzag_indices(padded, cp, cp_rank)
    input_ids, labels = batch.tokens.new_zeros(num_slots), batch.tokens.new_zeros(num_slots)
    input_ids[slots] = batch.tokens
    labels[slots[:-1]] = batch.tokens[1:]
    is_padding = torch.ones(num_slots, dtype=torch.bool)
    is_padding[slots] = False
    device = torch.cuda.current_device()
    return MicroBatch(
        batch=batch,
        num_slots=num_slots,
        slots=slots,
        held=held,
        input_ids=input_ids[held][None].to(device),
        labels=labels[held].to(device),
        padding_mask=is_padding[held][None].to(device) if bool(is_padding.any()) else None,
        packing=PackedSequences.of(padded.to(device), cp),
    )


def to_tokens(output: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """Align a model output with tokens: [S / cp] about the next token -> [T] about the token itself, on every rank.

    The first token of a sequence was predicted by nothing and gets 0. A collective call among context-parallel ranks.
    """
    whole = _over_context_ranks(output, micro)
    predicted_at = (micro.slots - 1).clamp(min=0).to(output.device)
    return torch.where(_first_tokens(micro).to(output.device), 0.0, whole[predicted_at])


def to_slots(column: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """The other way: [T] about tokens -> [S / cp], each at the held slot that predicts it; 0 elsewhere."""
    whole = column.new_zeros(micro.num_slots)
    predicted = ~_first_tokens(micro)
    whole[micro.slots[predicted].to(column.device) - 1] = column[predicted.to(column.device)]
    return whole[micro.held.to(column.device)]


def _first_tokens(micro: MicroBatch) -> torch.Tensor:
    first = torch.zeros(micro.batch.num_tokens, dtype=torch.bool)
    first[micro.batch.cu_seqlens[:-1]] = True
    return first


def _over_context_ranks(share: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """Rows of the held slots [S / cp, ...] of all context-parallel ranks -> [S, ...] in slot order."""
    if micro.packing.from_ranks is None:
        return share
    return _all_gather(share, parallel_state.get_context_parallel_group())[micro.packing.from_ranks]


def _all_gather(share: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The shares of a group's ranks one after the other, without gradient."""
    if group.size() == 1:
        return share
    parts = [torch.empty_like(share) for _ in range(group.size())]
    dist.all_gather(parts, share.contiguous(), group=group)
    return torch.cat(parts)


def router_tokens(cu_seqlens: torch.Tensor, num_slots: int, tp: tuple[int, int], cp: tuple[int, int]) -> torch.Tensor:
    """int64 [T_local]: the packed token at each place that the routers of a rank see, -1 for padding.

    ``cu_seqlens`` [N+1] of the micro-batch without padding; ``tp`` and ``cp`` are (size, rank). Context parallelism
    leaves a rank two chunks of every sequence, and sequence parallelism a contiguous share of those.
    """
    padded = padded_cu_seqlens(cu_seqlens, _sequence_multiple(cp[0]))
    token_at = torch.full((num_slots,), -1)
    token_at[padded_positions(cu_seqlens, padded)] = torch.arange(int(cu_seqlens[-1]))
    if num_slots > int(padded[-1]):
        padded = torch.cat([padded, padded.new_tensor([num_slots])])
    held = zigzag_indices(padded, *cp)
    return token_at[held[sequence_parallel_slice(held.numel(), *tp)]]


def local_routes(micro: MicroBatch, layers: Sequence[int], shape: ModelShape) -> MicroRoutes:
    """The rows of a micro-batch's ``routed_experts`` column that the routers of this rank use.

    ``layers`` are the 0-based global layers of the rank (``RoutingReplay.layers``). Missing rows and padding are marked
    absent, so that they route natively. For batches that a rank has whole; ``replay.exchange`` serves those whose
    routes lie where they were sampled.
    """
    batch = micro.batch
    if batch.routed_experts is None or batch.routed_mask is None:
        raise TraceError("the batch has no routed_experts column, but replay needs one: sample with routes, or use r2")
    columns = [shape.moe_layers.index(layer) for layer in layers]
    tp = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    cp = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    token = router_tokens(batch.cu_seqlens, micro.num_slots, tp, cp)
    return routes_at(token, batch.routed_experts[token.clamp(min=0)][:, columns], batch)


def routes_at(token: torch.Tensor, experts: torch.Tensor, batch: TrainBatch) -> MicroRoutes:
    """The experts [T_local, L_local, K] of the tokens of ``router_tokens``; missing rows and padding as absent."""
    assert batch.routed_mask is not None
    place = token.clamp(min=0)
    present = (token >= 0) & batch.routed_mask[place]
    return MicroRoutes(experts, None if bool(present.all()) else present, batch.tokens[place])


def check_routes(rollouts: Sequence[Rollout], shape: ModelShape) -> None:
    """TraceError naming the first rollout whose routes cannot be of this model: before a step, not in it.

    A rollout with a ``routed_mask`` alone has its routes on another rank, which checks them.
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


def shared_with_rollout(
    shared: Sequence[torch.Tensor], micro_batches: Sequence[MicroBatch], layers: Sequence[int]
) -> list[np.ndarray]:
    """How many experts training and rollout share: per micro-batch int64 [T', L], for the T' tokens with a rollout row.

    ``shared`` uint8 [T_local, L_local] is of this rank's tokens and ``layers`` (``Recording.shared``). A collective
    call: tensor- and context-parallel ranks put the counts of their tokens together, pipeline stages those of their
    layers; a stage without MoE layers brings tensors without columns.
    """
    found = []
    for share, micro in zip(shared, micro_batches, strict=True):
        of_context_rank = _all_gather(share, parallel_state.get_tensor_model_parallel_group())
        by_token = _over_context_ranks(of_context_rank, micro)[micro.slots.to(share.device)].cpu()
        assert micro.batch.routed_mask is not None
        found.append(by_token[micro.batch.routed_mask].numpy().astype(np.int64))
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return found
    stages: list[tuple[Sequence[int], list[np.ndarray]]] = [([], [])] * group.size()
    dist.all_gather_object(stages, (layers, found), group=group)
    order = np.argsort([layer for of_stage, _ in stages for layer in of_stage])
    return [np.concatenate(parts, 1)[:, order] for parts in zip(*(counts for _, counts in stages), strict=True)]
