"""What the adapters share: columns of a stack in, the coefficients of a row out, for the stack to divide.

Stacks divide a loss themselves: by the tokens or the sequences of a step, or by advantages that were divided before. An
adapter therefore returns the sum over its micro-batch, ``-(coefficients * logprobs).sum()``, before that division. A
row that reads a column which the stack does not give is refused by name, because a column in its place would silently
be another algorithm.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from megarl.core.choices.parts import Aggregation, Objective
from megarl.core.choices.table import OBJECTIVES, find_objective
from megarl.core.objectives import Coefficients, Denominators, TokenColumns, coefficients
from megarl.errors import ConfigError, refusal
from megarl.files.texts import read_table

POLICY_COLUMNS = {"old": "old_logprobs", "mu": "rollout_logprobs", "ref": "ref_logprobs"}
_REFUSALS = read_table(__file__, "refusals.toml")
_UNIT = 2**30
"""A power of two: the division by it is exact, and undone exactly."""


def refuse_by(stack: str, subject: str, problems: Mapping[str, object], /, **facts: object) -> None:
    """Raise ConfigError with the first text of the stack whose condition is true, behind ``subject``."""
    if name := next((name for name, is_wrong in problems.items() if is_wrong), None):
        raise ConfigError(subject + _REFUSALS[stack][name].format(**facts))


def policies_read(row: Objective) -> frozenset[str]:
    """Return the policies in the ratios and penalties of a row's loss. Functions of the user may read more."""
    penalties = [penalty for penalty in row.penalties if penalty.coef]
    behaviours = (penalty.behaviour for penalty in penalties if penalty.estimator == "unbiased")
    return frozenset({*"_".join(row.pairs).split("_"), *(penalty.to for penalty in penalties), *behaviours})


def columns_read(row: Objective) -> frozenset[str]:
    """Return the columns of log-probabilities that the loss of a row reads beside ``logprobs``.

    The advantage is the stack's: a row whose advantage alone reads the reference reads none here.
    """
    policies = policies_read(row)
    return frozenset(column for policy, column in POLICY_COLUMNS.items() if policy in policies or row.own_functions)


def find_row(row: str | Objective, stack: str, divides: Collection[str] = get_args(Aggregation)) -> Objective:
    """Return the row for a loss that the stack calls with one micro-batch.

    divides: aggregations that the stack's division serves. ConfigError for a row that a micro-batch cannot serve, or
    that divides otherwise; UnknownNameError for an unknown name.
    """
    objective = find_objective(row)
    problems = {"beforehand": objective.beforehand, "topk": objective.needs_topk, "entropy": objective.entropy_coef}
    problems |= {"drift": objective.router_shift_floor, "selection": objective.selection != "all"}
    problems |= {"aggregation": objective.aggregation not in divides}
    subject = f"{stack}: the row {_name(objective)} "
    refuse_by("all", subject, problems, row=objective, stack=stack, divides=" or ".join(divides))
    return objective


def token_columns(
    row: Objective, stack: str, logprobs: Tensor, cu_seqlens: Tensor | None = None, **columns: Tensor | None
) -> TokenColumns:
    """Return the packed columns of a row.

    logprobs: float [B, S] padded, or [T] packed with ``cu_seqlens`` int64 [N+1]. columns: like logprobs, by the names
    of ``TokenColumns``; ``loss_mask`` may be 0 and 1, ``advantages`` also [B, 1]; None where the stack has none.
    ConfigError if the row reads such a column.
    """
    given = {name: column.expand_as(logprobs).flatten() for name, column in columns.items() if column is not None}
    for name in sorted({*columns_read(row), "advantages", "loss_mask"} - given.keys()):
        raise ConfigError(refusal("column_of_stack", stack=stack, row=_name(row), column=name))
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, logprobs.numel() + 1, logprobs.size(-1), device=logprobs.device)
    # A column that the row does not read is theta's own: its ratio is 1.
    unread = dict.fromkeys(("old_logprobs", "rollout_logprobs"), logprobs.detach().flatten())
    columns_of_row: dict[str, Any] = {**unread, **given, "loss_mask": given["loss_mask"].bool()}
    return TokenColumns(logprobs.flatten(), **columns_of_row, cu_seqlens=cu_seqlens.long())


def undivided(row: Objective, columns: TokenColumns, by_token: bool = False) -> Coefficients:
    """Return ``coefficients`` before the division by the tokens or sequences of a step, values [T].

    The division by the tokens of a response ("seq-mean-token-mean") or by ``norm_length`` is made, but not with
    ``by_token``: values are then ``M F S A - P``.
    """
    row = replace(row, aggregation="token-mean", norm_length=None) if by_token else row
    result = coefficients(row, columns, Denominators(_UNIT, _UNIT))
    return replace(result, values=result.values * _UNIT)


def token_losses(values: Tensor, logprobs: Tensor) -> Tensor:
    """Return ``-values * logprobs`` [T]; 0 where the value is 0, also for a logprob of -inf. Both are [T]."""
    return -values.detach() * torch.where(values != 0, logprobs, 0.0)


def row_loss(row: Objective, stack: str, logprobs: Tensor, by_token: bool = False, **columns: Tensor | None) -> Tensor:
    """Return the scalar loss of a micro-batch before the stack's division; logprobs [B, S], errors and others as in
    ``token_columns``."""
    result = undivided(row, token_columns(row, stack, logprobs, **columns), by_token)
    return token_losses(result.values, logprobs.flatten()).sum()


def _name(objective: Objective) -> str:
    return next((repr(name) for name, row in OBJECTIVES.items() if row == objective), "of your own")
