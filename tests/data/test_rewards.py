from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import math_verify as math_verify_package
import numpy as np
import pytest

from megarl.data.judge import load_reward
from megarl.data.rewards import Verdict, exact_match, math_verify, read_verdict
from megarl.errors import ConfigError, describe_call, may_pass


def judge(response: str, answer: str) -> float:
    return math_verify(prompt="", response=response, answer=answer)


def test_exact_match_ignores_outer_blanks_only() -> None:
    assert exact_match(prompt="", response=" 0124\n", answer="0124 ") == 1.0
    assert exact_match(prompt="", response="01 24", answer="0124") == 0.0
    assert exact_match(prompt="", response="124", answer="0124") == 0.0


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        (r"so it is $\frac{1}{2}$", "0.5", 1.0),
        (r"so it is \boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"$x+1$ first, finally \boxed{\frac{2}{4}}", r"$\frac{1}{2}$", 1.0),
        ("the answer is 7", "8", 0.0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
        (r"\boxed{\frac{1}}", "1", 0.0),
        ("", "1", 0.0),
        ("no idea", "1", 0.0),
    ],
)
def test_math_verify_judges_by_value(response: str, answer: str, expected: float) -> None:
    assert judge(response, answer) == expected


def test_math_verify_cannot_read_the_answer() -> None:
    with pytest.raises(ValueError, match="can read no expression in the answer"):
        judge("1", "$ $")


def test_math_verify_out_of_time_says_so_to_the_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.data.rewards.MATH_VERIFY_TIMEOUT_S", 1)
    for response in ("$9^{9^{9}}$", "$9^{9^{9^9}}$"):
        with pytest.raises(TimeoutError, match="more than 1 s"):
            judge(response, "5")
    assert judge("$5$", "5") == 1.0


def test_math_verify_counts_its_own_time_and_not_that_of_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As wrong answers cost a reward, a right one must not become wrong because its process had to wait."""
    monkeypatch.setattr("megarl.data.rewards.MATH_VERIFY_TIMEOUT_S", 1)
    judge("$5$", "5")  # imports
    verify = math_verify_package.verify

    def waits(*args: object, **kwargs: object) -> bool:
        time.sleep(1.5)
        return verify(*args, **kwargs)

    monkeypatch.setattr(math_verify_package, "verify", waits)
    assert judge("$5$", "5") == 1.0


def test_math_verify_outside_the_main_thread_says_so() -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            math_verify(prompt="", response="1", answer="1")
        except ConfigError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    # One error for the run, rather than every response counted as failed.
    assert "main thread" in str(raised[0])


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
    assert load_reward("exact_match") is exact_match
    assert load_reward("math_verify") is math_verify
    assert load_reward("own_rewards:length")(prompt="", response="abc", answer="") == 3


@pytest.mark.usefixtures("rewards_module")
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("exakt_match", "expected exact_match, math_strict, math_verify, reward_model, or package.module:name"),
        ("own_rewards:", "expected exact_match"),
        ("no_such_module:f", "cannot import 'no_such_module'"),
        ("own_broken:f", "a_package_that_is_not_there"),
        ("own_rewards:width", "has nothing named 'width'"),
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
    assert describe_call(ValueError("no"), judge).endswith(f"no ({__file__}:{judge.__code__.co_firstlineno})")
    assert describe_call(ValueError("no"), math_verify) == "ValueError: no"  # one of megarl's own


def test_rewards_load_without_torch() -> None:
    code = "import sys, megarl.data.rewards; sys.exit('torch' in sys.modules or 'math_verify' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0


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
        ({"right": "1", "long": 1.0}, TypeError, "the reward 'right' is '1'"),
    ],
)
def test_other_than_the_named_rewards_is_no_verdict(returned: object, kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        read_verdict(returned, "", {"right": 2.0, "long": -0.5})
