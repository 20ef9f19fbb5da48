"""The text of answers for the reward math_strict: a single spelling, tokens, words, units."""

import re

from megarl.files.texts import read_table

_TABLES = read_table(__file__)
CURRENCIES = (r"\$", "€", "£", "¥", "₹", "¢")
SCALES: dict[str, int] = _TABLES["scales"]
"""Powers of ten."""
CLOSING = {"(": (")", "]"), "[": (")", "]"), r"\{": (r"\}",), r"\langle": (r"\rangle",)}
_TRANSLATION = str.maketrans(_TABLES["characters"])
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_TOKENS = re.compile(_BOX.pattern + r"\{?|\\.|[{}]", re.DOTALL)
_WORD = re.compile(r"[^\s${}]+(?:\{[^{}]*\})*")
_WHOLE_BOX = re.compile(r"\s*\\(?:boxed|fbox)\s*\{(.*)\}\s*", re.DOTALL)
_DOLLAR = re.compile(r"(?<!\\)\$")
_REWRITES = [(re.compile(pattern), substitute) for pattern, substitute in _TABLES["formula"]["rewrites"]]
_DIGITS = r"\d+(?:\.(?:\d*\(\d+\)|\d*\\(?:overline|bar|dot)\s*(?:\{\d+\}|\d)|\d+))?|\.\d+"
_TOKEN = re.compile(
    r"\s*(?:\d{1,3}(?P<comma>,|\\!)\d{3}(?:(?P=comma)\d{3})*(?:\.\d+)?(?!,?\d)"
    rf"|(?:{_DIGITS})(?:[eE][-+]?\d+)?|\\text\{{[^{{}}\\$]*\}}|\\(?:begin|end)\{{[pbB]?matrix\}}|\\mathbb\{{[A-Z]\}}"
    r"|\\[A-Za-z]+|\\[{}%$\\]|[^\s\\])",
    re.ASCII,
)
_UNITS: dict[str, str] = _TABLES["units"]


class UnreadableError(ValueError):
    """The grammar cannot read the text, or a number is too large."""


def refuse(is_unreadable: object, problem: str) -> None:
    """Raise UnreadableError with this text if ``is_unreadable``."""
    if is_unreadable:
        raise UnreadableError(problem)


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


def clean(content: str) -> str:
    """Return a formula in a single spelling, without commands for the layout. UnreadableError for a comment."""
    while inner := _WHOLE_BOX.fullmatch(content):
        content = inner[1]
    content = content.translate(_TRANSLATION)
    refuse(re.search(r"(?<!\\)%(?!\s*$)", content), "a comment")
    content = re.sub(r"(?<!\\)%", r"\\%", content)
    content = _DOLLAR.sub(r"\\$" if len(_DOLLAR.findall(content)) == 1 else "", content)
    content = re.sub(r"^\s*\\[(\[]|\\[)\]]\s*$", "", content)
    for pattern, substitute in _REWRITES:
        content = pattern.sub(substitute, content.strip())
    return content.rstrip(" .,;")


def squeeze(text: str) -> str:
    """Return a text without spaces and text commands, for comparison. A space between digits stays."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text))


def read_words(text: str) -> list[str] | None:
    """Return the sorted list of the words, or groups of words, of a text; None for a formula."""
    plain = re.sub(r"\\text\{([^{}]*)\}", r"\1", text).casefold()
    words = sorted(" ".join(word.split()).rstrip(".") for word in plain.split(","))
    is_text = all(re.fullmatch(r"[^\W\d_](?:[^\W\d_]|[ .'-])*", word) for word in words)
    min_letters = 2 if r"\text" in text else 3
    return words if is_text and re.search(rf"[^\W\d_]{{{min_letters}}}", plain) else None


def split(text: str) -> list[str]:
    """Return the tokens of a cleaned text. UnreadableError for a character outside of formulas."""
    tokens: list[str] = []
    position = depth = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        token = match[0].strip() if match else ""
        if match is None or not (token.isascii() or token in CURRENCIES):
            raise UnreadableError(f"unknown text: {text[position : position + 20]!r}")
        position = match.end()
        if match["comma"] == "," and depth:  # in brackets, a comma separates elements, not thousands
            position -= len(token) - token.index(",")
            token = token[: token.index(",")]
        depth += (token in CLOSING) - (token in (")", "]", r"\}", r"\rangle"))
        tokens.append(token)
    return tokens


def name_unit(text: str) -> str:
    """Return the single spelling of a unit: "square meters", "m^{2}" and "m^2" are equal."""
    names = []
    for word in re.findall(r"[^\W\d_]+|\d+|[^\s\\{}^.]", text.replace(r"\circ", "degree").replace(r"\text", " ")):
        single = word.removesuffix("s") if len(word) > 2 else word
        if single not in SCALES:
            prefix, stem = re.findall("^(kilo|centi|milli|)(.+)", single)[0]
            names.append(prefix[:1] + _UNITS.get(stem, stem))
    if names[:1] in (["sq"], ["cubic"]):
        names = [*names[1:2], "2" if names[0] == "sq" else "3", *names[2:]]
    return " ".join(names)
