"""Log-ratios, and their sums and means over parts of packed sequences, which are exact."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import get_args

import pytest
import torch
from core_batches import lengths_strategy, rows, seed_strategy
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.reference_objectives import over_scope

from megarl.core.choices.parts import DIVERGENCE_SCOPES, Scope
from megarl.core.ratios import (
    aggregate,
    check_cu_seqlens,
    is_logprob,
    is_wrong_cu_seqlens,
    log_ratio,
    logprob_error,
    positions,
    segment_cumsum,
    segment_expand,
    segment_ids,
    segment_lengths,
    segment_sum,
    segment_total,
    usable_mask,
)


def test_log_ratio_masks_before_subtracting_and_clamps():
    numerator = torch.tensor([-1.0, -math.inf, 0.0, -900.0, math.nan], dtype=torch.float64)
    denominator = torch.tensor([-1.5, -math.inf, -900.0, 0.0, 0.0], dtype=torch.float64)
    mask = torch.tensor([True, False, True, True, False])
    assert log_ratio(numerator, denominator, mask).tolist() == [0.5, 0.0, 20.0, -20.0, 0.0]
    assert log_ratio(numerator, denominator, mask, bound=3.0).tolist() == [0.5, 0.0, 3.0, -3.0, 0.0]


def test_log_ratio_has_no_nan_gradient_at_masked_tokens():
    numerator = torch.tensor([-1.0, -math.inf], requires_grad=True)
    log_ratio(numerator, torch.tensor([-2.0, -math.inf]), torch.tensor([True, False])).sum().backward()
    assert numerator.grad is not None
    assert numerator.grad.tolist() == [1.0, 0.0]
    half = torch.zeros(2, dtype=torch.bfloat16)
    assert log_ratio(half, half, torch.ones(2, dtype=torch.bool)).dtype == torch.float32


def test_usable_mask():
    mask = torch.tensor([True, True, False])
    assert usable_mask(mask, torch.tensor([-1.0, -math.inf, -1.0])).tolist() == [True, False, False]


@settings(max_examples=40, deadline=None)
@given(lengths=lengths_strategy)
def test_segments(lengths):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    values = torch.arange(sum(lengths), dtype=torch.float64) + 1
    assert segment_lengths(cu_seqlens).tolist() == lengths
    assert segment_sum(values, cu_seqlens).tolist() == [sum(row) for row in rows(values, cu_seqlens)]
    assert segment_sum(values > 2, cu_seqlens).tolist() == [sum(x > 2 for x in row) for row in rows(values, cu_seqlens)]
    ids = [n for n, length in enumerate(lengths) for _ in range(length)]
    assert segment_ids(cu_seqlens).tolist() == ids
    assert segment_expand(torch.arange(len(lengths)) * 10, cu_seqlens).tolist() == [10 * n for n in ids]


def test_cu_seqlens_of_floats_are_refused():
    with pytest.raises(ValueError, match="integer tensor"):
        check_cu_seqlens(torch.tensor([0.0, 2.0]), 2)


def test_the_largest_log_probability():
    assert is_logprob(torch.tensor([-math.inf, 0.0, 1e-3, 1.001e-3], dtype=torch.float64)).tolist() == [True] * 3 + [
        False
    ]


@pytest.mark.parametrize("value", [0.5, math.inf, math.nan])
def test_a_wrong_log_probability_is_named(value):
    error = logprob_error("logprobs", torch.tensor([-1.0, value]), torch.tensor([False, True]))
    assert re.search(rf"logprobs is {value:g} at token 1 .*raw logits", str(error))


def test_falling_bounds_are_shown():
    with pytest.raises(ValueError, match=r"\[0, 1, 5, 3, 6, 7\], expected to rise from 0 to 7"):
        check_cu_seqlens(torch.tensor([0, 1, 5, 3, 6, 7]), 7)


@pytest.mark.parametrize(
    ("bounds", "wrong"),
    [([0, 2, 2, 3], False), ([1, 2, 3], True), ([0, 1, 2], True), ([0, 1, 4], True), ([0, 2, 1, 3], True)],
)
def test_which_bounds_are_wrong(bounds, wrong):
    assert bool(is_wrong_cu_seqlens(torch.tensor(bounds), 3)) is wrong
    assert not is_wrong_cu_seqlens(torch.tensor([0]), 0)


def test_sums_of_negative_values_are_exact_too():
    quiet = 1e-6 * torch.randn(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 1e-5
    values = torch.cat([torch.full((60_000,), -20 * math.pi, dtype=torch.float64), quiet])
    total = segment_total(values, torch.tensor([0, 60_000, 60_007]))[1].item()
    assert total == pytest.approx(math.fsum(quiet.tolist()), rel=3e-16)


def test_rows_are_summed_like_each_alone() -> None:
    values, bounds = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.tensor([0, 2, 2, 3])
    assert segment_sum(values, bounds).tolist() == [[3.0, 0.0, 3.0], [9.0, 0.0, 6.0]]
    assert segment_sum(values > 2, bounds).tolist() == [[0, 0, 1], [2, 0, 1]]


KINDS = [scope for scope in get_args(Scope) if scope not in DIVERGENCE_SCOPES]


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
        logs = torch.tensor([0.5, 0.25])
        assert aggregate(kind, logs, logs > 0, torch.tensor([0, 2])).dtype == torch.float32
    assert segment_cumsum(torch.zeros(3), torch.tensor([0, 3])).tolist() == [0, 0, 0]
