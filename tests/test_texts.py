"""Every text of files/refusals.toml has a place that raises it, with the facts that the text names."""

import ast
import re
import string
import tomllib
from pathlib import Path
from typing import Any

import megarl

FOLDER = Path(megarl.__file__).parent


def in_order(node: Any) -> tuple[int, int]:
    return node.lineno, node.col_offset


def test_texts_and_facts_fit() -> None:
    texts = tomllib.loads((FOLDER / "files" / "refusals.toml").read_text("utf-8"))
    fields = {
        name: {re.split(r"[.\[]", field)[0] for _, field, _, _ in string.Formatter().parse(text) if field}
        for name, text in texts.items()
    }
    facts = dict[str, set[str]]()
    for path in FOLDER.rglob("*.py"):
        source = path.read_text("utf-8")
        if not re.search(
            r"^from megarl\.(errors|files\.texts) import (?:\([^)]*|.*)\b(refusal|refuse_if)\b", source, re.MULTILINE
        ):
            continue
        shared = set[str]()
        for node in sorted((node for node in ast.walk(ast.parse(source)) if hasattr(node, "lineno")), key=in_order):
            match node:
                case ast.Assign([ast.Name("facts")], ast.Dict(keys)):
                    shared = {key.value for key in keys if key}
                case ast.AugAssign(ast.Name("facts"), _, ast.Dict(keys)):
                    shared = shared | {key.value for key in keys if key}
                case ast.Call(ast.Name("refusal"), [ast.Constant(name)], keywords) | ast.Call(
                    ast.Name("refuse_if"), [_, _, ast.Constant(name)], keywords
                ):
                    words = [shared if word.arg is None else {word.arg} for word in keywords]
                    facts.setdefault(name, set()).update(*words)
    assert facts == fields
