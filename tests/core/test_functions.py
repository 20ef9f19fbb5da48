"""Objectives that are functions, against the rows of the table that compute the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from core_batches import random_columns

from megarl.core.metrics import Stat, finalize
from megarl.core.objectives import (
    OBJECTIVES,
    Coefficients,
    Denominators,
    Factor,
    Objective,
    Penalty,
    TokenColumns,
    advantages_of,
    coefficients,
    select_responses,
    try_functions,
)
from megarl.core.objectives.functions import function_coefficients
from megarl.errors import ConfigError, NumericsError

PLAIN = replace(OBJECTIVES["minirl"], masks=(), factors=())


def weigh(columns: TokenColumns) -> torch.Tensor:
    return (columns.logprobs - columns.rollout_logprobs).exp() * columns.advantages


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("kl", [{}, {"penalties": (Penalty("k3", coef=0.1),)}])
def test_a_function_gives_what_the_same_row_gives(aggregation: Any, kl: dict[str, Any]) -> None:
    columns = random_columns(0, [3, 7, 1, 5])
    denominators = Denominators(40, 9)
    row = replace(PLAIN, factors=(Factor("theta_mu"),), aggregation=aggregation, **kl)
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
    with pytest.raises(NumericsError, match=r"returned nan at token 0 of 4 \(4 such tokens"):
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


GRPO = OBJECTIVES["grpo"]


def own_mask(columns: TokenColumns) -> torch.Tensor:
    return columns.old_logprobs > columns.rollout_logprobs


def test_own_parts_stand_where_those_of_the_table_stand() -> None:
    """By hand: M W A / D, with a mask and a weight of the user's."""
    columns = random_columns(8, [3, 6, 2])
    row = replace(
        GRPO,
        factors=(Factor("theta_old", fn=lambda ratios: ratios.square()),),
        masks=(own_mask,),
        aggregation="token-mean",
    )
    ratio = (columns.logprobs - columns.old_logprobs).exp()
    trains = columns.loss_mask & own_mask(columns)
    expected = torch.where(trains, ratio.square() * columns.advantages, 0.0) / columns.loss_mask.sum()
    found = coefficients(row, columns)
    assert torch.allclose(found.values, expected, rtol=1e-12)
    dropped = (columns.loss_mask & ~trains).sum() / columns.loss_mask.sum()
    assert finalize(found.metrics)["clip/own"] == pytest.approx(float(dropped))


def test_an_own_advantage_is_that_of_every_caller() -> None:
    rewards, groups = [3.0, 1.0, 5.0, 5.0], [1, 1, 0, 0]
    row = replace(GRPO, advantage=lambda given, ids: given - 2.0 * ids, selection="positive")
    assert advantages_of(row, rewards, groups).tolist() == [1.0, 0.0, 5.0, 5.0]
    assert select_responses(row, rewards, groups).tolist() == [True, False, True, True]


def test_a_mask_cannot_change_the_batch_and_sees_only_what_may_train() -> None:
    columns = random_columns(9, [4, 3], masked=0.0)
    columns.rollout_logprobs[2] = -torch.inf
    seen = []

    def own(given: TokenColumns) -> torch.Tensor:
        seen.append(given.loss_mask.clone())
        given.advantages.zero_()
        return given.loss_mask.logical_not_().logical_not_()

    found = coefficients(replace(GRPO, masks=(own,)), columns)
    assert seen[0].tolist() == [True, True, False, True, True, True, True]
    assert torch.equal(found.values, coefficients(replace(GRPO, masks=()), columns).values)


def with_parts(**functions: Any) -> Objective:
    """GRPO with own functions: advantage, mask and fn."""
    row = replace(GRPO, advantage=functions["advantage"]) if "advantage" in functions else GRPO
    row = replace(row, masks=(functions["mask"],)) if "mask" in functions else row
    return replace(row, factors=(Factor("theta_old", fn=functions["fn"]),)) if "fn" in functions else row


WRONG: dict[str, Any] = {
    "raised ValueError: no": lambda like: raise_it(),
    "returned float": lambda like: 1.0,
    r"returned torch.\w+ \[1\] on cpu": lambda like: like[:1],
    r"returned torch.int64 \[\d\] on cpu": lambda like: like.long(),
    r"returned torch.\w+ \[\d\] on meta": lambda like: like.to("meta"),
}


def raise_it() -> None:
    raise ValueError("no")


@pytest.mark.parametrize(
    ("part", "told"),
    [
        *((part, told) for part in ("fn", "advantage", "mask") for told in WRONG),
        *((part, "returned nan") for part in ("fn", "advantage")),
    ],
)
def test_a_wrong_part_is_refused_before_the_run(part: str, told: str) -> None:
    def own(given: Any, *rest: Any) -> Any:
        like = given.loss_mask if part == "mask" else given
        return like * torch.nan if told == "returned nan" else WRONG[told](like)

    then = r", expected one (float|bool) for each (token|response), \[\d\] on cpu"
    if "raised" in told:
        then = r" \(.*test_functions.py:\d+\)"
    elif told == "returned nan":
        then = r" at (token|response) \d of \d \(\d such .* that train\), expected finite numbers"
    expected = f"{part}: the function test_functions:.*own {told}.*{then}"
    with pytest.raises((ConfigError, NumericsError), match=expected):
        try_functions(with_parts(**{part: own}), None, "cpu")
