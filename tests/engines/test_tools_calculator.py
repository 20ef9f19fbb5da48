"""The calculator computes, and refuses what is no arithmetic or takes too long."""

from __future__ import annotations

import asyncio
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.engines.tools.calculator import MAX_BITS, MAX_LENGTH, CalculatorTool, evaluate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        (" -7 // 2 ", -4),
        ("-7 % 3", 2),
        ("7 / 2", 3.5),
        ("2 ** -2", 0.25),
        ("2 ** 3 ** 2", 512),
        ("10 ** 20 + 1", 10**20 + 1),
        ("sqrt(2) * sqrt(2)", math.sqrt(2) ** 2),
        ("log(8, 2)", 3.0),
        ("max(1, 2.5, -3)", 2.5),
        ("gcd(12, 18)", 6),
        ("floor(-1.5) + ceil(1.2) + round(2.6)", 3),
        ("cos(pi)", -1.0),
    ],
)
def test_arithmetic(expression: str, value: float) -> None:
    found = evaluate(expression)
    assert found == value
    assert type(found) is type(value)


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9), st.sampled_from("+-*"))
def test_it_agrees_with_integers(left: int, right: int, sign: str) -> None:
    assert evaluate(f"({left}) {sign} ({right})") == {"+": left + right, "-": left - right, "*": left * right}[sign]


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "9**9**9**9",
        "(-9)**(9**9)",
        "10**(10**9) % 7",
        "1 ** (2 ** 4097)",
        f"2 ** {MAX_BITS}",
        "*".join(["(10**1000)"] * 90),
        "9" * (MAX_LENGTH + 1),
        "(" * 500 + "1" + ")" * 499,
        "-" * 900 + "1",
        "1" + ".a" * 400,
        "f" * 3 + "(" * 150 + ")" * 150,
        "round(5, -10**9)",
        "exp(10**9)",
        "1e308 * 10",
        "10**4000 / 3",
    ],
)
def test_what_would_take_for_ever_or_all_memory_is_refused_at_once(expression: str) -> None:
    start = time.process_time()
    result = asyncio.run(CalculatorTool()(expression))
    assert result.exit == "error"
    assert len(result.output) < 500
    assert time.process_time() - start < 1.0


def test_the_largest_integer_is_still_computed_and_printed() -> None:
    result = asyncio.run(CalculatorTool()(f"2 ** {MAX_BITS - 1}"))
    assert (result.output, result.exit) == (str(2 ** (MAX_BITS - 1)), "ok")


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 / 0", "division by zero"),
        ("(-8) ** 0.5", "not a finite real number"),
        ("sqrt(-1)", "domain"),
        ("2 ^ 3", "**"),
        ("x + 1", "'x' is not known"),
        ("__import__('os').system('true')", "holds a Call"),
        ("().__class__", "holds a Attribute"),
        ("'a' * 3", "holds a Constant"),
        ("True + 1", "holds a Constant"),
        ("1j * 1j", "holds a Constant"),
        ("[1 for _ in range(9)]", "holds a ListComp"),
        ("1 if 1 else 2", "holds a IfExp"),
        ("max(1)", "takes 2"),
        ("log(x=1)", "not known"),
        ("1 +", "no arithmetic"),
        ("1; 2", "no arithmetic"),
        ("1\0", "no arithmetic"),
        ("", "no arithmetic"),
        ("gcd(1.5, 2)", "integer"),
    ],
)
def test_what_is_wrong_is_told(expression: str, message: str) -> None:
    result = asyncio.run(CalculatorTool()(expression))
    assert result.exit == "error"
    assert message in result.output
