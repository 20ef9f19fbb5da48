"""From a text to the input of math-verify: the last boxed expression, in a form that math-verify understands."""

import re
from collections.abc import Callable, Sequence
from typing import Any

Parse = Callable[[str], list[Any]]
"""math-verify's ``parse``: the expressions of a text, and the text of the first one."""

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_TOKENS = re.compile(_BOX.pattern + r"\{?|\\.|[{}]", re.DOTALL)
_WORD = re.compile(r"[^\s${}]+(?:\{[^{}]*\})*")
_FORMULA = re.compile(r"\$\$(.*)\$\$|\$([^$]*)\$|\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt)?|math(?:rm|bf|sf)|mbox|boldsymbol|operatorname)\s*\{([^{}]*)\}")
_CHOICE = re.compile(r"\(?([A-Za-z])\)?")
_NUMBER = r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_SPACE = r"(?:\s|\\[,;: !])"
_THOUSANDS = re.compile(
    r"(?<![\d,])(?:(?<!\.)\d{1,3}|(?<=\.)\d{3})(?:(?:\{,\}|,\\!|\\[,;: !]|[~\u00a0\u2009\u202f])\d{3})+(?!\d)"
)
_SUBSTITUTES = tuple(
    (re.compile(pattern), substitute)
    for pattern, substitute in (
        (
            r"\\\$|\\(?:pounds|euro|yen)(?![A-Za-z])|[€£¥₹¢₩₽]",
            "",
        ),  # like other units, a currency is no part of a number
        (r"\\varnothing(?![A-Za-z])|∅|(?:\\left\s*)?\\\{\s*(?:\\right\s*)?\\\}", r"\\emptyset "),
        (r"\\pmod\s*(?:\{[^{}]*\}|\w)", ""),
        (r"\^?(?:°|\\degree(?![A-Za-z]))", r"^\\circ "),
        (r"(\^\{?\\circ\}?)\s*(?:\\(?:text|mathrm)\s*\{\s*[CF]\s*\}|[CF](?![A-Za-z]))", r"\1"),
    )
)
_SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALED = re.compile(rf"(?<![\d,.])({_NUMBER})({_SPACE}*(?:\\text\s*\{{\s*)?)({'|'.join(_SCALES)})(?![a-z])")


def last_box(text: str) -> str | None:
    r"""Return the content of the last ``\boxed`` or ``\fbox`` of a text, of nested boxes the outer box.

    Without a brace the content is the next word. It is empty if the last box does not end, and None without a box.
    """
    open_groups: list[int | None] = []  # begin of a box's content; None for a plain brace
    boxes: list[tuple[int, str]] = []  # begin and content of closed boxes
    for token in _TOKENS.finditer(text):
        if _BOX.match(token[0]):
            if token[0].endswith("{"):
                open_groups.append(token.end())
            elif word := _WORD.match(text, token.end()):
                boxes.append((token.end(), word[0]))
        elif token[0] == "{":
            open_groups.append(None)
        elif token[0] == "}" and open_groups and (begin := open_groups.pop()) is not None:
            while boxes and boxes[-1][0] > begin:
                boxes.pop()  # inside this box
            boxes.append((begin, text[begin : token.start()]))
    last_open = max((begin for begin in open_groups if begin is not None), default=-1)
    if boxes and boxes[-1][0] > last_open:
        return boxes[-1][1]
    return None if last_open < 0 else ""


def read_answer(parse: Parse, answer: str) -> list[Any]:
    """Return the expressions in an answer of a data set: a box, a formula, or plain text."""
    answer = re.sub(rf"^(-?)\$\s*({_NUMBER})$", r"\1\2", _substitute(answer).strip())
    if (content := last_box(answer)) is None and (formula := _FORMULA.fullmatch(answer)):
        content = next(group for group in formula.groups() if group is not None)
    if content is None and any(mark in answer for mark in ("$", "\\(", "\\[")):
        return parse(answer)
    return _read_box(parse, answer if content is None else content)


def read_response(parse: Parse, response: str) -> list[Any]:
    """Return the expressions of a response: in the last box, or without a box in the last formula or number.

    The text after the thinking counts, unless it holds no expression.
    """
    for text in dict.fromkeys((response.rpartition("</think>")[2], response)):
        content = last_box(text := _substitute(text))
        if content is not None:
            return _read_box(parse, content)
        if expressions := parse(text):
            return expressions
    return []


def are_other_lists(*sides: Sequence[Any]) -> bool:
    """Whether an ordered list (1, 2) is compared with a set {1, 2}."""
    return len({bracket for expressions in sides if (bracket := _bracket_of(_written(expressions)))}) > 1


def bare_percentage(expressions: Sequence[Any]) -> str | None:
    """Return the number of an answer that is a percentage."""
    match = re.fullmatch(rf"({_NUMBER})\s*\\?%", _written(expressions))
    return match and match[1]


def _written(expressions: Sequence[Any]) -> str:
    return next((text.strip() for text in expressions if isinstance(text, str)), "")


def _bracket_of(text: str) -> str:
    """Return ( or { if the text is a list of several elements in such brackets, or an empty text."""
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])\s*", "", text)
    first, inner = ("{", text[2:-2]) if text.startswith("\\{") and text.endswith("\\}") else (text[:1], text[1:-1])
    if first not in ("(", "{") or (first == "(" and not text.endswith(")")):
        return ""
    depth, has_comma = 0, False
    for character in inner:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return ""
        has_comma |= character == "," and not depth
    return first if has_comma else ""


def _read_box(parse: Parse, content: str) -> list[Any]:
    content = _BOX.sub("", content).replace("$", "").replace("~", " ")
    content = re.sub(rf"^{_SPACE}+|(?:{_SPACE}|[.,;]){{1,9}}$", "", content)
    content = re.sub(rf"^(-?\d+){_SPACE}+(\d+)\s*/\s*(\d+)$", r"\1\\frac{\2}{\3}", content)  # a mixed number
    if len(sides := re.split(r"\\pm(?![A-Za-z])", content)) == 2 and "," not in content:
        content = ", ".join(sign.join(sides) for sign in "+-")
    content = _SCALED.sub(lambda match: f"{match[1]}\\times 10^{{{_SCALES[match[3]]}}}{match[2]}", _separate(content))
    return parse(f"\\boxed{{{content}}}") if content else []


def _separate(content: str) -> str:
    """Return choices and words as a list of formulas without order, and a number with a word as a number with a unit.

    Other contents stay unchanged.
    """
    text = _TEXT.fullmatch(content)
    inner = text[1] if text else content.removeprefix("\\{").removesuffix("\\}")
    items = [item.strip() for item in re.split(r"[,;]?\s*\b(?:and|or)\b|[,;]|\\?&", inner)]
    choices = [_CHOICE.fullmatch(_TEXT.sub(lambda wrapped: wrapped[1].strip(), item)) for item in items]
    if all(choices):
        return ", ".join(choice[1] for choice in choices if choice)
    amount = re.fullmatch(
        rf"({_NUMBER})(?:\s+([A-Za-z ]+))?" if text else rf"({_NUMBER})\s+(dollars?|cents?|euros?)", inner
    )
    if amount:
        return f"{amount[1]}\\text{{ {amount[2]}}}" if amount[2] else amount[1]
    if text is None or len(items) == 1 or not all(items):
        return content
    return ", ".join(item if re.fullmatch(_NUMBER, item) else f"\\text{{{item}}}" for item in items)


def _substitute(text: str) -> str:
    for pattern, substitute in _SUBSTITUTES:
        text = pattern.sub(substitute, text)
    return _THOUSANDS.sub(lambda number: re.sub(r"[^\d]", "", number[0]), text)
