"""The calculator computes, and refuses what is no arithmetic or takes too long."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from megarl.engines.tools.calculator import MAX_BITS, MAX_LENGTH, CalculatorTool, evaluate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(1 + 2) * 3", 9),
        ("-7 % 3", 2),
        ("2 ** 3 ** 2", 512),
        ("sqrt(2) * sqrt(2)", math.sqrt(2) ** 2),
        ("log(8, 2)", 3.0),
        ("gcd(12, 18)", 6),
        ("floor(-1.5) + ceil(1.2) + round(2.6)", 3),
    ],
)
def test_arithmetic(expression: str, value: float) -> None:
    found = evaluate(expression)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "(-9)**(9**9)",
        f"2 ** {MAX_BITS}",
        "*".join(["(10**1000)"] * 90),
        "9" * (MAX_LENGTH + 1),
        "(" * 500 + "1" + ")" * 499,
        "round(5, -10**9)",
    ],
)
def test_what_would_take_for_ever_or_all_memory_is_refused_at_once(expression: str) -> None:
    start = time.process_time()
    result = asyncio.run(CalculatorTool()(expression))
    assert result.exit == "error"
    assert len(result.output) < 500
    assert time.process_time() - start < 10.0


def test_the_largest_integer_is_still_computed_and_printed() -> None:
    result = asyncio.run(CalculatorTool()(f"2 ** {MAX_BITS - 1}"))
    assert (result.output, result.exit) == (str(2 ** (MAX_BITS - 1)), "ok")


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 / 0", "division by zero"),
        ("(-8) ** 0.5", "not a finite real number"),
        ("2 ^ 3", "holds a BinOp"),
        ("x + 1", "'x' is not known"),
        ("__import__('os').system('true')", "holds a Call"),
        ("'a' * 3", "holds a Constant"),
        ("[1 for _ in range(9)]", "holds a ListComp"),
        ("", "no arithmetic"),
    ],
)
def test_what_is_wrong_is_told(expression: str, message: str) -> None:
    result = asyncio.run(CalculatorTool()(expression))
    assert result.exit == "error"
    assert message in result.output
