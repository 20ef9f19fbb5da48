from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import reference

from megarl.core.parallel import (
    find_padded_positions,
    pad_cu_seqlens,
    sequence_parallel_slice,
    zigzag_indices,
    zigzag_inverse,
)

lengths_strategy = st.lists(st.integers(0, 9), max_size=5)


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


@settings(max_examples=60, deadline=None)
@given(lengths=lengths_strategy, cp_size=st.integers(1, 4), tp_size=st.integers(1, 3))
def test_ranks_partition_the_tokens_exactly(lengths, cp_size, tp_size):
    lengths = [length * 2 * cp_size * tp_size for length in lengths]
    cu_seqlens = offsets(lengths)
    column = torch.randn(sum(lengths))
    shards = []
    for cp_rank in range(cp_size):
        held = zigzag_indices(cu_seqlens, cp_size, cp_rank)
        whole = list(range(sum(lengths)))
        assert held.tolist() == (reference.zigzag(lengths, cp_size, cp_rank) if cp_size > 1 else whole)
        shards.append(column[held])
        slices = [sequence_parallel_slice(held.numel(), tp_size, tp_rank) for tp_rank in range(tp_size)]
        assert torch.equal(torch.cat([held[part] for part in slices]), held)
    assert torch.equal(torch.cat(shards)[zigzag_inverse(cu_seqlens, cp_size)], column)


@settings(max_examples=60, deadline=None)
@given(lengths=lengths_strategy, multiple=st.integers(1, 8))
def test_padding_and_taking_it_away(lengths, multiple):
    cu_seqlens = offsets(lengths)
    padded = pad_cu_seqlens(cu_seqlens, multiple)
    assert padded.diff().tolist() == [-(-length // multiple) * multiple for length in lengths]
    positions = find_padded_positions(cu_seqlens, padded)
    starts = padded.tolist()
    assert positions.tolist() == [starts[n] + i for n, length in enumerate(lengths) for i in range(length)]
    column = torch.arange(sum(lengths)) + 1
    wide = torch.zeros(starts[-1], dtype=torch.int64)
    wide[positions] = column
    assert torch.equal(wide[positions], column)
    assert wide.count_nonzero() == len(column)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zigzag_indices(torch.tensor([0, 4, 10]), 2, 0), r"\[4, 6\], expected multiples of 4"),
        (lambda: sequence_parallel_slice(7, 2, 0), "7 tokens do not split"),
        (lambda: find_padded_positions(torch.tensor([0, 4]), torch.tensor([0, 3])), "at least as long"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
