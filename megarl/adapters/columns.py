"""What the adapters share: columns of a stack in, the coefficients of a row out, for the stack to divide.

Stacks divide a loss themselves: by the tokens or the sequences of a step, or by advantages that were divided before. An
adapter therefore returns the sum over its micro-batch, ``-(coefficients * logprobs).sum()``, before that division. A
row that reads a column which the stack does not give is refused by name, because a column in its place would silently
be another algorithm.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor

from megarl.core.choices.parts import Aggregation, Objective
from megarl.core.choices.table import OBJECTIVES, find_objective
from megarl.core.metrics import finalize, merge, to_host
from megarl.core.objectives import Coefficients, Denominators, TokenColumns, coefficients
from megarl.errors import ConfigError

POLICY_COLUMNS = {"old": "old_logprobs", "mu": "rollout_logprobs", "ref": "ref_logprobs"}
_UNIT = 2**30
"""A power of two: the division by it is exact, and undone exactly."""


def columns_read(objective: Objective) -> frozenset[str]:
    """Return the columns of log-probabilities that the loss of a row reads beside ``logprobs``.

    The advantage is the stack's: a row whose advantage alone reads the reference reads none here.
    """
    if objective.own_functions:
        return frozenset(POLICY_COLUMNS.values())
    policies = {policy for pair in objective.pairs for policy in pair.split("_")}
    for penalty in objective.penalties:
        if penalty.coef:
            policies |= {penalty.to, penalty.behaviour} if penalty.estimator == "unbiased" else {penalty.to}
    return frozenset(POLICY_COLUMNS[policy] for policy in policies - {"theta"})


def find_row(row: str | Objective, stack: str, divides: Collection[str] = get_args(Aggregation)) -> Objective:
    """Return the row for a loss that the stack calls with one micro-batch.

    divides: aggregations that the stack's division serves. ConfigError for a row that a micro-batch cannot serve, or
    that divides otherwise; UnknownNameError for an unknown name.
    """
    objective = find_objective(row)
    refusals = {
        "must know all tokens of the step beforehand": objective.beforehand,
        "reads the sampler's top K tokens": objective.needs_topk,
        "has an entropy term: set entropy_coef to 0, and use the stack's": objective.entropy_coef,
        f"trains {objective.selection} responses: clear the mask of the others, and set selection to 'all'":
            objective.selection != "all",
        f"divides as {objective.aggregation!r}, but {stack} divides as {' or '.join(divides)} with these settings":
            objective.aggregation not in divides,
    }  # fmt: skip
    for refusal, applies in refusals.items():
        if applies:
            raise ConfigError(f"{stack}: the row {_name(objective)} {refusal}")
    return objective


def token_columns(
    objective: Objective,
    stack: str,
    logprobs: Tensor,
    loss_mask: Tensor,
    advantages: Tensor,
    cu_seqlens: Tensor | None = None,
    **policies: Tensor | None,
) -> TokenColumns:
    """Return the packed columns of a row.

    logprobs: float [B, S] padded, or [T] packed with ``cu_seqlens`` int64 [N+1]. loss_mask: bool or 0 and 1, like
    logprobs. advantages: like logprobs, or [B, 1]. policies: ``old_logprobs``, ``rollout_logprobs``, ``ref_logprobs``,
    like logprobs; None where the stack gives none. ConfigError if the row reads a column that is None.
    """
    for name in columns_read(objective):
        if policies.get(name) is None:
            raise ConfigError(
                f"{stack}: the row {_name(objective)} reads {name}, which the batch does not have; let {stack} provide "
                "it, or choose a row that does not read it (docs/objectives.md)"
            )
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, logprobs.numel() + 1, logprobs.size(-1), device=logprobs.device)
    # A column that the row does not read: theta's own value, with which a ratio is 1.
    given = {"old_logprobs": logprobs.detach(), "rollout_logprobs": logprobs.detach()}
    given |= {name: column for name, column in policies.items() if column is not None}
    return TokenColumns(
        logprobs.flatten(),
        advantages=advantages.expand_as(logprobs).flatten(),
        loss_mask=loss_mask.bool().flatten(),
        cu_seqlens=cu_seqlens.long(),
        **{name: column.flatten() for name, column in given.items()},
    )


def per_token(objective: Objective) -> Objective:
    """Return the row without any division of its own: ``undivided`` then gives ``M F S A - P`` of each token."""
    return replace(objective, aggregation="token-mean", norm_length=None)


def undivided(objective: Objective, columns: TokenColumns) -> Coefficients:
    """Return ``coefficients`` before the division by the tokens or sequences of a step, values [T].

    The division by the tokens of a response ("seq-mean-token-mean") or by ``norm_length`` is made.
    """
    result = coefficients(objective, columns, Denominators(_UNIT, _UNIT))
    return replace(result, values=result.values * _UNIT)


def token_losses(values: Tensor, logprobs: Tensor) -> Tensor:
    """Return ``-values * logprobs`` by token; 0 where the value is 0, also for a logprob of -inf."""
    return -values.detach() * torch.where(values != 0, logprobs, 0.0)


def row_loss(
    objective: Objective, stack: str, logprobs: Tensor, loss_mask: Tensor, advantages: Tensor, **policies: Tensor | None
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of a micro-batch before the stack's division, and its metrics; arguments of ``token_columns``."""
    columns = token_columns(objective, stack, logprobs, loss_mask, advantages, **policies)
    result = undivided(objective, columns)
    metrics = {f"megarl/{name}": value for name, value in finalize(to_host(merge([result.metrics]))).items()}
    return token_losses(result.values, columns.logprobs).sum(), metrics


def _name(objective: Objective) -> str:
    return next((repr(name) for name, row in OBJECTIVES.items() if row == objective), "of your own")
