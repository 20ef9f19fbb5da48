"""Arithmetic for a model: one expression in, one number out, in bounded time and memory."""

import ast
import builtins
import math
import operator
from collections.abc import Callable
from typing import Any

from megarl.engines.tools.protocol import ToolResult
from megarl.errors import refuse_if, reworded
from megarl.files.texts import read_table

MAX_LENGTH = 1000
"""Characters of an expression. With MAX_BITS, the length bounds the time to a few milliseconds."""
MAX_BITS = 4096
"""Size of an integer; Python prints up to 14000 bits."""
MAX_DEPTH = 50
"""Levels of nesting; far below the depth of this process's stack."""

Number = int | float

_TABLE = read_table(__file__)
_OPERATORS: dict[type, Callable[..., Any]] = {
    getattr(ast, node): getattr(operator, function) for node, function in _TABLE["operators"].items()
}
_FUNCTIONS: dict[str, tuple[Callable[..., Any], int, int]] = {
    name: (getattr(builtins, name, None) or getattr(math, name), *bounds)
    for name, bounds in _TABLE["functions"].items()
}
"""Function, least and most arguments."""
_CONSTANTS = {"pi": math.pi, "e": math.e}


class CalculatorTool:
    """Evaluates +, -, *, /, //, %, ** and the functions and constants above with Python's meaning.

    Other syntax, too large an integer, and a result that is not a finite real number are errors of the call. The
    expression is parsed and never run as code.
    """

    name = "calculator"

    async def __call__(self, argument: str) -> ToolResult:
        try:
            return ToolResult(str(evaluate(argument)), "ok")
        except (ValueError, ArithmeticError, TypeError) as error:
            return ToolResult(f"error: {error}", "error")


def evaluate(expression: str) -> Number:
    """Return the value of an arithmetic expression.

    ValueError for other syntax and for too large numbers, ArithmeticError for a division by zero or an overflow,
    TypeError for a wrong argument of a function.
    """
    refuse_if(len(expression) > MAX_LENGTH, ValueError, "long_expression", num=len(expression), most=MAX_LENGTH)
    kinds = (SyntaxError, RecursionError, MemoryError)
    with reworded(kinds, ValueError, "this is no arithmetic expression", tell=lambda _: ""):
        tree = ast.parse(expression.strip(), mode="eval")
    return _compute(tree.body, 0)


def _compute(node: ast.expr, depth: int) -> Number:
    refuse_if(depth > MAX_DEPTH, ValueError, "nested_expression", most=MAX_DEPTH)
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _require_small(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_compute(operand, depth + 1))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            a, b = _compute(left, depth + 1), _compute(right, depth + 1)
            # A power can be huge: check the size before the computation. Other results stay near the operands' size.
            if isinstance(op, ast.Pow) and isinstance(a, int) and isinstance(b, int) and abs(a) > 1 and b > 0:
                _check_bits((abs(a).bit_length() - 1) * b)
            return _require_small(_OPERATORS[type(op)](a, b))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            function, min_args, max_args = _FUNCTIONS[name]
            if not min_args <= len(args) <= max_args:
                raise ValueError(f"{name} takes {min_args} to {max_args} numbers, not {len(args)}")
            return _require_small(function(*(_compute(arg, depth + 1) for arg in args)))
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
            raise ValueError(f"{name!r} is not known; known are {', '.join([*_FUNCTIONS, *_CONSTANTS])}")
        case _:
            raise ValueError(f"this is no arithmetic: it holds a {type(node).__name__}")


def _require_small(value: Number) -> Number:
    if isinstance(value, int):
        _check_bits(value.bit_length())
    elif not isinstance(value, float) or not math.isfinite(value):
        raise ValueError(f"the result is {value}, not a finite real number")
    return value


def _check_bits(bits: int) -> None:
    refuse_if(bits > MAX_BITS, ValueError, "long_integer", most=MAX_BITS)
