"""Every text of refused data has a place that raises it, with the facts that the text names."""

import ast
import string
import tomllib
from pathlib import Path

import megarl.data

FOLDER = Path(megarl.data.__file__).parent


def test_texts_and_facts_fit() -> None:
    texts = tomllib.loads((FOLDER / "refusals.toml").read_text("utf-8"))
    fields = {
        name: {field for _, field, _, _ in string.Formatter().parse(text) if field} for name, text in texts.items()
    }
    facts = dict[str, set[str]]()
    for path in FOLDER.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        tables = {
            node.targets[0].id: {key.value for key in node.value.keys}
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and node.targets[0].id == "facts"
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "refusal":
                words = [tables[word.value.id] if word.arg is None else {word.arg} for word in node.keywords]
                facts[node.args[0].value] = set().union(*words)
    assert facts == fields
