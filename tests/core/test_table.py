"""The rows of the table, and the one equation against its slow reference for random records."""

from __future__ import annotations

import math

import pytest
import torch
from core_batches import (
    ROWS,
    columns_of,
    lengths_strategy,
    likely_columns,
    objectives,
    one_far_token,
    random_columns,
    seed_strategy,
    slow_coefficients,
    variant,
)
from hypothesis import given, settings

from megarl.core.metrics import finalize
from megarl.core.objectives import (
    OBJECTIVES,
    Mask,
    Objective,
    Penalty,
    TokenColumns,
    advantages_of,
    coefficients,
    token_advantages,
)
from megarl.errors import ConfigError, NumericsError


def test_what_rows_need():
    """A reference only for a KL with a factor above 0; beforehand only what depends on the whole mini-batch."""
    needing = {name for name, row in OBJECTIVES.items() if row.needs_ref_logprobs}
    assert needing == {"kl_grpo", "kl_grpo_token"}
    assert not variant("grpo", penalties=(Penalty("k3"),)).needs_ref_logprobs
    assert not variant("grpo", penalties=(Penalty("k3", "mu", 0.1),)).needs_ref_logprobs
    assert {name: set(row.beforehand) for name, row in OBJECTIVES.items() if row.beforehand} == {
        "adaptive_power": {"theta_old"}, "geo_rs": {"old_mu"}, "m2po": {"theta_mu"},
    }  # fmt: skip
    assert [name for name, row in OBJECTIVES.items() if row.needs_topk] == ["dppo_topk"]
    assert [set(OBJECTIVES[name].pairs) for name in ("minirl", "drpo", "sapo", "raft")] == [
        {"theta_old", "theta_mu"}, {"theta_mu"}, {"theta_old"}, set(),
    ]  # fmt: skip


@pytest.mark.parametrize(("advantage", "expected"), [(1.0, 0.0), (-1.0, -math.exp(10))])
def test_a_window_looks_at_the_ratio_without_its_bound(advantage, expected):
    """At t = 90 000 the window ends at e^15: a ratio of e^50 is outside, though the weight stops at e^10."""
    row = variant("ctpo", masks=(Mask("theta_old", "log_ratio", "prefix", -0.025, 0.05, "outward", growth=0.5),))
    columns = columns_of([0.0] * 89_999 + [20.0] + [20.0], advantages=advantage)
    assert 90_001 * float(coefficients(row, columns).values[-1]) == pytest.approx(expected, rel=1e-9)


def test_a_reference_of_probability_zero_is_bounded_and_counted():
    columns = columns_of([0.0, 0.0], advantages=0.0, ref=[0.0, -math.inf])
    result = coefficients(variant("reinforce", penalties=(Penalty("k2", coef=1.0),)), columns)
    assert result.values.tolist() == [0.0, -20.0]
    assert finalize(result.metrics)["kl/penalty_clamped"] == 0.5


def test_a_missing_column_is_named():
    penalised = variant("grpo", penalties=(Penalty("k3", coef=0.1),))
    columns = columns_of([0.0])
    given = {
        "logprobs": columns.logprobs, "ref_logprobs": None, "loss_mask": columns.loss_mask,
        "cu_seqlens": columns.cu_seqlens,
    }  # fmt: skip
    for call in (
        lambda: coefficients(penalised, columns),
        lambda: advantages_of(OBJECTIVES["kl_grpo"], [1.0, 0.0], [0, 0]),
        lambda: token_advantages(OBJECTIVES["kl_grpo"], [1.0], [0], **given),
    ):
        with pytest.raises(ConfigError, match="ref_logprobs"):
            call()
    coefficients(variant("grpo", penalties=(Penalty("k3"), Penalty("k3", "old", 0.1))), columns)
    with pytest.raises(NumericsError, match=r"^ref_logprobs is nan at token 1 "):
        coefficients(penalised, columns_of([0.0, 0.0], ref=[0.0, math.nan]))


@pytest.mark.parametrize("name", sorted(name for name, row in OBJECTIVES.items() if not row.needs_topk))
@pytest.mark.parametrize("drift", [0.5, -0.5])
def test_a_hundred_thousand_tokens_stay_finite(name, drift):
    """A drift of 0.5 per token: the product of the ratios is e^50000."""
    size = 100_000
    old = torch.full((size + 1,), -2.0)
    signs = torch.cat([torch.ones(size), -torch.ones(1)])
    bounds = torch.tensor([0, size, size + 1])
    everywhere, moved = torch.ones(size + 1, dtype=torch.bool), torch.full((size + 1,), 30.0)
    columns = TokenColumns(old + drift, old, old, signs, everywhere, bounds, old, router_drift=moved)
    for objective in (variant(name), variant(name, masks=())):
        result = coefficients(objective, columns)
        assert torch.isfinite(result.values).all()
        finalize(result.metrics)


def check(objective: Objective, columns: TokenColumns) -> None:
    expected = slow_coefficients(objective, columns)
    torch.testing.assert_close(coefficients(objective, columns).values, expected, rtol=1e-9, atol=1e-12)


@settings(max_examples=300, deadline=None)
@given(objectives(), seed_strategy, lengths_strategy)
def test_random_records(objective: Objective, seed: int, lengths: list[int]) -> None:
    check(objective, likely_columns(seed, lengths))


@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str) -> None:
    for seed in range(3):
        check(ROWS[name], likely_columns(seed, [3, 5, 0, 6]))
        if not ROWS[name].needs_topk:
            check(ROWS[name], random_columns(seed, [3, 5, 0, 6]))


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not (row.needs_topk or row.router_shift_floor)])
def test_a_long_response_with_one_far_token(name: str) -> None:
    check(ROWS[name], one_far_token())
