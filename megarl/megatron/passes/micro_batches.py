"""Packed columns to the inputs of a Megatron model, and its outputs back to columns.

Columns are aligned with tokens: entry ``t`` is about token ``t``. A model's output at ``t`` is about token ``t + 1``.
Only this file converts between the two.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from megarl.core.devices import to_device
from megarl.core.packing import partition, select, spread, take_segments
from megarl.core.parallel import find_padded_positions, held_tokens, pad_cu_seqlens, zigzag_indices
from megarl.core.types import TrainBatch
from megarl.errors import ConfigError, refuse_if
from megarl.megatron.distributed import all_gather, fail_together, largest
from megarl.replay.megatron_state import cp_position
from megarl.stand_ins.attention import PackedSequences


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A forward pass of a model copy: whole sequences in S slots, of which a rank holds S / cp.

    ``batch`` and the offsets of ``kept`` are on the host, all other tensors are on the device of the model. Sequences
    are padded to a multiple of 2 cp. Padding at the end is one more sequence. Without context parallelism, and with T a
    multiple of the tensor-parallel size, slots equal tokens.
    """

    batch: TrainBatch
    """The sequences, T tokens, without padding."""
    num_slots: int
    """S."""
    slots: Tensor
    """int64 [T], the slot of each token."""
    is_first: Tensor
    """bool [T], whether the token is the first of its sequence."""
    held: Tensor
    """int64 [S / cp], the slots of the context-parallel rank, in order."""
    input_ids: Tensor
    """int64 [1, S / cp]."""
    labels: Tensor
    """int64 [S / cp], the next token of each slot; 0 where none does."""
    padding_mask: Tensor | None
    """bool [1, S / cp], True on padding, for the routers' statistics; None if no rank has padding."""
    packing: PackedSequences
    kept: tuple[Tensor, Tensor] | None = None
    """(ids int32 [M], offsets int64 [S / cp + 1]): the sampler's set for the label of each held slot; empty for the
    whole vocabulary. None if the batch has no sets.
    """
    sequences: tuple[int, ...] = ()
    """Indices of these sequences in the mini-batch."""


def split_micro_batches(
    batch: TrainBatch, max_tokens: int, padded_to_max: bool = False, multiple_of: int = 1
) -> list[MicroBatch]:
    """Split this rank's share of a mini-batch into micro-batches of at most ``max_tokens`` tokens; a collective call.

    All data-parallel ranks get the same number, because expert parallelism is collective in every layer. ``max_tokens``
    is per rank and includes padding: a model copy takes cp times as many. ``padded_to_max``: every micro-batch gets as
    many slots as the longest one, because pipelines and all-gather dispatchers exchange no shapes. ``multiple_of``: the
    interleaved schedule needs a multiple of the pipeline size. ConfigError, on all ranks, if a sequence is longer than
    ``max_tokens``, or if there are fewer sequences than micro-batches.
    """
    max_tokens *= (cp := parallel_state.get_context_parallel_world_size())
    lengths = np.diff(pad_cu_seqlens(batch.cu_seqlens, _sequence_multiple(cp)).numpy()).tolist()
    group = parallel_state.get_data_parallel_group()
    bins, failure = [], None
    try:
        bins = partition(lengths, max_tokens)
    except ValueError as error:
        failure = ConfigError(f"train.micro_batch_tokens: {error}")
    fail_together(failure, "the split into micro-batches")
    num_bins = -(-largest(len(bins), group) // multiple_of) * multiple_of
    fewest = -largest(-len(lengths), group)
    refuse_if(num_bins > fewest, ConfigError, "sequences_of_schedule", fewest=fewest, num_bins=num_bins)
    bins = spread(bins, lengths, max_tokens, num_bins)
    slots = [_slots_for(sum(lengths[i] for i in sequences)) for sequences in bins]
    if padded_to_max:
        slots = [largest(max(slots), group)] * len(slots)
    elif parallel_state.get_pipeline_model_parallel_world_size() > 1:
        slots = [max(slots)] * len(slots)
    batches = [batch] if len(bins) == 1 else [select(batch, indices) for indices in bins]
    return [micro_batch(*entry) for entry in zip(batches, slots, bins, strict=True)]


def _sequence_multiple(cp: int) -> int:
    """Padded lengths are multiples of it: two equal chunks per context-parallel rank."""
    return 2 * cp if cp > 1 else 1


def _slots_for(num_tokens: int) -> int:
    """The next number of slots that context- and sequence-parallel ranks can share equally."""
    cp, tp = parallel_state.get_context_parallel_world_size(), parallel_state.get_tensor_model_parallel_world_size()
    align = math.lcm(_sequence_multiple(cp), cp * tp)
    return -(-num_tokens // align) * align


def _lay_out(cu_seqlens: Tensor, num_slots: int, cp: int) -> tuple[Tensor, Tensor]:
    """(cu_seqlens of the padded sequences, padding at the end being one more; slot of each token int64 [T])."""
    padded, slots = cu_seqlens, torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
    if cp > 1:
        padded = pad_cu_seqlens(cu_seqlens, _sequence_multiple(cp))
        slots = find_padded_positions(cu_seqlens, padded)
    if num_slots > int(padded[-1]):
        padded = torch.cat([padded, padded.new_tensor([num_slots])])
    return padded, slots


def micro_batch(batch: TrainBatch, num_slots: int, sequences: Sequence[int] = ()) -> MicroBatch:
    """Place packed sequences in ``num_slots`` slots and take the context-parallel rank's share."""
    cp, cp_rank = cp_position()
    padded, slots = _lay_out(batch.cu_seqlens, num_slots, cp)
    held = zigzag_indices(padded, cp, cp_rank)
    # Short columns: a call of torch takes several times as long as one of numpy.
    place, tokens, local = slots.numpy(), batch.tokens.numpy(), held.numpy()
    input_ids, labels = np.zeros((2, num_slots), np.int64)
    input_ids[place], labels[place[:-1]] = tokens, tokens[1:]
    is_padding, is_first = np.ones(num_slots, bool), np.zeros(len(tokens), bool)
    is_padding[place], is_first[batch.cu_seqlens[:-1].numpy()] = False, True
    device = torch.cuda.current_device()
    kept = _kept_sets(batch, slots, torch.from_numpy(is_first), num_slots, held)
    return MicroBatch(
        batch=batch,
        num_slots=num_slots,
        slots=to_device(slots, device),
        is_first=to_device(torch.from_numpy(is_first), device),
        held=to_device(held, device),
        input_ids=to_device(torch.from_numpy(input_ids[local][None]), device),
        labels=to_device(torch.from_numpy(labels[local]), device),
        padding_mask=to_device(torch.from_numpy(is_padding[local][None]), device) if num_slots > len(tokens) else None,
        packing=PackedSequences.of(padded, cp, device),
        kept=None if kept is None else (to_device(kept[0], device), kept[1]),
        sequences=tuple(sequences),
    )


def _kept_sets(
    batch: TrainBatch, slots: Tensor, is_first: Tensor, num_slots: int, held: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Return the batch's sets by held slot, at the slot that predicts the sampled token; empty elsewhere."""
    if batch.kept_ids is None or batch.kept_offsets is None:
        return None
    predicted = torch.full((num_slots,), batch.num_tokens)  # with an empty set at the end
    predicted[slots - 1] = torch.arange(batch.num_tokens).masked_fill(is_first, batch.num_tokens)
    offsets = torch.cat([batch.kept_offsets, batch.kept_offsets[-1:]])
    set_offsets, index = take_segments(offsets, predicted[held])
    return batch.kept_ids[index], set_offsets


def router_tokens(cu_seqlens: Tensor, num_slots: int, tp: tuple[int, int], cp: tuple[int, int]) -> Tensor:
    """int64 [T_local]: the packed token at each place of a rank's routers, -1 for padding.

    ``cu_seqlens`` [N+1] of the micro-batch without padding; ``tp`` and ``cp`` are (size, rank).
    """
    return held_tokens(cu_seqlens, _lay_out(cu_seqlens, num_slots, cp[0])[0], tp, cp)


def to_tokens(output: Tensor, micro: MicroBatch) -> Tensor:
    """A collective call: [S / cp] about the next token -> [T] about the token itself, 0 for the first of a sequence."""
    return gather_slots(output, micro)[micro.slots - 1].masked_fill(micro.is_first, 0.0)


def to_slots(column: Tensor, micro: MicroBatch) -> Tensor:
    """Inverse of ``to_tokens``: [T] about tokens -> [S / cp] at the held slots that predict the tokens; 0 elsewhere."""
    whole = column.new_zeros(micro.num_slots)
    # No slot predicts the first token of a sequence: the one before, or the last of all, ends a sequence and gets 0.
    whole[micro.slots - 1] = column.masked_fill(micro.is_first, 0.0)
    return whole[micro.held]


def gather_slots(share: Tensor, micro: MicroBatch) -> Tensor:
    """Rows of the held slots [S / cp, ...], or of a sequence-parallel share of these, -> [S, ...] in slot order."""
    if len(share) < micro.held.numel():
        share = all_gather(share, parallel_state.get_tensor_model_parallel_group()).flatten(0, 1)
    if micro.packing.from_ranks is None:
        return share
    return all_gather(share, parallel_state.get_context_parallel_group()).flatten(0, 1)[micro.packing.from_ranks]
