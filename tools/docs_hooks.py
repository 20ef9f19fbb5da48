"""What mkdocs does for this documentation beside its configuration (mkdocs.yml).

- Formulas, ``$...$`` and ``$$...$$``, become MathML: a page needs no script and no network to show them.
- A page asks for the table of metrics; docstrings have roles; commands in the navigation are code.
- Warnings, which fail a strict build: a formula that is not LaTeX, a ``$`` or a command of LaTeX that a reader would
  see, and a page that fetches from another host.
"""

import html
import logging
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from math_core import LatexError, LatexToMathML  # pyright: ignore[reportMissingImports]  # .venv-docs has it
from mkdocs.plugins import event_priority  # pyright: ignore[reportMissingImports]

GLOSSARY = Path(__file__).parents[1] / "megarl" / "ops" / "report" / "glossary.toml"
METRICS = "<!-- metrics -->"
ROLE = re.compile(r":(?:func|class|mod):<code>(?:[\w.]+\.)?(\w+)</code>")
IN_NAVIGATION = re.compile(r'<span class="md-ellipsis">[^<]*')
COMMAND = re.compile(r"· (megarl(?: [\w-]+)+)")
FENCE = re.compile(r"^\s*(?:`{3,}|~{3,})\s*math\b", re.MULTILINE)
LATEX = re.compile(r".{0,30}(?:\$|\\[A-Za-z({\[]).{0,30}", re.DOTALL)
LONG = 30
"""Characters beyond which a formula may not fit a phone."""
HELP = "put it in backticks; or close the formula, with no | inside, and an empty line above and below $$"
FETCHING = {"src", "srcset", "poster", "data"}
warnings = logging.getLogger("mkdocs.hooks.docs")


@event_priority(100)  # mkdocstrings copies the list
def on_config(config: Any) -> None:
    """Add the formulas to the extensions, for pages and docstrings."""
    config.markdown_extensions.append(Formulas())


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the table of metrics where a page asks for it."""
    if FENCE.search(markdown):
        warnings.warning(
            f"{page.file.src_uri}: a block of the language math stays LaTeX: write $$ in lines of their own"
        )
    return markdown.replace(METRICS, metrics()) if METRICS in markdown else markdown


def on_page_content(content: str, **_: Any) -> str:
    """Show ``:func:`package.name``` of a docstring as code."""
    return ROLE.sub(r"<code>\1</code>", content)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Show commands in the navigation as code. Warn of what is wrong with a page as its reader would see it."""
    for problem in problems(output):
        warnings.warning(f"{page.file.src_uri}: {problem}")
    return IN_NAVIGATION.sub(lambda title: COMMAND.sub(r"· <code>\1</code>", title[0]), output)


def metrics() -> str:
    """A table of what `metrics.jsonl` holds, from the file that the report reads too."""
    if not GLOSSARY.is_file():
        return ""
    meanings = tomllib.loads(GLOSSARY.read_text())
    rows = (f"| `{name}` | {' '.join(str(meaning).split())} |" for name, meaning in meanings.items())
    return "\n".join(["| metric | meaning |", "|---|---|", *rows])


class Formulas(Extension):
    """MathML in the place of what pymdownx.arithmatex found."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        # After the inline patterns (20), before the table of contents (5), which takes the letters of a formula.
        md.treeprocessors.register(_ToMathML(md), "formulas", 15)


class _ToMathML(Treeprocessor):
    def run(self, root: Any) -> None:
        converter = LatexToMathML(fancy_error=False)
        for element in root.iter():
            if element.get("class") != "arithmatex":
                continue
            latex = html.unescape(element.text)[2:-2].strip()
            try:
                mathml = mathml_of(converter, latex, is_block=element.tag == "div")
            except LatexError as error:
                element.tag, element.text = "code", latex
                element.set("class", "formula-error")
                element.set("title", f"{latex}: {error}")
            else:
                letters = re.sub(r"<[^>]*>|\s", "", html.unescape(mathml))
                element.set("class", "formula long" if len(letters) > LONG else "formula")
                element.text = self.md.htmlStash.store(mathml)


def mathml_of(converter: LatexToMathML, latex: str, *, is_block: bool) -> str:
    """LatexError also for what this page's formula would be, but not GitHub's."""
    if not latex:
        raise LatexError("it is empty")
    if r"\|" in latex:
        raise LatexError(r"it has \|, which a table reads as |; write \Vert")
    return converter.convert_with_local_state(latex, displaystyle=is_block)


def problems(page: str) -> list[str]:
    """What is wrong with the HTML of a page: formulas left over, and requests to other hosts."""
    reader = _PageReader()
    reader.feed(page)
    reader.close()
    return list(dict.fromkeys(reader.problems))


class _PageReader(HTMLParser):
    """Collects problems. Text in ``code``, ``pre``, ``script`` and ``style`` may have dollars and backslashes."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.depth += tag in ("code", "pre", "script", "style")
        values = {name: value or "" for name, value in attrs}
        for name in FETCHING | ({"href"} if tag == "link" else set()):
            if re.match(r"\s*(https?:)?//", values.get(name, "")):
                self.problems.append(f"<{tag} {name}> fetches {values[name]}: ship the file below docs/site")
        if "formula-error" in values.get("class", ""):
            self.problems.append(f"cannot convert the formula {values['title']}")

    def handle_endtag(self, tag: str) -> None:
        self.depth -= tag in ("code", "pre", "script", "style")

    def handle_data(self, data: str) -> None:
        if not self.depth and (found := LATEX.search(data)):
            text = " ".join(found[0].split())
            self.problems.append(f"found {text!r} outside code: {HELP}")
