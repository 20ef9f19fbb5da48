"""Random packed batches for the tests of the core, in float64."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import torch
from hypothesis import strategies as st
from oracles import reference_objectives
from torch import Tensor

from megarl.core.objectives import Objective, TokenColumns


def random_columns(seed: int, lengths: list[int], masked: float = 0.3) -> TokenColumns:
    """Packed columns of sequences with the given lengths; about a share `masked` of the tokens has no loss."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    old = -3 * torch.rand(total, generator=generator, dtype=torch.float64) - 8.0  # far enough below 0 for any gap
    gap = torch.randn(2, total, generator=generator, dtype=torch.float64)
    per_sequence = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    return TokenColumns(
        logprobs=old + 0.3 * gap[0],
        old_logprobs=old,
        rollout_logprobs=old + 0.8 * gap[1],
        advantages=per_sequence.repeat_interleave(torch.tensor(lengths, dtype=torch.int64)),
        loss_mask=torch.rand(total, generator=generator) >= masked,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        ref_logprobs=old + 0.5 * torch.randn(total, generator=generator, dtype=torch.float64),
    )


def rows(column: Tensor, cu_seqlens: Tensor) -> list[list]:
    """The column as one list per sequence."""
    offsets = cu_seqlens.tolist()
    return [column[a:b].tolist() for a, b in pairwise(offsets)]


def take(columns: TokenColumns, sequences: list[int]) -> TokenColumns:
    """The columns of some sequences, in the given order, by slicing each one out."""
    offsets = columns.cu_seqlens.tolist()
    pieces = [slice(offsets[n], offsets[n + 1]) for n in sequences]
    lengths = [piece.stop - piece.start for piece in pieces]
    taken = {
        name: torch.cat([column[piece] for piece in pieces])
        for name, column in {**columns.float_columns(), "loss_mask": columns.loss_mask}.items()
    }
    return TokenColumns(**taken, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))


def with_logprobs(columns: TokenColumns, logprobs: Tensor) -> TokenColumns:
    return dataclasses.replace(columns, logprobs=logprobs)


def slow_coefficients(objective: Objective, columns: TokenColumns) -> Tensor:
    """The reference's coefficients of a packed batch, packed again."""
    names = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "loss_mask", "ref_logprobs")
    nested = reference_objectives.coefficients(
        objective, *(rows(getattr(columns, name), columns.cu_seqlens) for name in names)
    )
    return torch.tensor([value for row in nested for value in row], dtype=torch.float64)


lengths_strategy = st.lists(st.integers(0, 6), min_size=1, max_size=5)
seed_strategy = st.integers(0, 2**31)
