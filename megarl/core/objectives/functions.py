"""Objectives that are functions of the user: columns of a batch -> weighted advantages."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from megarl.core.choices.parts import NON_NEGATIVE_ADVANTAGES, Objective
from megarl.core.choices.records import call_own, name_of
from megarl.core.devices import DeviceChecks
from megarl.core.metrics import Stat
from megarl.core.objectives.columns import (
    Denominators,
    TokenColumns,
    check_returned,
    copy_columns,
    prepare,
    token_state,
)
from megarl.core.objectives.loss import BatchFacts, Coefficients, coefficients, state_coefficients
from megarl.core.objectives.responses import advantages_of
from megarl.errors import ConfigError, refusal

ObjectiveFunction = Callable[[TokenColumns], Tensor | Coefficients]


def function_coefficients(
    function: ObjectiveFunction,
    objective: Objective,
    columns: TokenColumns,
    denominators: Denominators | None = None,
    *,
    facts: BatchFacts | None = None,
    checks: DeviceChecks | None = None,
) -> Coefficients:
    """Return ``F_t / D`` for every token, less the KL penalty: ``F = function(columns)`` [T] replaces ``M * W * A``.

    objective: supplies D (``aggregation``) and penalties; without masks and factors. Other arguments and errors as in
    ``coefficients``. Values of F on tokens without training are ignored. ConfigError if the function raises or
    returns no float tensor [T], NumericsError if F is not finite on a token that trains.
    """
    label, metrics = "train.objective", {}
    result = call_own(label, function, copy_columns(columns, columns.loss_mask))
    if isinstance(result, Coefficients):
        result, metrics = result.values, result.metrics
        if not isinstance(metrics, Mapping) or not all(isinstance(stat, Stat) for stat in metrics.values()):
            raise ConfigError(refusal("metrics_of_function", label=label, function=name_of(function)))
    keep = prepare(columns, denominators, objective, checks).keep
    values = check_returned(label, function, result, columns.logprobs, keep)
    # With weight 1 and mask 1 the equation divides the values in the place of advantages by D.
    state = token_state(replace(columns, advantages=values))
    weighed = state_coefficients(objective, state, columns.loss_mask, denominators, facts)
    return replace(weighed, metrics={**metrics, **weighed.metrics})


def try_functions(
    objective: Objective, function: ObjectiveFunction | None, device: torch.device | int | str, group_size: int = 2
) -> None:
    """Call every function of the user once, on four tokens of two responses; errors as in a step.

    ConfigError also if ``group_size`` is 1 and the advantage of single responses is 0.
    """
    if callable(objective.advantage):
        values = advantages_of(objective, [1.0, 0.0], [0, int(group_size == 1)])
        if group_size == 1 and not values.any():
            raise ConfigError(refusal("advantage_of_group", advantage=name_of(objective.advantage)))
    logprobs = torch.tensor([-0.1, -1.0, -0.5, -2.0], device=device)
    signs, bounds = (torch.tensor(values, device=device) for values in ([1.0, 1.0, -1.0, -1.0], [0, 2, 4]))
    advantages = signs.clamp(min=0) if objective.advantage in NON_NEGATIVE_ADVANTAGES else signs
    ref = logprobs - 0.2 if objective.needs_ref_logprobs else None
    policies = logprobs, logprobs - 0.1 * signs, logprobs - 0.2 * signs
    drift = None if objective.router_shift_floor is None else -logprobs
    columns = TokenColumns(*policies, advantages, logprobs < -0.2, bounds, ref, router_drift=drift)
    if function is not None:
        function_coefficients(function, objective, columns)
    elif objective.own_functions:
        coefficients(objective, columns)
