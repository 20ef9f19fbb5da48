"""Values of the grammar of math_strict: with a name and a unit; lists, relations, and equality."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sympy import Float, N, Symbol

from megarl.data.math.text import UnreadableError

_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_POINTS = 12
_TOLERANCE = Float(10, 60) ** -40


@dataclass(frozen=True, slots=True)
class Collection:
    kind: str
    """The brackets; "{}" has no order; "matrix" of rows of kind "row"; "union"."""
    items: tuple["Item", ...]


@dataclass(frozen=True, slots=True)
class Relation:
    kind: str
    difference: Any
    """Left side minus right side; the right side is the larger side."""


@dataclass(frozen=True, slots=True)
class Item:
    value: Any
    """An expression of sympy, a Collection or a Relation."""
    name: str = ""
    """The variable with the value: x in x = 5."""
    unit: str = ""
    """Including a currency, percent or degree sign."""


def require_number(value: Any) -> Any:
    """Return an expression. UnreadableError for a list or a relation."""
    if isinstance(value, Collection | Relation):
        raise UnreadableError("a list in a formula")
    return value


def relate(sides: Sequence[Any], relations: Sequence[str]) -> Item:
    """Return a value with a name, an interval, or a relation of two expressions. UnreadableError for a chain."""
    if not relations:
        return Item(sides[0])
    if relations[0] in (">", r"\ge"):
        sides, relations = sides[::-1], [_FLIPPED.get(relation, relation) for relation in relations[::-1]]
    if len(relations) == 2 and {*relations} <= {"<", r"\le"} and (name := _symbol(sides[1])):
        return Item(_interval(sides[0], relations[0], sides[2], relations[1]), name)
    if len(relations) != 1:
        raise UnreadableError("a chain of relations")
    relation, (left, right) = relations[0], sides
    if relation in ("=", r"\equiv") and not _symbol(left):
        left, right = right, left
    symbols = set() if isinstance(right, Collection) else right.free_symbols
    if relation in ("=", r"\equiv", r"\in") and (name := _symbol(left)) and name not in map(str, symbols):
        return Item(right, name)
    infinity = Symbol(r"\infty", real=True)
    if relation in _FLIPPED and (name := _symbol(left)) and require_number(right).is_number:
        return Item(_interval(-infinity, "<", right, relation), name)
    if relation in _FLIPPED and (name := _symbol(right)) and require_number(left).is_number:
        return Item(_interval(left, relation, infinity, "<"), name)
    return Item(Relation(relation, require_number(left) - require_number(right)))


def _interval(low: Any, low_relation: str, high: Any, high_relation: str) -> Collection:
    kind = ("(" if low_relation == "<" else "[") + (")" if high_relation == "<" else "]")
    return Collection(kind, (Item(require_number(low)), Item(require_number(high))))


def _symbol(side: Any) -> str:
    """Return the name of a side that is a variable or a tuple of variables, or an empty text."""
    if isinstance(side, Collection):
        names = [_symbol(item.value) for item in side.items]
        return f"({','.join(names)})" if side.kind == "()" and all(names) else ""
    return str(side) if getattr(side, "is_Symbol", False) else ""


def as_equations(*lists: tuple[Item, ...]) -> list[tuple[Item, ...]]:
    """Write y = 2 x as an equation if any list has an equation that is not solved for a variable."""
    if not any(isinstance(item.value, Relation) and item.value.kind == "=" for items in lists for item in items):
        return [*lists]
    return [tuple(_as_equation(item) if item.name else item for item in items) for items in lists]


def _as_equation(item: Item) -> Item:
    if isinstance(item.value, Collection) or not item.value.free_symbols:
        return item
    return Item(Relation("=", Symbol(item.name, real=True) - item.value))


def are_equal_lists(key: Sequence[Item], answer: Sequence[Item]) -> bool:
    """Whether lists without order are equal in values and names. A list without names may equal a list with a name."""
    names = [{item.name for item in items} for items in (key, answer)]
    if names[0] != names[1]:
        if len(names[0] | names[1]) > 2 or {""} not in names:
            return False
        key, answer = ([replace(item, name="") for item in items] for items in (key, answer))
    remaining = list(answer)
    for item in key:
        index = next((index for index, candidate in enumerate(remaining) if are_equal(item, candidate)), None)
        if index is None:
            return False
        del remaining[index]
    return not remaining


def are_equal(key: Item, answer: Item) -> bool:
    """Whether two items are equal in name, unit and value."""
    left, right = key.value, answer.value
    if (key.name, key.unit) != (answer.name, answer.unit):
        return False
    if isinstance(left, Collection) and isinstance(right, Collection):
        if left.kind in ("{}", "union") or (left.kind, len(left.items)) != (right.kind, len(right.items)):
            return left.kind == right.kind and are_equal_lists(left.items, right.items)
        return all(map(are_equal, left.items, right.items))
    if isinstance(left, Relation) and isinstance(right, Relation):
        pairs = _evaluate(left.difference, right.difference)
        ratios = [value / reference for value, reference in pairs if value and reference]
        is_same = left.kind == right.kind and 0 < len(ratios) == len(pairs)
        is_same &= all(_are_close(ratio, ratios[0]) for ratio in ratios)
        return is_same and (left.kind in ("=", r"\ne") or ratios[0] > 0)
    if isinstance(left, Collection | Relation) or isinstance(right, Collection | Relation):
        return False
    if left == right or not left.free_symbols | right.free_symbols:
        return left == right or (not left.is_Rational and _are_close(N(left, 60), N(right, 60)))
    pairs = _evaluate(left, right)
    return bool(pairs) and all(_are_close(*pair) for pair in pairs)


def _evaluate(left: Any, right: Any) -> list[tuple[Any, Any]]:
    """Return the values of two expressions of the same variables at fixed points, or an empty list.

    If both expressions are real at some points, only these points count.
    """
    symbols = sorted(left.free_symbols, key=str)
    pairs = []
    for point in range(_POINTS if left.free_symbols == right.free_symbols else 0):
        draws, (low, high) = random.Random(point), ((1, 1000), (1000, 4000), (-4000, 4000))[point % 3]
        values = {symbol: Float(draws.randint(low, high), 60) / 1009 for symbol in symbols}
        pair = N(left.xreplace(values), 60), N(right.xreplace(values), 60)
        if all(number.is_Float or number.is_Rational for value in pair for number in value.as_real_imag()):
            pairs.append(pair)
    real = [pair for pair in pairs if all(value.is_real for value in pair)]
    return real if len(real) > 1 else [] if real or len(pairs) < 2 else pairs


def _are_close(left: Any, right: Any) -> bool:
    return bool(abs(left - right) <= _TOLERANCE * (abs(left) + abs(right)))
