"""Sums and means of log-ratios over parts of packed sequences, and how exact they are."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import get_args

import pytest
import torch
from core_batches import lengths_strategy, rows, seed_strategy
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.reference_objectives import over_scope

from megarl.core.choices.parts import Scope
from megarl.core.ratios import aggregate, positions, segment_cumsum, segment_total

LOGS = (0.02, 0.05, -0.01, 0.10)
KINDS = [scope for scope in get_args(Scope) if scope != "sequence_max"]


def aggregated(kind, logs, mask=None):
    values = torch.tensor(logs, dtype=torch.float64)
    keep = torch.ones(len(logs), dtype=torch.bool) if mask is None else torch.tensor(mask)
    values = torch.where(keep, values, 0.0)
    return aggregate(kind, values, keep, torch.tensor([0, len(logs)])).exp().tolist()


@settings(max_examples=80, deadline=None)
@given(kind=st.sampled_from(KINDS), seed=seed_strategy, lengths=lengths_strategy)
def test_against_the_reference(kind, seed, lengths):
    generator = torch.Generator().manual_seed(seed)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    mask = torch.rand(sum(lengths), generator=generator) > 0.3
    logs = torch.where(mask, torch.randn(sum(lengths), generator=generator, dtype=torch.float64), 0.0)
    fast = rows(aggregate(kind, logs, mask, cu_seqlens), cu_seqlens)
    places = rows(positions(mask, cu_seqlens), cu_seqlens)
    for values, row, kept, place in zip(fast, rows(logs, cu_seqlens), rows(mask, cu_seqlens), places, strict=True):
        own = [x for x, m in zip(row, kept, strict=True) if m]
        j = 0
        for value, m, t in zip(values, kept, place, strict=True):
            assert value == (pytest.approx(over_scope(kind, own, j), abs=1e-14) if m else 0)
            j += m
            assert t == j


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_are_those_of_exact_arithmetic(reverse, dtype):
    """A running sum over the batch loses digits: neighbours at the clamp must not blur a quiet sequence."""
    generator = torch.Generator().manual_seed(0)
    lengths = [60_000, 7, 40_000, 1]
    loud, quiet = torch.full((lengths[0],), 20.0), 1e-6 * torch.randn(7, generator=generator)
    values = torch.cat([loud, quiet, 0.1 * torch.randn(lengths[2], generator=generator), torch.tensor([0.3])])
    values = values.to(dtype) * (1.0 if dtype == torch.float32 else math.pi)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    sums = segment_cumsum(values, cu_seqlens, reverse)
    assert sums.dtype == torch.float64
    for start, end in pairwise(cu_seqlens.tolist()):
        for t in {start, start + 1, (start + end) // 2, end - 1} & set(range(start, end)):
            exact = math.fsum(values[t:end].tolist() if reverse else values[start : t + 1].tolist())
            assert sums[t].item() == pytest.approx(exact, rel=3e-16, abs=1e-20)
    totals = [math.fsum(row) for row in rows(values, cu_seqlens)]
    assert segment_total(values, cu_seqlens).tolist() == pytest.approx(totals, rel=3e-16, abs=1e-20)


def test_empty_batches_and_sequences():
    nothing = torch.zeros(0)
    assert segment_cumsum(nothing, torch.tensor([0])).shape == (0,)
    assert segment_total(nothing, torch.tensor([0, 0, 0])).tolist() == [0, 0]
    assert segment_total(torch.tensor([2.0]), torch.tensor([0, 0, 1, 1])).tolist() == [0, 2, 0]
    for kind in KINDS:
        assert aggregate(kind, nothing, nothing > 0, torch.tensor([0, 0])).shape == (0,)
    assert segment_cumsum(torch.zeros(3), torch.tensor([0, 3])).tolist() == [0, 0, 0]


def test_the_dtype_stays():
    logs = torch.tensor([0.5, 0.25])
    for kind in KINDS:
        assert aggregate(kind, logs, logs > 0, torch.tensor([0, 2])).dtype == torch.float32
