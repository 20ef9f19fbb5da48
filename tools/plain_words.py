"""Counts names, words and lines that make megarl hard to read, and fails above a limit (`make check` runs this).

    python tools/plain_words.py                      # figures and limits
    python tools/plain_words.py --worst 20           # also the worst places of each count
    python tools/plain_words.py megarl/core          # figures of one folder or page; compared with no limit

- Vague names: locals and arguments that do not say what they hold (`found`, `one`, `own`), in percent of all.
- Reference words: words that point to something else (`it`, `those`, `which`), per hundred words of prose.
- Code lines: without blank lines, comments and docstrings.
- Unnamed errors: public functions that raise, and whose docstring names none of the classes.
- Unnamed shapes: public functions that take or return tensors, and whose docstring and annotations show no shape.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, PAGES = (ROOT / "megarl",), (ROOT / "docs", ROOT / "README.md")

LIMITS = {
    "vague names, %": 1.0,
    "reference words in docstrings and comments, per 100": 5.5,
    "reference words in docs/ and README.md, per 100": 4.6,
    "code lines": 24_500,
    "functions whose errors are unnamed": 0,
    "functions whose shapes are unnamed": 0,
}
"""Lower a limit when its figure falls; never raise one. The goals: 1, 5.5, 4.6, 24,500, 0, 0."""

_VAGUE = """
after ahead alike alone apart asked at away before behind beside beyond both by chosen each everything everywhere
few few_ following found given having held here how is_new joined kept known lacking least left like made many mine more
most named newest nobody nothing of older on one others own own_ part parts passed placed rest said seen shared some
taken theirs there these those to together told wanted what when where who why
"""
VAGUE = frozenset(_VAGUE.split())
REFERENCE = re.compile(
    r"\b(it|its|they|them|their|those|these|this|that|one|ones|others|other|another|which|what|who|whose|such|so|there|"
    r"then|else|both|each|same|latter|former|some|none|nothing|somebody|everything)\b",
    re.IGNORECASE,
)
SHORTEST_SENTENCE = 5
SHAPE = re.compile(r"``?\[|\[(?:\d|[A-Z]\w*|\.\.\.)(?:[ ,+*/()\w-]|\.\.\.)*\]|\bscalar|\bshape|0-d", re.IGNORECASE)
TENSOR = re.compile(r"\b(?:Tensor|ndarray)\b")

Place = tuple[float, str, str]
"""How bad, file:line, text."""


@dataclass
class Figure:
    """One count, and the places that contribute most."""

    value: float
    places: list[Place] = field(default_factory=list)


def python_files(roots: Sequence[Path]) -> Iterator[tuple[Path, str, ast.Module]]:
    """Yield (path, text, tree) of each Python file below the roots."""
    for root in roots:
        for path in [root] if root.is_file() else sorted(root.rglob("*.py")):
            text = path.read_text()
            yield path, text, ast.parse(text)


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield every string that stands alone in a body: docstrings of modules, classes, functions and fields."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str()) as text):
                    yield text


def vague_names(roots: Sequence[Path]) -> Figure:
    """The share of vague names among stores and arguments, in percent."""
    total, places = 0, []
    for path, _, tree in python_files(roots):
        for node in ast.walk(tree):
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                    total += 1
                    if name in VAGUE:
                        places.append((1.0, f"{path}:{node.lineno}", name))
    return Figure(100 * len(places) / max(total, 1), places)


def code_prose(roots: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield (place, text) of docstrings and comments."""
    for path, text, tree in python_files(roots):
        if "test" in path.name:
            continue
        for constant in docstrings(tree):
            yield f"{path}:{constant.lineno}", str(constant.value)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield f"{path}:{token.start[0]}", token.string.lstrip("# ")


def page_prose(roots: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield (place, paragraph) of Markdown: no headings, code, HTML or pictures; a table is one paragraph."""
    for root in roots:
        for path in [root] if root.is_file() else sorted(root.rglob("*.md")):
            is_fenced, paragraph, start = False, "", 1
            for number, line in enumerate([*path.read_text().splitlines(), ""], 1):
                is_code = line.startswith(("```", "    "))
                is_fenced ^= line.startswith("```")
                if is_code or is_fenced or not line.strip() or line.startswith(("#", "<", "!")):
                    if paragraph:
                        yield f"{path}:{start}", paragraph
                    paragraph = ""
                    continue
                start = start if paragraph else number
                paragraph += " " + line.strip().lstrip("-|* ")


def reference_words(prose: Iterator[tuple[str, str]]) -> Figure:
    """Reference words per hundred words, in sentences of at least SHORTEST_SENTENCE words."""
    words, references, places = 0, 0, []
    for place, text in prose:
        for sentence in re.split(r"(?<=[.;:!?])\s+", re.sub(r"\s+", " ", text)):
            length, count = len(re.findall(r"[A-Za-z']+", sentence)), len(REFERENCE.findall(sentence))
            if length >= SHORTEST_SENTENCE:
                words += length
                references += count
                places.append((count / length**0.5, place, sentence))
    return Figure(100 * references / max(words, 1), places)


def code_lines(roots: Sequence[Path]) -> Figure:
    """Lines that are neither blank nor a comment nor part of a docstring."""
    total, places = 0, []
    for path, text, tree in python_files(roots):
        prose = {n for node in docstrings(tree) for n in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
        lines = enumerate(text.splitlines(), 1)
        count = sum(bool(line.strip()) and not line.strip().startswith("#") and n not in prose for n, line in lines)
        total += count
        places.append((count, str(path), f"{count} lines"))
    return Figure(total, places)


Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_functions(tree: ast.Module) -> Iterator[Function]:
    """Yield functions of the module and methods of its classes whose names have no underscore in front."""
    for statement in tree.body:
        if isinstance(statement, Function) and not statement.name.startswith("_"):
            yield statement
        if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_"):
            for member in statement.body:
                if isinstance(member, Function) and not member.name.startswith("_"):
                    yield member


def raised_classes(function: Function) -> set[str]:
    """Names of the classes that the function raises itself, without those of functions inside of it."""
    names, stack = set(), list[ast.AST](function.body)
    while stack:
        node = stack.pop()
        if isinstance(node, Function | ast.Lambda | ast.ClassDef):
            continue
        match node:
            case ast.Raise(exc=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))) if name[0].isupper():
                names.add(name)
            case ast.Call(func=ast.Name(id="refuse_if"), args=[_, ast.Name(id=name) | ast.Attribute(attr=name), _]):
                names.add(name)
        stack.extend(ast.iter_child_nodes(node))
    return names - {"NotImplementedError", "AssertionError", "SystemExit", "StopIteration", "KeyboardInterrupt"}


def unnamed_errors(roots: Sequence[Path]) -> Figure:
    """Public functions that raise, and whose docstring names none of the classes."""
    places = []
    for path, _, tree in python_files(roots):
        for function in public_functions(tree):
            names, doc = raised_classes(function), ast.get_docstring(function) or ""
            if names and not any(name in doc for name in names):
                places.append((1.0, f"{path}:{function.lineno}", f"{function.name}: {', '.join(sorted(names))}"))
    return Figure(len(places), places)


def unnamed_shapes(roots: Sequence[Path]) -> Figure:
    """Public functions that take or return tensors, and whose docstring and comments beside arguments show no shape."""
    places = []
    for path, text, tree in python_files(roots):
        lines = text.splitlines()
        for function in public_functions(tree):
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            annotations = [ast.unparse(a) for a in [*(a.annotation for a in arguments), function.returns] if a]
            head = "\n".join(lines[function.lineno - 1 : function.body[0].lineno])
            comments = " ".join(re.findall(r"#(.*)", head))
            if any(map(TENSOR.search, annotations)) and not SHAPE.search(
                f"{ast.get_docstring(function) or ''} {comments}"
            ):
                places.append((1.0, f"{path}:{function.lineno}", function.name))
    return Figure(len(places), places)


def figures(package: Sequence[Path], pages: Sequence[Path]) -> dict[str, Figure]:
    """Every figure, by the name that LIMITS has."""
    counted = (
        vague_names(package),
        reference_words(code_prose(package)),
        reference_words(page_prose(pages)),
        code_lines(package),
        unnamed_errors(package),
        unnamed_shapes(package),
    )
    return dict(zip(LIMITS, counted, strict=True))


def main(words: Sequence[str] | None = None) -> int:
    """Print the figures; 1 if one is above its limit, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roots", nargs="*", type=Path, help="folders and pages to count alone, without limits")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="show the worst N places of each figure")
    arguments = parser.parse_args(words)
    pages = [path for path in arguments.roots if path.suffix == ".md" or path.name == "docs"]
    package = [path for path in arguments.roots if path not in pages]
    is_whole = not arguments.roots
    above = False
    for name, figure in (figures(PACKAGE, PAGES) if is_whole else figures(package, pages)).items():
        value, limit = round(figure.value, 1), LIMITS[name]
        above |= is_whole and value > limit
        verdict = f" (limit {limit:,}){'  ABOVE' * (value > limit)}" if is_whole else ""
        print(f"{name}: {value:,}{verdict}")
        for _, place, text in sorted(figure.places, reverse=True)[: arguments.worst]:
            print(f"    {place.removeprefix(f'{ROOT}/')}  {text[:240]}")
    return int(above)


if __name__ == "__main__":
    sys.exit(main())
