"""The records of an objective at the bounds of their numbers: which are allowed, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
from core_batches import variant

from megarl.core.objectives import Factor, Gate, Mask, Penalty
from megarl.errors import ConfigError

NORMED = {"aggregation": "seq-mean-token-sum-norm"}


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (Factor, {"ess_target": 1.0}),
        (Factor, {"log_ratio_cap": 20.0}),
        (Factor, {"low": 1.0, "high": 1.0}),
        (Factor, {"power": 0.0}),
        (Factor, {"high": 0.5}),
        (Factor, {"log_ratio_cap": 0.5, "token_clip": 0.5}),
        (Factor, {"vespo_positive": (0.0, 0.5)}),
        (Mask, {"low": 1.1}),
        (Mask, {"statistic": "tv", "low": 0.05, "high": 0.1, "sign": "outward"}),
        (Mask, {"low": 1.0, "high": 1.0}),
        (Mask, {"statistic": "tv", "low": 0.0, "high": 0.1}),
        (Mask, {"low": 1.0, "high": 1.0, "sign": "outward"}),
    ],
)
def test_a_value_at_its_bound_is_allowed(make: Any, given: dict[str, Any]) -> None:
    made = make("theta_old", **given)
    assert all(getattr(made, part) == value for part, value in given.items())


def test_which_rows_hold_functions_of_the_user() -> None:
    assert not variant("reinforce").own_functions
    assert not variant("minirl").own_functions
    assert variant("minirl", masks=(abs,)).own_functions
    assert variant("grpo", factors=(Factor("theta_old", fn=abs), Factor("old_mu"))).own_functions


def test_a_gate_may_take_the_gradient_away_outside_of_its_window() -> None:
    assert (Gate("ce_gppo", 0.0, 0.5).positive, Gate("ce_gppo", 0.5, 0.0).negative) == (0.0, 0.0)
    assert (Gate("sapo", 0.5, 0.5).negative, Penalty("k3", max=0.5).max) == (0.5, 0.5)


def test_the_least_gate_is_allowed() -> None:
    assert Gate("drpo", 1e-6, 1.0).positive == Gate("sapo", 1.0, 1e-6).negative == 1e-6


def test_one_of_two_bounds_below_0_is_refused() -> None:
    with pytest.raises(ConfigError, match="which is never below 0"):
        Mask("theta_old", low=-0.5, high=0.5)


def test_which_rows_read_columns_that_a_batch_may_lack() -> None:
    assert variant("dppo_topk").needs_topk
    assert not variant("grpo").needs_topk


def test_one_mask_is_enough_to_leave_denominators() -> None:
    assert variant("grpo", masks=(Mask("old_mu", high=1.0, denominator="leave"), Mask.ppo())).leaves
    assert not variant("grpo").leaves


@pytest.mark.parametrize(
    ("name", "changes"),
    [("grpo", {"std_eps": 0.0}), ("kl_grpo", {"kl_horizon": 1}), ("minirl", {**NORMED, "norm_length": 1})],
)
def test_a_value_of_the_row_at_its_bound_is_allowed(name: str, changes: dict[str, Any]) -> None:
    made = variant(name, **changes)
    assert all(getattr(made, part) == value for part, value in changes.items())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Factor("theta_old", ess_target=1.5), "ess_target is 1.5"),
        (lambda: Factor("theta_old", ess_target=0.0), "ess_target is 0.0"),
        (lambda: Factor("theta_old", log_ratio_cap=0.0), "log_ratio_cap is 0.0"),
        (lambda: Factor("theta_old", log_ratio_cap=20.5), "at most 20.0"),
        (lambda: Factor("theta_old", high=0.0), "positive numbers"),
        (lambda: Factor("theta_old", high=float("nan")), "high is nan, expected a finite number"),
        (lambda: Factor("theta_old", high="5"), "high is '5'"),  # type: ignore[arg-type]
        (lambda: Factor("theta_old", high=True), "high is True"),
        (lambda: Factor("theta_old", power=-0.5), "power is -0.5"),
        (lambda: Factor("theta_old", vespo_positive=(1.0,)), "two numbers"),
        (lambda: Factor("theta_old", vespo_negative=(-0.5, 2.0)), "two numbers"),
        (lambda: variant("grpo", kl_at="theta"), "kl_at is 'theta'"),
        (lambda: Factor("theta_old", token_clip=0.0), "token_clip is 0.0"),
        (lambda: Factor("theta_old", "prefix", batch_normalize=True), "batch_normalize needs the scope"),
        (lambda: Factor("theta_old", "sequence_max"), "for masks"),
        (lambda: Mask("theta_old"), "at least one bound"),
        (lambda: Mask("theta_old", low=2.0, high=1.0), "in order"),
        (lambda: Mask("theta_old", high=0.0), "drops every token"),
        (lambda: Mask("theta_mu", low=-0.5, sign="negative"), "never below 0; bounds of a logarithm need"),
        (lambda: Mask("theta_mu", "tv", high=-0.1), "'tv', which is never below 0"),
        (lambda: Mask("theta_old", low=1.1, sign="outward"), "needs 1 between"),
        (lambda: Mask("theta_old", "log_ratio", high=-0.1, sign="outward"), "needs 0 between"),
        (lambda: Mask("theta_old", "log_ratio", high=1.0, growth=-0.5), "growth -0.5"),
        (lambda: Mask("theta_old", high=1.5, growth=0.5), "bounds grow with 'log_ratio' only"),
        (lambda: Mask("theta_old", scope="sequence_max", high=1.5), "for divergences"),
        (lambda: Mask("theta_old", "topk_tv", high=0.1), "compares theta with mu"),
        (lambda: Gate("drpo", 0.0, 1.0), "expected above 0"),
        (lambda: Gate("drpo", 1.0, 9e-7), "at least 1e-06"),
        (lambda: Gate("ce_gppo", 1e30, 1.0), "positive is 1e\\+30, expected a finite number"),
        (lambda: Gate("sapo", 1.0, 0.0), "expected above 0"),
        (lambda: Gate("ce_gppo", 1.0, 0.5, 1.0), "eps between 0 and 1"),
        (lambda: Gate("ce_gppo", 1.0, 0.5, 0.0), "eps between 0 and 1"),
        (lambda: Gate("ce_gppo", -0.5, 0.5), "expected 0 or more"),
        (lambda: Gate("ce_gppo", 0.5, -0.5), "expected 0 or more"),
        (lambda: Penalty("k3", coef=-0.1), "coef -0.1"),
        (lambda: Penalty("k3", max=0.0), "max 0.0"),
        (lambda: variant("minirl", factors=(Factor("theta_old"), Factor("theta_mu"))), "twice"),
        (lambda: variant("minirl", factors=(Factor("theta_mu"), Factor("old_mu"))), "twice"),
        (lambda: variant("grpo", prefix_grad=True), "prefix_grad is the derivative"),
        (
            lambda: variant("ctpo", prefix_grad=True, factors=(Factor("theta_old", "prefix", token_clip=0.4),)),
            "prefix_grad is the derivative",
        ),
        (lambda: variant("kl_grpo", penalties=(Penalty("k3"),)), "expected no penalties"),
        (lambda: variant("kl_grpo", kl_coef=-0.5), "kl_coef is -0.5"),
        (lambda: variant("kl_grpo", kl_horizon=0), "kl_horizon is 0"),
        (lambda: variant("grpo", kl_horizon=8), "kl_horizon is 8"),
        (lambda: variant("grpo", kl_coef=0.1), "kl_coef is 0.1"),
        (lambda: variant("grpo", std_ddof=2), "std_ddof 2"),
        (lambda: variant("grpo", entropy_coef=-0.1), "entropy_coef is -0.1"),
        (lambda: variant("minirl", **NORMED, norm_length=0), "norm_length is 0"),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
