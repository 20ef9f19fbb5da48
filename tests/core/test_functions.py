"""Objectives that are functions, against the rows of the table that compute the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from core_batches import random_columns

from megarl.core.metrics import Stat, finalize
from megarl.core.objectives import OBJECTIVES, Coefficients, Denominators, TokenColumns, coefficients
from megarl.core.objectives.functions import function_coefficients
from megarl.errors import ConfigError, NumericsError

PLAIN = replace(OBJECTIVES["minirl"], weight="none", mask="none", cap=None)


def weigh(columns: TokenColumns) -> torch.Tensor:
    return (columns.logprobs - columns.rollout_logprobs).exp() * columns.advantages


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("kl", [{}, {"kl": "k3", "kl_coef": 0.1}])
def test_a_function_gives_what_the_same_row_gives(aggregation: Any, kl: dict[str, Any]) -> None:
    columns = random_columns(0, [3, 7, 1, 5])
    denominators = Denominators(40, 9)
    row = replace(PLAIN, weight="theta_mu", aggregation=aggregation, **kl)
    found = function_coefficients(weigh, replace(PLAIN, aggregation=aggregation, **kl), columns, denominators)
    assert torch.equal(found.values, coefficients(row, columns, denominators).values)


def test_metrics_of_the_function_are_added_and_it_sees_no_gradient() -> None:
    columns = random_columns(1, [4, 4])
    columns = replace(columns, logprobs=columns.logprobs.requires_grad_())

    def own(given: TokenColumns) -> Coefficients:
        values = weigh(given)
        assert not values.requires_grad
        return Coefficients(values, {"own": Stat.total(2.0)})

    found = function_coefficients(own, PLAIN, columns)
    assert "own" in found.metrics
    assert "loss_tokens" in found.metrics


def test_tokens_that_do_not_train_may_hold_anything() -> None:
    columns = random_columns(2, [6, 3])
    columns.rollout_logprobs[int(columns.loss_mask.nonzero()[0])] = -torch.inf
    found = function_coefficients(weigh, PLAIN, columns)
    wild = function_coefficients(lambda given: torch.where(given.loss_mask, weigh(given), torch.nan), PLAIN, columns)
    assert torch.equal(found.values, wild.values)
    assert bool(torch.isfinite(found.values).all())


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda columns: 1.0, "returned float, expected one float for each token, \\[5\\]"),
        (lambda columns: columns.advantages[:2], "returned torch.float64 \\[2\\]"),
        (lambda columns: columns.loss_mask, "returned torch.bool"),
    ],
)
def test_a_result_of_another_form_is_refused(function: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        function_coefficients(function, PLAIN, random_columns(3, [2, 3]))


def test_a_result_that_is_not_finite_is_refused() -> None:
    columns = random_columns(4, [4], masked=0.0)
    with pytest.raises(NumericsError, match=r"returned nan at token 0 of the packed batch \(4 such tokens"):
        function_coefficients(lambda given: given.advantages * torch.nan, PLAIN, columns)


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(7)])
def test_a_function_that_raises_is_named_with_its_line(error: BaseException) -> None:
    def own(columns: TokenColumns) -> torch.Tensor:
        raise error

    with pytest.raises(ConfigError, match=rf"raised {type(error).__name__}.*test_functions.py:\d+"):
        function_coefficients(own, PLAIN, random_columns(5, [3]))


def test_a_function_cannot_change_the_batch() -> None:
    columns = random_columns(6, [3, 2])
    before = columns.logprobs.clone()

    def own(given: TokenColumns) -> torch.Tensor:
        given.logprobs.sub_(3.0)
        given.loss_mask.logical_not_()
        return given.advantages.mul_(2.0)

    found = function_coefficients(own, PLAIN, columns)
    assert torch.equal(columns.logprobs, before)
    assert torch.equal(found.values, function_coefficients(lambda given: 2.0 * given.advantages, PLAIN, columns).values)


def test_metrics_of_the_function_are_checked_and_hide_none_of_ours() -> None:
    columns = random_columns(7, [3])
    with pytest.raises(ConfigError, match="metrics"):
        function_coefficients(lambda given: Coefficients(weigh(given), {"x": 3.0}), PLAIN, columns)  # type: ignore[dict-item]
    mine = {"loss_tokens": Stat.total(-5.0)}
    found = function_coefficients(lambda given: Coefficients(weigh(given), mine), PLAIN, columns)
    ours = function_coefficients(weigh, PLAIN, columns)
    assert finalize(found.metrics)["loss_tokens"] == finalize(ours.metrics)["loss_tokens"]
