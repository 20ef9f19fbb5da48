"""Which tokens of a packed batch a rank holds: pure index arithmetic, nothing is communicated.

Context parallelism (CP) splits every sequence into 2 * cp equal chunks and gives rank r the chunks r and
2 * cp - 1 - r: under causal attention an early chunk is cheap and a late one dear, so all ranks get the same work
("zigzag", as Megatron-Core and Transformer Engine do). Sequence parallelism (SP) then splits a rank's tokens into tp
contiguous slices.
"""

import torch
from torch import Tensor

from megarl.core.ratios import check_cu_seqlens, segment_expand, segment_lengths


def pad_cu_seqlens(cu_seqlens: Tensor, multiple: int) -> Tensor:
    """Return int64 [N+1] after rounding the length of every sequence up to a multiple."""
    padded = (segment_lengths(cu_seqlens) + multiple - 1) // multiple * multiple
    return torch.cat([padded.new_zeros(1), padded.cumsum(0)])


def find_padded_positions(cu_seqlens: Tensor, padded: Tensor) -> Tensor:
    """Return int64 [T]: where each token goes when every sequence starts at its padded offset.

    ``out[find_padded_positions] = column`` pads a column, ``out[find_padded_positions]`` takes the padding away again.
    ValueError for bounds of other sequences.
    """
    if padded.shape != cu_seqlens.shape or bool((segment_lengths(padded) < segment_lengths(cu_seqlens)).any()):
        raise ValueError("padded must be cu_seqlens of the same sequences, each at least as long as before")
    tokens = torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
    return tokens + segment_expand(padded[:-1].long() - cu_seqlens[:-1].long(), cu_seqlens)


def zigzag_indices(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Return int64 [T / cp_size]: the packed tokens of a CP rank, in the order of the rank.

    cu_seqlens: int64 [N+1], every length a multiple of 2 * cp_size (ValueError otherwise, if cp_size > 1).
    """
    check_cu_seqlens(cu_seqlens, int(cu_seqlens[-1]))
    if cp_size == 1:
        return torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
    starts, lengths = cu_seqlens[:-1].long(), segment_lengths(cu_seqlens)
    if bool((lengths % (2 * cp_size)).any()):
        raise ValueError(f"lengths are {lengths.tolist()}, expected multiples of {2 * cp_size}: use pad_cu_seqlens")
    chunk = lengths // (2 * cp_size)
    # Two runs of tokens per sequence, interleaved: [early chunk of 0, late chunk of 0, early chunk of 1, ...].
    run_starts = torch.stack([starts + cp_rank * chunk, starts + (2 * cp_size - 1 - cp_rank) * chunk], dim=1).flatten()
    run_lengths = chunk.repeat_interleave(2)
    run_offsets = run_lengths.cumsum(0) - run_lengths
    local = torch.arange(int(run_lengths.sum()), device=cu_seqlens.device)
    return local + torch.repeat_interleave(run_starts - run_offsets, run_lengths)


def zigzag_inverse(cu_seqlens: Tensor, cp_size: int) -> Tensor:
    """Return int64 [T] with ``torch.cat(columns of rank 0, 1, ...)[inverse]`` in packed order again."""
    gathered = torch.cat([zigzag_indices(cu_seqlens, cp_size, rank) for rank in range(cp_size)])
    inverse = torch.empty_like(gathered)
    inverse[gathered] = torch.arange(gathered.numel(), device=gathered.device)
    return inverse


def sequence_parallel_slice(num_tokens: int, tp_size: int, tp_rank: int) -> slice:
    """Return the contiguous slice of num_tokens that a sequence-parallel rank holds; ValueError if it is uneven."""
    if num_tokens % tp_size:
        raise ValueError(f"{num_tokens} tokens do not split into tp_size = {tp_size} equal slices: pad them first")
    share = num_tokens // tp_size
    return slice(tp_rank * share, (tp_rank + 1) * share)


def held_tokens(cu_seqlens: Tensor, padded: Tensor, tp: tuple[int, int], cp: tuple[int, int]) -> Tensor:
    """Return int64 [T_local]: the packed token at each slot that a rank's routers see, -1 for padding.

    cu_seqlens, padded: int64 [N+1], without and with padding; ``padded`` may have one more sequence of padding alone.
    tp (1, 0 without sequence parallelism), cp: size and rank.
    """
    token_at = torch.full((int(padded[-1]),), -1)
    places = find_padded_positions(cu_seqlens, padded[: cu_seqlens.numel()])
    token_at[places] = torch.arange(places.numel())
    held = zigzag_indices(padded, *cp)
    return token_at[held[sequence_parallel_slice(held.numel(), *tp)]]
