"""The records of an objective: numbers at their bounds, and changes as a configuration file makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from core_batches import variant

from megarl.core.choices.parts import Factor, Gate, Mask, Objective, Penalty
from megarl.core.choices.records import describe_options, make, options_of
from megarl.errors import ConfigError

NORMED = {"aggregation": "seq-mean-token-sum-norm"}


@pytest.mark.parametrize(
    ("make", "given"),
    [
        ("theta_old", {"ess_target": 1.0, "log_ratio_cap": 20.0, "low": 1.0, "high": 1.0, "power": 0.0}),
        ("theta_old", {"log_ratio_cap": 0.5, "token_clip": 0.5, "high": 0.5, "vespo_positive": (0.0, 0.5)}),
        (Mask, {"low": 1.1}),
        (Mask, {"statistic": "tv", "low": 0.05, "high": 0.1, "sign": "outward"}),
        (Mask, {"low": 1.0, "high": 1.0}),
        (Mask, {"statistic": "tv", "low": 0.0, "high": 0.1}),
        (Mask, {"statistic": "tv", "scope": "prefix_budget", "high": 0.1, "budget": 0.0, "last_weight": 1.0}),
        (Mask, {"statistic": "tv", "scope": "sequence_max", "low": 0.1, "strict": True}),
        (Mask, {"low": 1.0, "high": 1.0, "sign": "outward"}),
        (Gate, {"kind": "ce_gppo", "positive": 0.0, "negative": 0.5}),
        (Gate, {"kind": "ce_gppo", "positive": 0.5, "negative": 0.0}),
        (Gate, {"kind": "sapo", "positive": 0.5, "negative": 1e-6}),
        (Gate, {"kind": "drpo", "positive": 1e-6, "negative": 1.0}),
        (Penalty, {"estimator": "k3", "max": 0.5}),
        ("grpo", {"std_eps": 0.0}),
        ("kl_grpo", {"kl_horizon": 1, "prefix_grad": True}),
        ("minirl", {**NORMED, "norm_length": 1}),
    ],
)
def test_a_value_at_its_bound_is_allowed(make: Any, given: dict[str, Any]) -> None:
    made = made_of(make, given)
    assert all(getattr(made, part) == value for part, value in given.items())


def made_of(make: Any, given: dict[str, Any]) -> Any:
    """A factor, another record, or a changed row of this name."""
    if make == "theta_old":
        return Factor("theta_old", **given)
    if make is Mask:
        return Mask("theta_old", **given)
    return variant(make, **given) if isinstance(make, str) else make(**given)


def test_what_a_row_says_of_itself() -> None:
    assert variant("kl_grpo").needs_ref_logprobs
    assert variant("dppo_topk").needs_topk
    assert not variant("grpo").needs_topk
    assert variant("grpo", masks=(Mask("old_mu", high=1.0, denominator="leave"), Mask.ppo())).leaves
    assert not variant("grpo").leaves
    assert not variant("reinforce").own_functions
    assert not variant("minirl").own_functions
    assert variant("minirl", masks=(abs,)).own_functions
    assert variant("grpo", factors=(Factor("theta_old", fn=abs), Factor("old_mu"))).own_functions


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
        (lambda: Factor("theta_old", "prefix_budget"), "for masks"),
        (lambda: Factor("theta_old", "batch_mean"), "for masks"),
        (lambda: Mask("theta_old"), "at least one bound"),
        (lambda: Mask("theta_old", low=-0.5, high=0.5), "which is never below 0"),
        (lambda: Mask("theta_old", low=2.0, high=1.0), "in order"),
        (lambda: Mask("theta_old", high=0.0), "drops every token"),
        (lambda: Mask("theta_mu", low=-0.5, sign="negative"), "never below 0; bounds of a logarithm need"),
        (lambda: Mask("theta_mu", "tv", high=-0.1), "'tv', which is never below 0"),
        (lambda: Mask("theta_old", low=1.1, sign="outward"), "needs 1 between"),
        (lambda: Mask("theta_old", "log_ratio", high=-0.1, sign="outward"), "needs 0 between"),
        (lambda: Mask("theta_old", "log_ratio", high=1.0, growth=-0.5), "growth -0.5"),
        (lambda: Mask("theta_old", high=1.5, growth=0.5), "bounds grow with 'log_ratio' only"),
        (lambda: Mask("theta_old", scope="sequence_max", high=1.5), "for divergences"),
        (lambda: Mask("theta_old", "difference", "batch_mean", high=0.5), "'batch_mean' is for divergences"),
        (lambda: Mask("theta_mu", "k2", "batch_mean", low=0.5), "takes 'high' alone"),
        (lambda: Mask("theta_mu", "k2", "batch_mean", low=0.1, high=0.5), "takes 'high' alone"),
        (lambda: Mask("theta_mu", "tv", "prefix_budget", high=0.5, strict=True), "takes 'high' alone"),
        (lambda: Mask("theta_mu", "tv", high=0.5, budget=-0.1), "budget -0.1"),
        (lambda: Mask("theta_mu", "tv", high=0.5, last_weight=0.0), "last_weight 0.0"),
        (lambda: Mask("theta_mu", "tv", high=0.5, last_weight=1.5), "last_weight 1.5"),
        (lambda: Mask("theta_old", "topk_tv", high=0.1), "compares theta with mu"),
        (lambda: Gate("drpo", 0.0, 1.0), "expected at least 1e-06"),
        (lambda: Gate("drpo", 1.0, 9e-7), "at least 1e-06"),
        (lambda: Gate("ce_gppo", 1e30, 1.0), "positive is 1e\\+30, expected a finite number"),
        (lambda: Gate("sapo", 1.0, 0.0), "expected at least 1e-06"),
        (lambda: Gate("ce_gppo", 1.0, 0.5, 1.0), "eps between 0 and 1"),
        (lambda: Gate("ce_gppo", 1.0, 0.5, 0.0), "eps between 0 and 1"),
        (lambda: Gate("ce_gppo", -0.5, 0.5), "expected at least 0,"),
        (lambda: Gate("ce_gppo", 0.5, -0.5), "expected at least 0,"),
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


ROW = Objective("grpo", "token-mean", masks=(Mask.ppo(), Mask("old_mu", high=2.0)), factors=(Factor("theta_old"),))


@dataclass(frozen=True)
class Own:
    f: Callable[[int], int] | None


LOADED: list[tuple[str, str]] = []


def load(part: str, name: str) -> Any:
    LOADED.append((part, name))
    return abs


def changed(changes: dict[str, Any]) -> Objective:
    return make(Objective, changes, ROW, load)


@pytest.mark.parametrize(
    ("changes", "part", "expected"),
    [
        ({}, "masks", ROW.masks),
        ({"std_ddof": 0}, "std_ddof", 0),
        ({"std_eps": 1}, "std_eps", 1),
        ({"masks": {"0": {"high": 1.28}}}, "masks", (Mask.ppo(high=1.28), ROW.masks[1])),
        ({"masks": {1: {"low": 0.5}}}, "masks", (ROW.masks[0], Mask("old_mu", low=0.5, high=2.0))),
        ({"masks": {"1": {"high": "off", "low": 0.5}}}, "masks", (ROW.masks[0], Mask("old_mu", low=0.5))),
        (
            {"masks": {"2": {"policies": "theta_mu", "high": 3.0}}},
            "masks",
            (*ROW.masks, Mask("theta_mu", high=3.0)),
        ),
        ({"masks": "off"}, "masks", ()),
        ({"masks": {"0": "off"}}, "masks", (ROW.masks[1],)),
        ({"masks": ["mine:f", {"policies": "theta_mu", "low": 0.5}]}, "masks", (abs, Mask("theta_mu", low=0.5))),
        ({"masks": {"0": "mine:f"}}, "masks", (abs, ROW.masks[1])),
        ({"masks": (Mask.ppo(),)}, "masks", (Mask.ppo(),)),
        ({"factors": [{"policies": "theta_mu", "high": 2.0}]}, "factors", (Factor("theta_mu", high=2.0),)),
        ({"factors": {"0": {"fn": "mine:f"}}}, "factors", (Factor("theta_old", fn=abs),)),
        ({"factors": {"0": {"vespo_positive": [1, 2.5]}}}, "factors", (Factor("theta_old", vespo_positive=(1, 2.5)),)),
        ({"penalties": {"0": {"estimator": "k3"}}}, "penalties", (Penalty("k3"),)),
        ({"gate": {"kind": "sapo", "positive": 1, "negative": 2}}, "gate", Gate("sapo", 1, 2)),
        ({"gate": "off"}, "gate", None),
        ({"std_eps": 9e29}, "std_eps", 9e29),
        ({"advantage": "mine:f"}, "advantage", abs),
    ],
)
def test_what_a_file_may_say(changes: dict[str, Any], part: str, expected: Any) -> None:
    assert getattr(changed(changes), part) == expected


def test_a_record_in_a_record_keeps_its_other_fields() -> None:
    gated = make(Objective, {"gate": {"kind": "ce_gppo", "positive": 1, "negative": 2, "eps": 0.5}}, ROW, load)
    assert make(Objective, {"gate": {"positive": 3}}, gated, load).gate == Gate("ce_gppo", 3, 2, 0.5)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"masks": ["mine:f"]}, "mask"),
        ({"masks": {"0": "mine:f"}}, "mask"),
        ({"factors": {"0": {"fn": "mine:f"}}}, "fn"),
        ({"advantage": "mine:f"}, "advantage"),
    ],
)
def test_functions_are_loaded_by_the_name_of_their_part(changes: dict[str, Any], part: str) -> None:
    LOADED.clear()
    changed(changes)
    assert [(part, "mine:f")] == LOADED


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": 1}, "^mask: unknown part; did you mean masks\\?$"),
        ({"qqqq": 1}, "qqqq: unknown part; did you mean advantage or aggregation or masks"),
        ({"kl_coe": 1}, "did you mean kl_coef\\?$"),
        ({"kl_cat": 1}, "did you mean kl_at\\?$"),
        ({"masks": {"0": {"hihg": 1}}}, "^masks.0.hihg: unknown part; did you mean high\\?$"),
        ({"masks": {"3": {"high": 1.0}}}, "masks.3: expected a number from 0 to 2"),
        ({"masks": {"2": "off"}}, "masks.2: expected a number from 0 to 1, of 2 there$"),
        ({"masks": {"-1": {"high": 1.0}}}, "masks.-1: expected a number"),
        ({"masks": {"first": {"high": 1.0}}}, "masks.first: expected a number"),
        ({"masks": [{"high": 1.0}]}, "^masks.0.policies: missing, expected 'theta_old' or 'theta_mu' or 'old_mu'$"),
        ({"gate": {"kind": "sapo"}}, "^gate.positive: missing, expected a finite number$"),
        ({"gate": "sapo"}, "gate is 'sapo', expected Gate or None"),
        ({"masks": 1}, "masks is 1, expected a list$"),
        ({"masks": [1]}, r"masks is \(1,\), expected"),
        ({"masks": [{"policies": "old_mu", "high": 1.0}, 1]}, "masks is .*, expected"),
        ({"penalties": ["mine:f"]}, "penalties is"),
        ({"factors": {"0": {"high": "x"}}}, "high is 'x', expected a finite number or None \\(\"off\"\\)$"),
        ({"factors": {"0": {"high": True}}}, "high is True"),
        ({"factors": {"0": {"power": "off"}}}, "power is None, expected a finite number$"),
        ({"factors": {"0": {"batch_normalize": 1}}}, "batch_normalize is 1, expected bool"),
        ({"factors": {"0": {"policies": abs}}}, "policies is <built-in"),
        ({"factors": {"0": {"power": float("nan")}}}, "power is nan"),
        ({"factors": {"0": {"power": float("inf")}}}, "power is inf"),
        ({"factors": {"0": {"power": 1e30}}}, "power is 1e\\+30"),
        ({"factors": {"0": {"power": 10**400}}}, "power is 1000"),
        ({"factors": {"0": {"power": -(10**400)}}}, "power is -1000"),
        ({"norm_length": 2**31, "aggregation": "seq-mean-token-sum-norm"}, "norm_length is 2147483648"),
        ({"factors": {"0": {"fn": "mine"}}}, "fn is 'mine', expected 'identity' or .* or Callable$"),
        ({"factors": {"0": {"fn": 1.0}}}, "fn is 1.0"),
        ({"factors": {"0": {"fn": 1}}}, "fn is 1,"),
        ({"factors": {"0": {"vespo_positive": [1, "x"]}}}, "expected a list$"),
        ({"std_ddof": 1.0}, "std_ddof is 1.0, expected int$"),
        ({"aggregation": "mine:f"}, "aggregation is 'mine:f'"),
        ({"advantage": 3}, "advantage is 3"),
        ({"advantage": ["grpo"]}, r"advantage is \['grpo'\]"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        changed(changes)


def test_a_field_that_is_a_name_of_the_user() -> None:
    assert describe_options((str, type(None))) == 'str or None ("off")'
    assert options_of(Own) == {"f": (Callable, type(None))}
    assert list(options_of(Penalty)) == ["estimator", "to", "coef", "behaviour", "max"]
