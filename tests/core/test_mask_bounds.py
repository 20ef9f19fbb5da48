"""Every mask of every row where its statistic equals its bound exactly, and one float beyond.

The bound is set to the statistic of a token, so that both are the same number in fp32 and in fp64; ratios are moved by
log-ratios that are exact in binary.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from megarl.core.objectives import OBJECTIVES, Mask, Objective, TokenColumns, TopK, coefficients
from megarl.core.objectives.columns import PolicyRatios, prepare
from megarl.core.objectives.masks import find_dropped, measure

SIGNED = ("ratio", "log_ratio", "difference")
PLACES = [
    (name, index, side, way)
    for name, row in OBJECTIVES.items()
    for index, mask in enumerate(row.records)
    for side in ("low", "high")
    if getattr(mask, side) is not None and mask.scope != "batch_mean"
    for way in ((-1 if side == "low" else 1,) if mask.statistic in SIGNED else (1, -1))
]
"""Row, mask, bound, and whether the first policy of the pair is above (1) or below the second."""
CPPO = Mask("old_mu", "k2", "prefix_budget", high=0.125, sign="outward", budget=0.0625, last_weight=0.5)
TOKEN = 3
"""The token looked at: the fourth, whose bounds grow by sqrt(4) = 2 in a mask with growth 0.5."""


def batch(mask: Mask, way: int, dtype: torch.dtype, advantage: float) -> TokenColumns:
    """One response of four tokens whose log-ratio of the mask's pair is +-0.5, 0.25, 0.375 and 0.625."""
    logs = way * torch.tensor([0.5, 0.25, 0.375, 0.625], dtype=dtype)
    below = torch.full((4,), -1.0, dtype=dtype)
    columns = {"theta": below, "old": below, "mu": below}
    first, second = mask.policies.split("_")
    columns[first] = below + logs
    if (first, second) == ("theta", "mu"):
        columns["old"] = below + logs / 2  # must not matter
    top = TopK(torch.full((4, 1), -3.0, dtype=dtype), torch.full((4, 1), -2.5, dtype=dtype), torch.zeros(4).bool())
    ones = torch.ones(4, dtype=dtype)
    bounds = torch.tensor([0, 4])
    return TokenColumns(
        *(columns[name] for name in ("theta", "old", "mu")), advantage * ones, ones.bool(), bounds, topk=top
    )


def value_of(mask: Mask, columns: TokenColumns) -> torch.Tensor:
    state = prepare(columns)
    return measure(mask, state, PolicyRatios(state))[TOKEN]


def is_dropped(mask: Mask, columns: TokenColumns) -> bool:
    state = prepare(columns)
    dropped = bool(find_dropped(mask, state, PolicyRatios(state))[TOKEN])
    alone = Objective("group_mean", "seq-mean-token-sum", masks=(mask,))
    if columns.advantages[TOKEN] != 0:
        assert (float(coefficients(alone, columns).values[TOKEN]) == 0) == dropped
    return dropped


def reached(mask: Mask, way: int, advantage: float) -> bool:
    """Whether the mask is one for this advantage, with the ratio on this side of 1."""
    if mask.sign == "both":
        return True
    if mask.sign == "negative":
        return advantage < 0
    return advantage * way > 0


def with_bound(mask: Mask, side: str, bound: float) -> Mask:
    other: dict[str, Any] = {"low": None, "high": None}
    return dataclasses.replace(mask, **{**other, side: bound})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "index", "side", "way"), PLACES)
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_at_the_bound_and_one_float_beyond(name, index, side, way, advantage, dtype) -> None:
    mask = OBJECTIVES[name].records[index]
    columns = batch(mask, way, dtype, advantage)
    value = value_of(mask, columns)
    width = 2.0 if mask.growth else 1.0
    inward = torch.tensor(-math.inf if side == "high" else math.inf, dtype=dtype)
    inside, outside = (torch.nextafter(value, toward) for toward in (inward, -inward))
    reach = reached(mask, way, advantage)

    def dropped(bound: torch.Tensor) -> bool:
        return is_dropped(with_bound(mask, side, float(bound) / width), columns)

    assert dropped(value) == (reach and mask.strict), "a value equal to its bound"
    assert dropped(inside) == reach, "a value one float beyond its bound"
    assert not dropped(outside), "a value one float inside of its bound"


@pytest.mark.parametrize(
    ("mask", "logs", "kept"),
    [
        # k2 = l^2 / 2 and sums of logs are exact in binary.
        (Mask("old_mu", "k2", high=0.125), [0.5, -0.5, 0.5 + 2**-20], [1, 1, 0]),
        (Mask("old_mu", "k2", "sequence_sum", high=0.25), [0.5, -0.5, 0.0], [1, 1, 1]),
        (Mask("old_mu", "k2", "sequence_sum", high=0.25), [0.5, -0.5, 2**-10], [0, 0, 0]),
        (Mask("old_mu", "k2", "sequence_max", high=0.125), [0.5, -0.5, 0.25], [1, 1, 1]),
        (Mask("old_mu", "k2", "sequence_max", high=0.125), [0.25, -0.5 - 2**-20, 0.25], [0, 0, 0]),
        (Mask("old_mu", "k3", high=0.0), [0.0, 2**-10, -(2**-10)], [1, 0, 0]),
        (Mask("old_mu", "log_ratio", "sequence_mean", low=0.25), [0.5, 0.0, 0.25], [1, 1, 1]),
        (Mask("old_mu", "log_ratio", "sequence_mean", low=0.25), [0.5, 0.0, 0.25 - 2**-20], [0, 0, 0]),
        (Mask("old_mu", "log_ratio", "prefix", high=0.5), [0.25, 0.25, 2**-20], [1, 1, 0]),
        (Mask("old_mu", low=1.0, high=1.0), [0.0, 2**-20, -(2**-20)], [1, 0, 0]),
        (Mask("old_mu", low=1.0, strict=True), [0.0, 2**-20, -(2**-20)], [0, 1, 0]),
        # The mean of the rest is at its bound, and a float beyond; equal values leave together, also all of them.
        (Mask("old_mu", "k2", "batch_mean", high=0.0625), [0.5, -0.25, 0.25], [1, 1, 1]),
        (Mask("old_mu", "k2", "batch_mean", high=0.0625), [0.5 + 2**-20, -0.25, 0.25], [0, 1, 1]),
        (Mask("old_mu", "k2", "batch_mean", high=0.03125), [-0.5, 0.25, 0.5], [0, 1, 0]),
        (Mask("old_mu", "k2", "batch_mean", high=0.03125 - 2**-20), [-0.5, 0.25, 0.5], [0, 0, 0]),
        (Mask("old_mu", "k2", "batch_mean", high=0.0), [0.0, 2**-10, 0.0], [1, 0, 1]),
        (Mask("old_mu", "k2", "batch_mean", high=0.03125, sign="outward"), [0.5, -0.5, 0.25], [0, 1, 1]),
        # Weights 1, 0.75 and 0.5: 0.125 at most each, and in a prefix 0.125 more than 1/16 of the weights before it.
        (CPPO, [0.5, 0.0, 0.5], [1, 1, 1]),
        (CPPO, [0.5 + 2**-20, 0.0, 0.0], [0, 1, 1]),
        (CPPO, [0.0, 0.0, 0.6875], [1, 1, 1]),
        (CPPO, [0.0, 0.0, 0.75], [1, 1, 0]),
        (CPPO, [0.0, 0.6875], [1, 1]),
        (CPPO, [0.0, 0.75], [1, 0]),
        (CPPO, [0.5 + 2**-20], [0]),
        (CPPO, [0.5, 0.25, 0.25], [1, 1, 1]),
        (CPPO, [0.5, 0.5, 0.25], [1, 0, 1]),
        (CPPO, [0.5, 0.5, 0.5], [1, 0, 0]),
        (CPPO, [-0.75, -0.5, 0.25], [1, 1, 0]),
        (CPPO, [-0.75, -0.5, -0.25], [1, 1, 1]),
    ],
)
def test_numbers_that_are_exact_in_binary(mask: Mask, logs: list[float], kept: list[int]) -> None:
    for dtype in (torch.float32, torch.float64):
        mu = torch.full((len(logs),), -2.0, dtype=dtype)
        old = mu + torch.tensor(logs, dtype=dtype)
        ones = torch.ones(len(logs), dtype=dtype)
        columns = TokenColumns(old, old, mu, ones, ones.bool(), torch.tensor([0, len(logs)]))
        found = coefficients(Objective("group_mean", "seq-mean-token-sum", masks=(mask,)), columns).values
        assert found.tolist() == kept
