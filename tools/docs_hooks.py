"""What mkdocs does for this documentation beside its configuration (mkdocs.yml): metrics, and roles in docstrings."""

import re
import tomllib
from pathlib import Path
from typing import Any

GLOSSARY = Path(__file__).parents[1] / "megarl" / "ops" / "report" / "glossary.toml"
METRICS = "<!-- metrics -->"
ROLE = re.compile(r":(?:func|class|mod):<code>(?:[\w.]+\.)?(\w+)</code>")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the table of metrics where a page asks for it."""
    return markdown.replace(METRICS, metrics()) if METRICS in markdown else markdown


def on_page_content(html: str, **_: Any) -> str:
    """Show ``:func:`package.name``` of a docstring as code."""
    return ROLE.sub(r"<code>\1</code>", html)


def metrics() -> str:
    """A table of what `metrics.jsonl` holds, from the file that the report reads too."""
    if not GLOSSARY.is_file():
        return ""
    meanings = tomllib.loads(GLOSSARY.read_text())
    rows = (f"| `{name}` | {' '.join(str(meaning).split())} |" for name, meaning in meanings.items())
    return "\n".join(["| metric | meaning |", "|---|---|", *rows])
