"""The one equation against its slow reference, for random records and for every row of the table."""

from __future__ import annotations

import pytest
import torch
from core_batches import (
    ROWS,
    lengths_strategy,
    likely_columns,
    objectives,
    random_columns,
    seed_strategy,
    slow_coefficients,
)
from hypothesis import given, settings

from megarl.core.objectives import Objective, TokenColumns, coefficients


def check(objective: Objective, columns: TokenColumns) -> None:
    expected = slow_coefficients(objective, columns)
    torch.testing.assert_close(coefficients(objective, columns).values, expected, rtol=1e-9, atol=1e-12)


@settings(max_examples=300, deadline=None)
@given(objectives(), seed_strategy, lengths_strategy)
def test_random_records(objective: Objective, seed: int, lengths: list[int]) -> None:
    check(objective, likely_columns(seed, lengths))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str, seed: int) -> None:
    check(ROWS[name], likely_columns(seed, [3, 5, 0, 6]))
    if not ROWS[name].needs_topk:
        check(ROWS[name], random_columns(seed, [3, 5, 0, 6]))
