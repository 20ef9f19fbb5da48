from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megarl.data.judge import load_reward
from megarl.data.rewards import Verdict, math_strict, read_verdict
from megarl.errors import ConfigError, describe_call, may_pass


def own(*, prompt: str, response: str, answer: str) -> float:
    return 1.0


@pytest.fixture
def rewards_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards.py").write_text(
        "LIMIT = 3\n"
        "def length(*, prompt, response, answer):\n    return len(response)\n"
        "def positional(text):\n    return 1.0\n"
    )
    (tmp_path / "own_broken.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("rewards_module")
def test_load_reward_finds_functions() -> None:
    assert load_reward("math_strict") is math_strict
    assert load_reward("own_rewards:length")(prompt="", response="abc", answer="") == 3
    right = load_reward("exact_match")  # which ignores outer blanks only
    assert [right(prompt="", response=text, answer="0124 ") for text in (" 0124\n", "01 24", "124")] == [1.0, 0.0, 0.0]


@pytest.mark.usefixtures("rewards_module")
@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "exakt_match",
            "expected exact_match, math_strict, reward_model or package.module:name; did you mean exact_match?",
        ),
        ("no_such_module:f", "cannot import 'no_such_module'"),
        ("own_broken:f", "a_package_that_is_not_there"),
        ("own_rewards:LIMIT", "found int at 'own_rewards:LIMIT', expected a function (*, prompt"),
        ("own_rewards:positional", "has the parameters (text)"),
    ],
)
def test_load_reward_tells_what_is_wrong_in_one_line(name: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_reward(name)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_line_of_an_error_is_the_users_and_not_that_of_a_library() -> None:
    for call in (lambda: json.loads("{x"), lambda: np.linalg.inv(np.zeros((2, 2)))):
        with pytest.raises(ValueError, match=r"Expecting|Singular") as raised:
            call()
        line = call.__code__.co_firstlineno
        assert describe_call(raised.value).endswith(f" ({__file__}:{line})")
        assert not may_pass(raised.value)
    assert describe_call(ValueError("no"), own).endswith(f"no ({__file__}:{own.__code__.co_firstlineno})")
    assert describe_call(ValueError("no"), math_strict) == "ValueError: no"  # one of megarl's own


def test_several_rewards_are_weighed_in_the_order_of_the_configuration() -> None:
    weights = {"right": 2.0, "long": -0.5}
    verdict = read_verdict({"long": 1, "right": np.float32(0.5)}, "", weights)
    assert verdict == Verdict(0.5, components=(0.5, 1.0))
    assert read_verdict(0.25, "", {}) == read_verdict(0.25, "") == Verdict(0.25)


@pytest.mark.parametrize(
    ("returned", "kind", "told"),
    [
        (0.5, TypeError, r"returned 0\.5 \(float\), expected rewards by name: \['right', 'long'\]"),
        ({"right": 1.0}, ValueError, r"returned \['right'\], expected those of reward\.weights: \['right', 'long'\]"),
        ({"right": 1.0, "long": 1.0, "odd": 1.0}, ValueError, "odd"),
        ({"right": 1.0, "long": float("nan")}, ValueError, "the reward 'long' is nan, expected a finite number"),
        ({"right": 1e308, "long": 1.0}, ValueError, "the weighted sum of rewards is inf, expected a finite number"),
    ],
)
def test_other_than_the_named_rewards_is_no_verdict(returned: object, kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        read_verdict(returned, "", {"right": 2.0, "long": -0.5})
