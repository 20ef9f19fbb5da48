"""The record of an objective at the bounds of its numbers: which are allowed, and which are refused."""

from __future__ import annotations

import dataclasses

import pytest

from megarl.core.objectives import OBJECTIVES, Objective
from megarl.errors import ConfigError

NORMED = {"aggregation": "seq-mean-token-sum-norm"}
GAP = {"weight": "none", "cap": None, "gap": "old_mu"}


def variant(name: str, **changes: object) -> Objective:
    return dataclasses.replace(OBJECTIVES[name], **changes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("adaptive_power", {"ess_target": 1.0}),
        ("gspo", {"log_ratio_cap": 0.5}),
        ("gspo", {"log_ratio_cap": 20.0}),
        ("grpo", {"eps_low": 0.0}),
        ("grpo", {"eps_high": 0.0}),
        ("grpo", {"std_eps": 0.0}),
        ("kl_grpo", {"kl_horizon": 1}),
        ("minirl", {**NORMED, "norm_length": 1}),
        ("minirl", {**GAP, "gap_high": 0.5}),
        ("minirl", {**GAP, "gap_mode": "mask", "gap_low": 1.0, "gap_high": 1.0}),
    ],
)
def test_a_value_at_its_bound_is_allowed(name, changes):
    made = variant(name, **changes)
    assert all(getattr(made, part) == value for part, value in changes.items())


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("adaptive_power", {"ess_target": 1.5}, "ess_target is 1.5"),
        ("adaptive_power", {"ess_target": 0.0}, "ess_target is 0.0"),
        ("gspo", {"log_ratio_cap": 0.0}, "log_ratio_cap is 0.0"),
        ("gspo", {"log_ratio_cap": 20.5}, "at most 20.0"),
        ("ctpo", {"window_power": -0.5}, "window_power is -0.5"),
        ("minirl", {**GAP, "gap_high": 0.0}, "must be positive"),
        ("kl_grpo", {"kl_coef": -0.5}, "kl_coef is -0.5"),
        ("kl_grpo", {"kl_horizon": 0}, "kl_horizon is 0"),
        ("minirl", {**NORMED, "norm_length": 0}, "norm_length is 0"),
    ],
)
def test_a_value_beyond_its_bound_is_refused(name, changes, message):
    with pytest.raises(ConfigError, match=message):
        variant(name, **changes)
