"""Records changed as a configuration file changes them, and what their fields may hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from megarl.core.choices.parts import Factor, Gate, Mask, Objective, Penalty
from megarl.core.choices.records import describe_options, options_of, override
from megarl.errors import ConfigError

ROW = Objective("grpo", "token-mean", masks=(Mask.ppo(), Mask("old_mu", high=2.0)), factors=(Factor("theta_old"),))


@dataclass(frozen=True)
class Own:
    f: Callable[[int], int] | None


LOADED: list[tuple[str, str]] = []


def load(part: str, name: str) -> Any:
    LOADED.append((part, name))
    return abs


def changed(changes: dict[str, Any]) -> Objective:
    return override(ROW, changes, load)


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
    gated = override(ROW, {"gate": {"kind": "ce_gppo", "positive": 1, "negative": 2, "eps": 0.5}}, load)
    assert override(gated, {"gate": {"positive": 3}}, load).gate == Gate("ce_gppo", 3, 2, 0.5)


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
        ({"masks": {"2": "off"}}, "masks.2: expected a number from 0 to 1, as there are 2$"),
        ({"masks": {"-1": {"high": 1.0}}}, "masks.-1: expected a number"),
        ({"masks": {"first": {"high": 1.0}}}, "masks.first: expected a number"),
        ({"masks": [{"high": 1.0}]}, "^masks.0.policies: missing, expected one of 'theta_old', 'theta_mu', 'old_mu'$"),
        ({"gate": {"kind": "sapo"}}, "^gate.positive: missing, expected a finite number$"),
        ({"gate": "sapo"}, "gate is 'sapo', expected a table of Gate or None"),
        ({"masks": 1}, "masks is 1, expected a list, each a table of Mask or a function$"),
        ({"masks": [1]}, r"masks is \(1,\), expected"),
        ({"masks": [{"policies": "old_mu", "high": 1.0}, 1]}, "masks is .*, expected"),
        ({"penalties": ["mine:f"]}, "penalties is"),
        ({"factors": {"0": {"high": "x"}}}, "high is 'x', expected a finite number or None \\(\"off\"\\)$"),
        ({"factors": {"0": {"high": True}}}, "high is True"),
        ({"factors": {"0": {"power": "off"}}}, "power is None, expected a finite number$"),
        ({"factors": {"0": {"batch_normalize": 1}}}, "batch_normalize is 1, expected true or false"),
        ({"factors": {"0": {"policies": abs}}}, "policies is <built-in"),
        ({"factors": {"0": {"power": float("nan")}}}, "power is nan"),
        ({"factors": {"0": {"power": float("inf")}}}, "power is inf"),
        ({"factors": {"0": {"power": 1e30}}}, "power is 1e\\+30"),
        ({"factors": {"0": {"power": 10**400}}}, "power is 1000"),
        ({"factors": {"0": {"power": -(10**400)}}}, "power is -1000"),
        ({"norm_length": 2**31, "aggregation": "seq-mean-token-sum-norm"}, "norm_length is 2147483648"),
        ({"factors": {"0": {"fn": "mine"}}}, "fn is 'mine', expected one of 'identity', .* or a function$"),
        ({"factors": {"0": {"fn": 1.0}}}, "fn is 1.0"),
        ({"factors": {"0": {"fn": 1}}}, "fn is 1,"),
        ({"factors": {"0": {"vespo_positive": [1, "x"]}}}, "a list, each a finite number$"),
        ({"std_ddof": 1.0}, "std_ddof is 1.0, expected a whole number$"),
        ({"aggregation": "mine:f"}, "aggregation is 'mine:f'"),
        ({"advantage": 3}, "advantage is 3"),
        ({"advantage": ["grpo"]}, r"advantage is \['grpo'\]"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        changed(changes)


def test_a_field_that_is_a_name_of_the_user() -> None:
    assert describe_options((str, type(None))) == 'a name or None ("off")'
    assert options_of(Own) == {"f": (Callable, type(None))}
    assert list(options_of(Penalty)) == ["estimator", "to", "coef", "behaviour", "max"]
