"""From packed columns to what a Megatron model is fed, and back.

Here, and only here, columns that are aligned with tokens meet a model whose output at position ``t`` is about token
``t + 1``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from megatron.core import parallel_state

from megarl.core.packing import partition, select
from megarl.core.parallel import padded_cu_seqlens, padded_positions, sequence_parallel_slice, zigzag_indices
from megarl.core.ratios import segment_lengths
from megarl.core.types import TrainBatch
from megarl.errors import ConfigError
from megarl.megatron.attention import PackedSequences
from megarl.megatron.distributed import all_gather, cp_position, fail_together, largest


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
    cp, cp_rank = cp_position()
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
    whole = gather_slots(output, micro)
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


def gather_slots(share: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """Rows of the held slots [S / cp, ...] of all context-parallel ranks -> [S, ...] in slot order."""
    if micro.packing.from_ranks is None:
        return share
    return all_gather(share, parallel_state.get_context_parallel_group()).flatten(0, 1)[micro.packing.from_ranks]


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
