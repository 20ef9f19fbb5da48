"""The grammar of answers for the reward math_strict: from tokens to sympy's value, and to open calculations.

An expression is evaluated if sympy, which combines terms and factors, combines nothing in the parts without variables.
An open calculation is called a *form*: a sum, a product, a quotient, a power, a root, a function of a number. Sizes are
bounded, so that no answer takes long.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
from sympy import E, Float, I, Integer, Mul, N, Rational, S, Symbol, pi

from megarl.data.math.text import CLOSING, CURRENCIES, SCALES, UnreadableError, name_unit, refuse
from megarl.files.texts import read_table

_TABLES = read_table(__file__)
_MAX_DEPTH = 30
_MAX_BITS = 20_000
_MAX_ROOT_BITS = 512
_MAX_COUNT = 2000
RELATIONS = {"=", "<", ">", r"\le", r"\ge", r"\ne", r"\in", r"\approx", r"\equiv"}
_CONSTANTS = {r"\pi": pi, "e": E, "i": I}
_FUNCTIONS: dict[str, Any] = {f"\\{name}": getattr(sympy, of_sympy) for name, of_sympy in _TABLES["functions"].items()}
_FUNCTIONS |= dict.fromkeys((r"\log", r"\lg"), lambda value, base=10: sympy.log(value, base))
_VARIABLE = re.compile(rf"[A-Za-z]|\\mathbb\{{[A-Z]\}}|\\(?:{'|'.join(_TABLES['variables'])})")
_FACTOR = re.compile(rf"\(|\\(?:frac|sqrt|pi|binom)|{_VARIABLE.pattern}|{'|'.join(map(re.escape, _FUNCTIONS))}")


class Reader:
    """Reads the tokens of an answer. UnreadableError for tokens outside of the grammar."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.forms: frozenset[str] = frozenset()
        """Open calculations."""
        self._tokens, self._at, self._depth, self._in_function = list(tokens), 0, 0, False
        self._symbols: set[Any] = set()

    def read(self) -> tuple[Item, ...]:
        items = self._items("")
        name, value = items[0].name, items[0].value
        if len(items) == 1 and isinstance(value, Collection) and value.kind == "{}" and not items[0].unit:
            return tuple(replace(item, name=item.name or name) for item in value.items) or items
        if len(items) > 1 and name and all(item.name == name and _is_interval(item) for item in items):
            return (Item(Collection("union", tuple(Item(item.value) for item in items)), name),)
        return items

    def _next(self, offset: int = 0) -> str:
        return self._tokens[self._at + offset] if self._at + offset < len(self._tokens) else ""

    def _take(self, *expected: str) -> bool:
        is_next = self._next() in expected
        self._at += is_next
        return is_next

    def _require(self, *expected: str) -> None:
        refuse(not self._take(*expected), f"{self._next()!r} in place of {expected}")

    def _mark(self, form: str, is_open: Any) -> None:
        if is_open:
            self.forms |= {form}

    def _items(self, *ends: str) -> tuple[Item, ...]:
        items = [] if self._next() and self._next() in ends else [self._item()]
        while self._take(",", ";"):
            items.append(self._item())
        self._require(*ends)
        return tuple(items)

    def _item(self) -> Item:
        name = ""
        if [self._next(1), *map(self._next, (3, 4))] == ["(", ")", "="] and _VARIABLE.fullmatch(self._next()):
            name = self._next()  # f(x) = ...
            self._at += 5
        sides, units, relations = [], set(), []
        while not sides or self._next() in RELATIONS:
            if sides:
                relations.append(self._next())
                self._at += 1
            side, unit = self._side()
            sides.append(side)
            units |= {unit} - {""}
        refuse(len(units) > 1 or (name and relations), f"the units {units}, the relations {relations}")
        item = relate(sides, relations)
        return replace(item, name=name or item.name, unit="".join(units))

    def _side(self) -> tuple[Any, str]:
        """Read an expression, or a union of sets, and a unit."""
        sign = self._next(1) in CURRENCIES and self._take("-")
        currency = self._next(-1) if self._take(*CURRENCIES) else ""
        outer, self._symbols = self._symbols, set()
        values = [self._sum()]
        while self._take(r"\cup"):
            values.append(self._sum())
        self._mark("cancelled", not isinstance(values[0], Collection) and self._symbols - values[0].free_symbols)
        self._symbols |= outer
        value = values[0] if len(values) == 1 else Collection("union", tuple(map(Item, values)))
        value = -require_number(value) if sign else value
        begin = self._at
        if self._next().startswith(r"\text") or self._next() in (r"\%", r"\pmod", *CURRENCIES) or self._is_degree():
            while self._next() not in ("", ",", ";", ")", "]", r"\}", "&", r"\\", *RELATIONS):
                self._at += 1
        unit = " ".join(self._tokens[begin : self._at])
        for word, exponent in SCALES.items():
            if word in unit:
                value = require_number(value) * 10**exponent
        units = name_unit(unit), name_unit(currency)
        return value, units[0] if not currency or units[0] == units[1] else " ".join(reversed(units)).strip()

    def _is_degree(self) -> bool:
        return self._next() == "^" and r"\circ" in (self._next(1), self._next(2))

    def _sum(self) -> Any:
        terms: list[Any] = []
        while not terms or self._next() in ("+", "-"):
            sign = self._next(-1) if self._take("+", "-") else ""
            term = self._product()
            if sign == "-":
                self._mark("sum", require_number(term).is_negative and term.is_number)
                term = -term
            terms.append(term)
        numbers = [term for term in terms if len(terms) > 1 and require_number(term).is_number]
        num_terms = sum(len(_parts(number, sympy.Add) or [0]) for number in numbers)
        self._mark("sum", len(_parts(sympy.Add(*numbers), sympy.Add)) < num_terms)
        return terms[0] if len(terms) == 1 else sympy.Add(*terms)

    def _product(self) -> Any:
        value = self._power()
        while True:
            if self._take(r"\cdot", r"\times", "*"):
                power = self._power_of_ten(value)
                value = value * power if power else self._multiply(value, self._power())
            elif self._take("/", r"\div"):
                value = self._divide(value, self._power())
            elif _FACTOR.fullmatch(self._next()):
                is_fraction = self._next() == r"\frac" and getattr(value, "is_Integer", False)
                factor = self._power()
                if is_fraction and factor.is_Rational and 0 < factor < 1:  # a mixed number
                    value = value + factor
                else:
                    value = self._multiply(value, factor)
            else:
                return value

    def _multiply(self, left: Any, right: Any) -> Any:
        product = require_number(left) * require_number(right)
        if left.is_number and right.is_number:
            (a, left_factors), (b, right_factors) = map(_factors, (left, right))
            is_open = (abs(a) != 1 and abs(b) != 1) or (left.is_Rational and right.is_Rational)
            is_open |= _is_combined(left_factors * right_factors, left_factors, right_factors)
            self._mark("product", is_open or (left.is_Add and right.is_Add))
        return product

    def _divide(self, left: Any, right: Any) -> Any:
        refuse(require_number(right) == 0, "division by 0")
        if require_number(left).is_number and right.is_number:
            (a, left_factors), (b, right_factors) = map(_factors, (left, right))
            ratio = left_factors / right_factors
            is_open = not (a.is_Integer and b.is_Integer) or (abs(b) != 1 and a % b == 0) or right_factors.is_Add
            is_open |= left.is_Rational and right.is_Rational and abs(right) == 1
            is_combined = _is_combined(ratio, left_factors, right_factors)
            self._mark("quotient", is_open or (is_combined and _factors(ratio)[0].is_Integer))
        return left / right

    def _power_of_ten(self, value: Any) -> Any:
        """Read 10^n behind a number from 1 to 10 and return the power; None for other tokens."""
        is_scientific = getattr(value, "is_Rational", False) and 1 <= abs(value) < 10
        if not is_scientific or [self._next(), self._next(1)] != ["10", "^"]:
            return None
        self._at += 2
        exponent = self._argument()
        refuse(not exponent.is_Integer or abs(exponent) > _MAX_COUNT, "a power of ten out of bounds")
        return Integer(10) ** exponent

    def _power(self) -> Any:
        value = self._primary()
        while True:
            if self._is_degree():
                if not self._in_function:
                    return value
                self._at += 2 if self._next(1) == r"\circ" else 4
                value = require_number(value) * pi / 180
            elif self._take("^"):
                return self._raise(require_number(value), self._argument())
            elif self._take("!"):
                if require_number(value).is_number and not (value.is_Integer and 0 <= value <= _MAX_COUNT):
                    raise UnreadableError("a factorial out of bounds")
                self._mark("!", value.is_number)
                value = sympy.factorial(value)
            else:
                return value

    def _raise(self, base: Any, exponent: Any) -> Any:
        is_root = exponent.is_Rational and not exponent.is_Integer
        if exponent.is_number:
            bits = max(base.p.bit_length(), base.q.bit_length()) if base.is_Rational else 1
            is_small = abs(sympy.N(exponent)) * bits <= (_MAX_ROOT_BITS if is_root else _MAX_BITS)
            if not is_small or (is_root and exponent.q > 100) or (base.is_zero and not exponent.is_positive):
                raise UnreadableError("a power out of bounds")
        power = base**exponent
        if base.is_number and exponent.is_number:
            if base == E or (base == pi and exponent.is_Integer):
                self._mark("power", exponent in (0, 1) or power.is_Rational)
            elif is_root:
                self._mark("root", not base.is_Rational or power.is_Rational or base < 0)
            else:
                self._mark("power", True)
        return power

    def _argument(self) -> Any:
        """Read the argument of a command or an exponent: a group in braces, or a single factor."""
        if self._take("{"):
            value = self._sum()
            self._require("}")
            return require_number(value)
        is_negative = self._take("-")
        value = require_number(self._primary())
        return -value if is_negative else value

    def _digit_or_group(self) -> Any:
        if len(token := self._next()) > 1 and token.isdigit():  # \frac12
            self._tokens[self._at : self._at + 1] = [token[0], token[1:]]
        return self._argument()

    def _primary(self) -> Any:
        token = self._next()
        self._at, self._depth = self._at + 1, self._depth + 1
        refuse(self._depth > _MAX_DEPTH, "too deep")
        value = self._read_primary(token)
        self._depth -= 1
        return value

    def _read_primary(self, token: str) -> Any:
        if re.match(r"\.?\d", token):
            return _read_number(token)
        if token in CLOSING:
            return self._bracket(token)
        if token == "{":
            self._at -= 1
            return self._argument()
        if token in _CONSTANTS:
            return _CONSTANTS[token]
        if _VARIABLE.fullmatch(token):
            self._symbols.add(symbol := Symbol(token + self._subscript(), real=True))
            return symbol
        if token == r"\frac":
            return self._divide(self._digit_or_group(), self._digit_or_group())
        if token == r"\sqrt":
            degree = self._argument_in_brackets() if self._take("[") else Integer(2)
            radicand, exponent = self._digit_or_group(), Integer(1) / degree
            if radicand.is_negative and degree.is_Integer and degree % 2:
                return -self._raise(-radicand, exponent)
            return self._raise(radicand, exponent)
        if token == r"\binom":
            return self._choose(self._digit_or_group(), self._digit_or_group())
        if token == "|":
            value = require_number(self._sum())
            self._require("|")
            self._mark("abs", value.is_number)
            return sympy.Abs(value)
        if token.startswith(r"\begin"):
            return self._matrix(token.replace("begin", "end"))
        if token in _FUNCTIONS:
            return self._function(token)
        raise UnreadableError(f"unknown: {token!r}")

    def _choose(self, n: Any, k: Any) -> Any:
        is_number = require_number(n).is_number and require_number(k).is_number
        if is_number and not (n.is_Integer and k.is_Integer and 0 <= k <= n <= _MAX_COUNT):
            raise UnreadableError("a binomial coefficient out of bounds")
        self._mark(r"\binom", is_number)
        return sympy.binomial(n, k)

    def _argument_in_brackets(self) -> Any:
        degree = self._primary()
        self._require("]")
        if not getattr(degree, "is_Integer", False) or not 2 <= degree <= 100:
            raise UnreadableError("a root of another degree than 2 to 100")
        return degree

    def _subscript(self) -> str:
        if not self._take("_"):
            return ""
        begin, is_group = self._at, self._take("{")
        while re.fullmatch(r"\w+", self._next()):
            self._at += 1
            if not is_group:
                break
        if is_group:
            self._require("}")
        return "_" + "".join(self._tokens[begin : self._at]).strip("{}")

    def _function(self, name: str) -> Any:
        bases = [self._argument()] if name == r"\log" and self._take("_") else []
        exponent = self._argument() if self._take("^") else S.One
        was_in_function, self._in_function = self._in_function, True
        is_bracket = self._next() == "("
        argument = self._argument() if self._next() == "{" else require_number(self._power())
        while not is_bracket and _FACTOR.fullmatch(self._next()) and self._next() not in ("(", *_FUNCTIONS):
            argument = self._multiply(argument, require_number(self._power()))
        self._in_function = was_in_function
        if exponent == -1 and name.replace("\\", "\\arc") in _FUNCTIONS:
            name, exponent = name.replace("\\", "\\arc"), S.One
        if any(value.is_number and not abs(sympy.N(value)) < 10**9 for value in (argument, *bases)):
            raise UnreadableError("a function of a number out of bounds")
        self._mark(r"\log" if name in (r"\ln", r"\lg") else name, argument.is_number)
        value = _FUNCTIONS[name](argument, *bases)
        refuse(value.has(S.NaN, S.ComplexInfinity), "a function without a value")
        return value if exponent == 1 else self._raise(value, exponent)

    def _bracket(self, opening: str) -> Any:
        items = self._items(*CLOSING[opening])
        kind = (opening + self._next(-1)).replace("\\", "")
        is_group = kind == "()" and len(items) == 1 and items[0] == Item(items[0].value)
        return items[0].value if is_group else Collection(kind, items)

    def _matrix(self, end: str) -> Collection:
        rows: list[list[Item]] = [[]]
        while True:
            rows[-1].append(Item(require_number(self._sum())))
            if not self._take("&"):
                if not self._take(r"\\") or self._next() == end:
                    self._require(end)
                    return Collection("matrix", tuple(Item(Collection("row", tuple(row))) for row in rows))
                rows.append([])


def _is_interval(item: Item) -> bool:
    return isinstance(item.value, Collection) and item.value.kind in ("()", "(]", "[)", "[]")


def _parts(value: Any, kind: Any = Mul) -> list[Any]:
    """Return the factors of a product without 1 and -1, or the terms of a sum without 0."""
    return [operand for operand in kind.make_args(value) if operand not in ((0,) if kind is sympy.Add else (1, -1))]


def _is_combined(value: Any, left: Any, right: Any) -> bool:
    """Whether sympy has combined factors of two numbers in their product or quotient."""
    return len(_parts(value)) < len(_parts(left)) + len(_parts(right))


def _factors(value: Any) -> tuple[Any, Any]:
    """Return (rational factor, irrational factors) of a number."""
    return value.as_coeff_Mul(rational=True)


def _read_number(token: str) -> Any:
    digits = re.sub(r"(?<=\d)(?:,|\\!)", "", token).replace("E", "e")
    mantissa, _, exponent = digits.partition("e" if "\\" not in token else "E")
    refuse(len(exponent) > 5 or abs(int(exponent or 0)) > _MAX_COUNT, "an exponent out of bounds")
    head, *tail = re.split(r"\(|\\[a-z]+", mantissa)
    value = Rational(head.removesuffix(".") or "0")
    if tail:
        period = re.sub(r"\D", "", tail[0])
        value += Rational(int(period), (10 ** len(period) - 1) * 10 ** len(head.partition(".")[2]))
    return value * Integer(10) ** int(exponent or 0)


_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_POINTS = 12
_TOLERANCE = Float(10, 60) ** -40


@dataclass(frozen=True, slots=True)
class Collection:
    kind: str
    """The brackets; "{}" has no order; "matrix" of rows of kind "row"; "union"."""
    items: tuple[Item, ...]


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
    refuse(isinstance(value, Collection | Relation), "a list in a formula")
    return value


def relate(sides: Sequence[Any], relations: Sequence[str]) -> Item:
    """Return a value with a name, an interval, or a relation of two expressions. UnreadableError for a chain."""
    if not relations:
        return Item(sides[0])
    if relations[0] in (">", r"\ge"):
        sides, relations = sides[::-1], [_FLIPPED.get(relation, relation) for relation in relations[::-1]]
    if len(relations) == 2 and {*relations} <= {"<", r"\le"} and (name := _symbol(sides[1])):
        return Item(_interval(sides[0], relations[0], sides[2], relations[1]), name)
    refuse(len(relations) != 1, "a chain of relations")
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
