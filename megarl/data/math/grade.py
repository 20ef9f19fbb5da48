"""Compare the last box of a response with the answer of the data set, for the reward math_strict.

Both are cleaned (``text``) and read by a grammar. A box that the grammar cannot read is wrong. An answer of the data
set that the grammar cannot read is compared as text.
"""

import re
from dataclasses import dataclass

from megarl.data.math.grammar import Item, Reader, are_equal, are_equal_lists, as_equations
from megarl.data.math.text import UnreadableError, clean, last_box, read_words, split, squeeze
from megarl.errors import refuse_if, reworded

_MAX_CHARACTERS = 1000
_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_DECIMAL_COMMA = re.compile(r"-?\d+,(?:\d{1,2}|\d{4,})")
_SIGNS = ({r"\pm": "+", r"\mp": "-"}, {r"\pm": "-", r"\mp": "+"})


@dataclass(frozen=True, slots=True)
class Key:
    """An answer of a data set."""

    text: str
    items: tuple[Item, ...] | None
    """Values that the grammar reads; None if the grammar cannot read the answer."""
    forms: frozenset[str]
    """Operations that are left to be calculated."""

    @property
    def is_spelling(self) -> bool:
        """Whether responses must have the answer's spelling: the answer is neither words nor readable."""
        return self.items is None and read_words(self.text) is None


def read_key(answer: str) -> Key:
    """Read an answer of a data set: a box, a formula, a sentence whose last formula counts, or plain text.

    ValueError for an answer without anything to compare with.
    """
    content = last_box(answer)
    candidates = [answer if content is None else content]
    if content is None:
        candidates += ["".join(groups) for groups in _FORMULA.findall(answer)][-1:]
    texts = []
    for candidate in candidates:
        try:
            texts.append(clean(candidate))
            return Key(texts[-1], *_read(texts[-1]))
        except UnreadableError:
            continue
    refuse_if(not any(texts), ValueError, "empty_answer", answer=answer)
    return Key(texts[-1], None, frozenset())


def is_right(key: Key, response: str) -> bool:
    """Whether the last box of the response holds the answer, evaluated as far as the key."""
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
        # A comma may be a decimal comma, or separate two numbers.
        for items, forms in map(_read, [text, text.replace(",", ".")] if _DECIMAL_COMMA.fullmatch(text) else [text]):
            if forms <= key.forms and are_equal_lists(*as_equations(key.items, items)):
                return True
    except Exception:  # besides UnreadableError, sympy raises many types for values that cannot be compared
        return False
    return False


def _read(text: str) -> tuple[tuple[Item, ...], frozenset[str]]:
    """Read a text. A text with a sign for plus or minus is read twice: the values with either sign are a list."""
    tokens = split(text)
    items: list[Item] = []
    forms: frozenset[str] = frozenset()
    for signs in _SIGNS if {r"\pm", r"\mp"} & set(tokens) else ({},):
        reader = Reader([signs.get(token, token) for token in tokens])
        kinds = (ArithmeticError, AttributeError, NotImplementedError, TypeError)
        with reworded(kinds, UnreadableError, "sympy cannot make it", tell=lambda _: ""):
            values = reader.read()
        items += [item for item in values if not signs or not any(are_equal(item, old) for old in items)]
        forms |= reader.forms
    return tuple(items), forms
