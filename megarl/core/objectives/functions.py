"""Objectives that are functions of the user: columns of a batch -> weighted advantages."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import fields, replace

import torch
from torch import Tensor

from megarl.core.choices.parts import Objective
from megarl.core.metrics import Stat
from megarl.core.objectives.columns import Denominators, TokenColumns, prepare
from megarl.core.objectives.loss import Coefficients, coefficients
from megarl.errors import ConfigError, MegarlError, NumericsError, describe

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
    not train. Raises ConfigError if the function raises, or for a result that is no float tensor [T], NumericsError for
    one that is not finite on a token that trains.
    """
    values, metrics = _call(function, columns)
    if (
        not isinstance(values, Tensor)
        or values.shape != columns.logprobs.shape
        or not values.is_floating_point()
        or values.device != columns.logprobs.device
    ):
        what = f"{values.dtype} {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ConfigError(
            f"train.objective: the function returned {what}, expected one float for each token, "
            f"{list(columns.logprobs.shape)} on {columns.logprobs.device}"
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
    return Coefficients(result.values, {**metrics, **result.metrics})


def _call(function: ObjectiveFunction, columns: TokenColumns) -> tuple[object, Mapping[str, Stat]]:
    """Call the user's function on copies, so that it cannot change the batch in place."""
    given = {field.name: getattr(columns, field.name) for field in fields(columns)}
    copies = {name: column.detach().clone() for name, column in given.items() if column is not None}
    try:
        with torch.no_grad():
            found = function(TokenColumns(**copies))
    except MegarlError:
        raise
    except (Exception, SystemExit) as error:  # the function is the user's code, which may raise anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"train.objective: the function raised {describe(error)} ({last.filename}:{last.lineno})"
        ) from error
    if not isinstance(found, Coefficients):
        return found, {}
    metrics = found.metrics
    if not isinstance(metrics, Mapping) or not all(isinstance(stat, Stat) for stat in metrics.values()):
        raise ConfigError(
            "train.objective: the function returned metrics that are no mapping to megarl.core.metrics.Stat"
        )
    return found.values, metrics
