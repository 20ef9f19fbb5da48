"""What the reward math_strict reads in a box, and when it equals the answer of the data set.

Both are cleaned (``strict_text``) and read by a grammar, a list of what an answer may be made of: what it does not know
is wrong. An answer of the data set that it does not know is compared as text.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sympy import Float, N, Symbol

from megarl.data.math_text import last_box
from megarl.data.strict_grammar import Collection, Item, Reader, Relation
from megarl.data.strict_text import UnreadableError, clean, read_words, split, squeeze

_MAX_CHARACTERS = 1000
_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_DECIMAL_COMMA = re.compile(r"-?\d+,(?:\d{1,2}|\d{4,})")
_SIGNS = ({r"\pm": "+", r"\mp": "-"}, {r"\pm": "-", r"\mp": "+"})
_POINTS = 12
_TOLERANCE = Float(10, 60) ** -40


@dataclass(frozen=True, slots=True)
class Key:
    """An answer of a data set."""

    text: str
    items: tuple[Item, ...] | None
    """What the grammar reads in it; None if it does not know it."""
    forms: frozenset[str]
    """What is left to be calculated in it."""


def read_key(answer: str) -> Key:
    """Read an answer of a data set: a box, a formula, a sentence whose last formula counts, or plain text.

    Raises ValueError for an answer without anything to compare with.
    """
    content = last_box(answer)
    candidates = [answer if content is None else content]
    if content is None:
        candidates += ["".join(parts) for parts in _FORMULA.findall(answer)][-1:]
    texts = []
    for candidate in candidates:
        try:
            texts.append(clean(candidate))
            return Key(texts[-1], *_read(texts[-1]))
        except UnreadableError:
            continue
    if not any(texts):
        raise ValueError(f"math_strict finds nothing to compare with in the answer {answer!r:.80}")
    return Key(texts[-1], None, frozenset())


def is_right(key: Key, response: str) -> bool:
    """Whether the last box of the response holds the answer, as evaluated as the key."""
    content = last_box(response)
    if content is None or len(content) > max(_MAX_CHARACTERS, 2 * len(key.text)):
        return False
    try:
        text = clean(content)
        if squeeze(text) == squeeze(key.text):
            return True
        words = read_words(key.text)
        if words is not None or key.items is None:
            return words is not None and read_words(text) == words
        # A decimal comma, or two numbers.
        readings = [text, text.replace(",", ".")] if _DECIMAL_COMMA.fullmatch(text) else [text]
        for items, forms in map(_read, readings):
            if forms <= key.forms and _are_equal_lists(*_as_equations(key.items, items)):
                return True
    except UnreadableError:
        pass
    return False


def _read(text: str) -> tuple[tuple[Item, ...], frozenset[str]]:
    """Read a text, twice if it has a sign for plus or minus: its values with either are a list."""
    tokens = split(text)
    items: list[Item] = []
    forms: frozenset[str] = frozenset()
    for signs in _SIGNS if {r"\pm", r"\mp"} & set(tokens) else ({},):
        reader = Reader([signs.get(token, token) for token in tokens])
        items += [item for item in reader.read() if len(signs) == 0 or not any(_are_equal(item, old) for old in items)]
        forms |= reader.forms
    return tuple(items), forms


def _as_equations(*lists: tuple[Item, ...]) -> list[tuple[Item, ...]]:
    """Write y = 2 x as an equation if one of the lists has an equation that is not solved for a variable."""
    if not any(isinstance(item.value, Relation) and item.value.kind == "=" for items in lists for item in items):
        return [*lists]
    return [tuple(_as_equation(item) if item.name else item for item in items) for items in lists]


def _as_equation(item: Item) -> Item:
    if isinstance(item.value, Collection) or not item.value.free_symbols:
        return item
    return Item(Relation("=", Symbol(item.name, real=True) - item.value))


def _are_equal_lists(key: Sequence[Item], answer: Sequence[Item]) -> bool:
    """Whether lists without order are equal, also in their names: where one has none, the other may have one."""
    names = [{item.name for item in items} for items in (key, answer)]
    if names[0] != names[1]:
        if len(names[0] | names[1]) > 2 or {""} not in names:
            return False
        key, answer = ([replace(item, name="") for item in items] for items in (key, answer))
    left = list(answer)
    for item in key:
        index = next((index for index, other in enumerate(left) if _are_equal(item, other)), None)
        if index is None:
            return False
        del left[index]
    return not left


def _are_equal(key: Item, answer: Item) -> bool:
    left, right = key.value, answer.value
    if (key.name, key.unit) != (answer.name, answer.unit):
        return False
    if isinstance(left, Collection) and isinstance(right, Collection):
        if left.kind in ("{}", "union") or (left.kind, len(left.items)) != (right.kind, len(right.items)):
            return left.kind == right.kind and _are_equal_lists(left.items, right.items)
        return all(map(_are_equal, left.items, right.items))
    if isinstance(left, Relation) and isinstance(right, Relation):
        pairs = _evaluate(left.difference, right.difference)
        ratios = [mine / other for mine, other in pairs if mine and other]
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
    """Return the values of two expressions of the same variables at fixed points where both are real; none if few are."""
    symbols = sorted(left.free_symbols, key=str)
    pairs = []
    for point in range(_POINTS if left.free_symbols == right.free_symbols else 0):
        draws, (low, high) = random.Random(point), ((1, 1000), (1000, 4000), (-4000, 4000))[point % 3]
        values = {symbol: Float(draws.randint(low, high), 60) / 1009 for symbol in symbols}
        pair = N(left.xreplace(values), 60), N(right.xreplace(values), 60)
        if all(value.is_Float or value.is_Rational for value in pair):
            pairs.append(pair)
    return pairs if len(pairs) > 1 else []


def _are_close(left: Any, right: Any) -> bool:
    return bool(abs(left - right) <= _TOLERANCE * (abs(left) + abs(right)))
