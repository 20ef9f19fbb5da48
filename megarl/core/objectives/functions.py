"""Objectives that are functions of the user: columns of a batch -> weighted advantages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megarl.core.choices.parts import Objective
from megarl.core.objectives.columns import Denominators, TokenColumns, prepare
from megarl.core.objectives.loss import Coefficients, coefficients
from megarl.errors import ConfigError, NumericsError

ObjectiveFunction = Callable[[TokenColumns], Tensor | Coefficients]


def function_coefficients(
    function: ObjectiveFunction,
    objective: Objective,
    columns: TokenColumns,
    denominators: Denominators | None = None,
    *,
    power: float | None = None,
) -> Coefficients:
    """Return ``F_t / D`` for every token, less the KL's share; ``F = function(columns)`` stands for ``M * W * A``.

    objective: the parts that the function does not replace, with weight and mask "none": ``aggregation`` gives D,
    ``kl`` the penalty. columns, denominators and errors as in ``coefficients``. F may hold anything on tokens that do
    not train. Raises ConfigError for a result that is no float tensor [T], NumericsError for one that is not finite on
    a token that trains.
    """
    with torch.no_grad():
        found = function(columns)
    values, metrics = (found.values, found.metrics) if isinstance(found, Coefficients) else (found, {})
    if not isinstance(values, Tensor) or values.shape != columns.logprobs.shape or not values.is_floating_point():
        what = f"{values.dtype} {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ConfigError(
            f"train.objective: the function returned {what}, expected one float for each token, "
            f"{list(columns.logprobs.shape)}"
        )
    keep = prepare(columns).keep
    values = torch.where(keep, values, 0.0)
    bad = ~torch.isfinite(values)
    if bool(bad.any()):
        token = int(bad.nonzero()[0])
        raise NumericsError(
            f"train.objective: the function returned {values[token].item()} at token {token} of the packed batch "
            f"({int(bad.sum())} such tokens that train), expected finite numbers"
        )
    # The one equation with weight 1 and mask 1: what stands in the place of the advantage is divided by D.
    result = coefficients(objective, replace(columns, advantages=values), denominators, power=power)
    return Coefficients(result.values, {**result.metrics, **metrics})
