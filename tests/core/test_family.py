from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from core_batches import random_columns
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.choices.family import family_warning, in_family, weight_function
from megarl.core.objectives import OBJECTIVES, Factor, coefficients


@pytest.mark.parametrize(
    "f",
    [
        lambda rho: rho,
        lambda rho: 1.0,
        lambda rho: min(max(rho, 0.8), 1.2),
        lambda rho: min(rho, 5.0),
        math.sqrt,
        lambda rho: rho**0.0,
        lambda rho: max(rho, 1.0),
    ],
)
def test_members(f):
    assert in_family(f)


@pytest.mark.parametrize(
    "f",
    [
        lambda rho: float(0.8 <= rho <= 1.2),  # a mask, as a weight
        lambda rho: rho if rho <= 1.2 else 0.0,  # PPO's weight for a good token
        lambda rho: rho**1.1,
        lambda rho: rho**-0.1,
        lambda rho: min(rho, 0.9),
        lambda rho: min(rho, 2.0) if rho < 3 else 1.5,  # between its bounds, but it falls
        lambda rho: 1.0001,
        lambda rho: math.nan,
    ],
)
def test_strangers(f):
    assert not in_family(f)


@given(q=st.floats(0, 3))
def test_powers(q):
    assert in_family(lambda rho: rho**q) == (q <= 1 + 1e-12)


def test_every_row_of_the_table_is_a_member():
    assert [name for name, objective in OBJECTIVES.items() if family_warning(objective)] == []


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"factors": (Factor("theta_mu", high=0.5),)}, "high 0.5"),
        ({"factors": (Factor("theta_mu", fn="power", power=2.0),)}, "power 2"),
        ({"factors": (Factor("theta_mu", fn="power", power=9e29),)}, "1 -> 1, 10 -> 2.354e+17"),
        ({"factors": (Factor("theta_old"), Factor("old_mu", high=0.5))}, "'old_mu'"),
    ],
)
def test_a_warning_says_what_is_outside(changes, part):
    warning = family_warning(dataclasses.replace(OBJECTIVES["minirl"], **changes))
    assert warning is not None
    assert part in warning
    assert "ratio -> factor" in warning


PLAIN = [
    name
    for name, objective in OBJECTIVES.items()
    if objective.gate is None and not any(f.needs_batch or f.token_clip for f in objective.factors)
]
"""Rows whose weight is a function of single ratios."""


@pytest.mark.parametrize("name", PLAIN)
def test_the_function_is_the_one_that_weighs(name):
    """Against the coefficients themselves, where no mask acts: A = 1 and one token per sequence."""
    objective = dataclasses.replace(OBJECTIVES[name], masks=(), aggregation="token-mean", norm_length=None)
    columns = random_columns(1, [1] * 20, masked=0)
    columns = dataclasses.replace(columns, advantages=torch.ones(20, dtype=torch.float64))
    pairs = {"theta": columns.logprobs, "old": columns.old_logprobs, "mu": columns.rollout_logprobs}
    expected = torch.full((20,), 1 / 20, dtype=torch.float64)
    for factor in objective.factors:
        above, below = factor.policies.split("_")
        f = weight_function(factor)
        if factor.sign != "negative":
            expected *= torch.tensor(
                [f(rho) for rho in (pairs[above] - pairs[below]).exp().tolist()], dtype=torch.float64
            )
    torch.testing.assert_close(coefficients(objective, columns).values, expected, rtol=1e-12, atol=0)
