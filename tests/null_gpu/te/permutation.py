"""What TE's Triton kernels for MoE permutation compute, without asking the device for a size.

``row_id_map`` int32 [T, 2 E + 1] has TE's shape, and here in its first E columns the row of each (token, expert) among
the permuted ones, or -1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """Permuted rows are in the order of experts, then tokens."""
    routed = routing_map.bool().t().reshape(-1)
    row = torch.where(routed, routed.int().cumsum(0) - 1, -1).view(num_experts, num_tokens).t()
    return torch.cat([row, row.new_zeros(num_tokens, num_experts + 1)], 1).int()


def permute_with_mask_map(
    x: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    scale: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    scale_hidden_dim: int | None,
) -> tuple[Tensor, None, Tensor | None]:
    """(rows [num_out_tokens, hidden], None, probabilities [num_out_tokens] or None); rows of probability 0 are 0."""
    del scale_hidden_dim
    if scale is not None:
        raise NotImplementedError("permutation of FP8 blocks has no reference")
    rows = _rows(row_id_map, num_experts, num_out_tokens)
    spread = x[:, None].expand(num_tokens, num_experts, hidden_size)
    permuted = None
    if probs is not None:
        spread = torch.where(probs[..., None] == 0, 0, spread)
        permuted = probs.new_zeros(num_out_tokens + 1).index_put((rows,), probs)[:-1]
    return x.new_zeros(num_out_tokens + 1, hidden_size).index_put((rows,), spread)[:-1], None, permuted


def unpermute_with_mask_map(
    x: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None,
    permuted_probs: Tensor | None,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor | None]:
    """(sum over experts, fp32, of a token's rows, times ``merging_probs`` [T, E] if given; probabilities [T, E])."""
    del num_tokens, hidden_size
    rows = _rows(row_id_map, num_experts, len(x))
    terms = torch.cat([x, x.new_zeros(1, x.size(1))])[rows].float()
    if merging_probs is not None:
        terms = terms * merging_probs[..., None].float()
    probs = None
    if permuted_probs is not None:
        probs = torch.cat([permuted_probs, permuted_probs.new_zeros(1)])[rows]
    return terms.sum(1).to(x.dtype), probs


def _rows(row_id_map: Tensor, num_experts: int, none: int) -> Tensor:
    rows = row_id_map[:, :num_experts].long()
    return torch.where(rows < 0, none, rows)


def make_chunk_sort_map(split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int, num_splits: int) -> Tensor:
    """int32 [T]: the new row of each row, if chunk ``sorted_indices[i]`` becomes the i-th."""
    del num_splits
    ends, order = split_sizes.long().cumsum(0), sorted_indices.long()
    sizes = split_sizes.long()[order]
    first = torch.empty_like(ends).index_put((order,), sizes.cumsum(0) - sizes)
    row = torch.arange(num_tokens, device=ends.device)
    chunk = torch.searchsorted(ends, row, right=True)
    return (first[chunk] + row - (ends - split_sizes)[chunk]).int()


def sort_chunks_by_map(
    x: Tensor, row_id_map: Tensor, probs: Tensor | None, num_tokens: int, hidden_size: int, is_forward: bool
) -> tuple[Tensor, Tensor | None]:
    """Rows, and one probability each, moved to the places of ``row_id_map``, or back from there."""
    del num_tokens, hidden_size
    rows = row_id_map.long()

    def move(column: Tensor) -> Tensor:
        return torch.empty_like(column).index_put((rows,), column) if is_forward else column[rows]

    return move(x), None if probs is None else move(probs)


REFERENCES = {
    function.__name__: function
    for function in (
        make_row_id_map,
        permute_with_mask_map,
        unpermute_with_mask_map,
        make_chunk_sort_map,
        sort_chunks_by_map,
    )
}
