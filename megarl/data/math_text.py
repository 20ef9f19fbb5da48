"""What the reward math_verify reads of a text: its last boxed expression, in a form that math-verify understands."""

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
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\\\$|\\(?:pounds|euro|yen)(?![A-Za-z])|[€£¥₹¢₩₽]", ""),  # as other units, a currency is no part of a number
        (r"\\varnothing(?![A-Za-z])|∅|(?:\\left\s*)?\\\{\s*(?:\\right\s*)?\\\}", r"\\emptyset "),
        (r"\\pmod\s*(?:\{[^{}]*\}|\w)", ""),
        (r"\^?(?:°|\\degree(?![A-Za-z]))", r"^\\circ "),
        (r"(\^\{?\\circ\}?)\s*(?:\\(?:text|mathrm)\s*\{\s*[CF]\s*\}|[CF](?![A-Za-z]))", r"\1"),
    )
)
_SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALED = re.compile(rf"(?<![\d,.])({_NUMBER})({_SPACE}*(?:\\text\s*\{{\s*)?)({'|'.join(_SCALES)})(?![a-z])")


def last_box(text: str) -> str | None:
    r"""Return what is in the last ``\boxed`` or ``\fbox`` of a text, the outer one of nested boxes; None without a box.

    Without a brace it is the next word. It is empty if the last box does not end.
    """
    open_groups: list[int | None] = []  # where the content of a box begins; None for other braces
    boxes: list[tuple[int, str]] = []  # those that end
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
                boxes.pop()  # it is inside this one
            boxes.append((begin, text[begin : token.start()]))
    last_open = max((begin for begin in open_groups if begin is not None), default=-1)
    if boxes and boxes[-1][0] > last_open:
        return boxes[-1][1]
    return None if last_open < 0 else ""


def read_answer(parse: Parse, answer: str) -> list[Any]:
    """Return the expressions of an answer of a data set: of its last box, of the formula that it is, or of its text."""
    answer = re.sub(rf"^(-?)\$\s*({_NUMBER})$", r"\1\2", _substitute(answer).strip())
    if (content := last_box(answer)) is None and (formula := _FORMULA.fullmatch(answer)):
        content = next(part for part in formula.groups() if part is not None)
    if content is None and any(mark in answer for mark in ("$", "\\(", "\\[")):
        return parse(answer)
    return _read_box(parse, answer if content is None else content)


def read_response(parse: Parse, response: str) -> list[Any]:
    """Return the expressions of a response: of its last box alone; without a box, of its last formula or number.

    What comes after the thinking counts, unless nothing there can be read.
    """
    for part in dict.fromkeys((response.rpartition("</think>")[2], response)):
        content = last_box(part := _substitute(part))
        if content is not None:
            return _read_box(parse, content)
        if expressions := parse(part):
            return expressions
    return []


def are_other_lists(*sides: Sequence[Any]) -> bool:
    """Whether one side is written as an ordered list (1, 2) and the other one as a set {1, 2}."""
    return len({bracket for expressions in sides if (bracket := _bracket_of(_written(expressions)))}) > 1


def bare_percentage(expressions: Sequence[Any]) -> str | None:
    """Return the number of an answer that is a percentage."""
    found = re.fullmatch(rf"({_NUMBER})\s*\\?%", _written(expressions))
    return found and found[1]


def _written(expressions: Sequence[Any]) -> str:
    return next((one.strip() for one in expressions if isinstance(one, str)), "")


def _bracket_of(text: str) -> str:
    """Return ( or { if a list of several elements is in such brackets; else nothing."""
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
    content = _SCALED.sub(lambda found: f"{found[1]}\\times 10^{{{_SCALES[found[3]]}}}{found[2]}", _separate(content))
    return parse(f"\\boxed{{{content}}}") if content else []


def _separate(content: str) -> str:
    """Return choices and words as a list of formulas, which has no order, and a number with a word as one with a unit.

    Other contents stay as they are.
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
    for pattern, by in _SUBSTITUTES:
        text = pattern.sub(by, text)
    return _THOUSANDS.sub(lambda number: re.sub(r"[^\d]", "", number[0]), text)
