"""A self-contained HTML page, without further files or network: texts, figures, samples, and plotly.js once,
compressed."""

import base64
import gzip
import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any

from plotly.offline import get_plotlyjs

from megarl.ops.report.figures import Figure
from megarl.ops.report.series import Panel, read_glossary


def make_page(
    title: str, subtitle: str, body: str, figures: Sequence[Figure], samples: Sequence[Mapping[str, Any]] = ()
) -> bytes:
    """Return the page. body: HTML, in which ``<div class="plot" data-figure="N">`` holds figure N."""
    data = {name: _embed(value) for name, value in (("figures", figures), ("samples", samples))}
    texts = {"title": html.escape(title), "subtitle": html.escape(subtitle), "body": body}
    script, plotly = _read("page.js"), base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
    return Template(_read("page.html")).substitute(texts, **data, plotly=plotly, script=script).encode()


def render_card(key: str, panel: Panel, places: Sequence[int]) -> str:
    """Return a panel as HTML: title, caption, figures by place in the list, and links into the glossary."""
    plots = "".join(f'<div class="plot" data-figure="{place}"></div>' for place in places)
    entries = [name for name in panel.needs if name in read_glossary()]
    links = " ".join(f'<a href="#{_anchor(name)}">{html.escape(name)}</a>' for name in entries)
    return (
        f'<figure class="card{" wide" if panel.wide else ""}" id="{key}"><h2>{html.escape(panel.title)}</h2>'
        f"<figcaption>{html.escape(panel.caption)}</figcaption>{plots}"
        f'<p class="metrics">Glossary: {links}</p></figure>'
    )


def render_glossary() -> str:
    """Return the meaning of all metrics as HTML, with an anchor per metric."""
    entries = "".join(
        f'<div id="{_anchor(name)}"><dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd></div>'
        for name, text in sorted(read_glossary().items())
    )
    return f'<section id="glossary"><h2>Glossary</h2><dl>{entries}</dl></section>'


def render_samples(notes: Sequence[str], has_any: bool) -> str:
    """Return the place where page.js lists the samples, with its controls; notes: the content of the page by run."""
    texts = "".join(f'<p class="note">{html.escape(note)}</p>' for note in notes)
    heading = '<section id="responses"><h2>What the model wrote</h2>'
    return f"{heading}{texts}{_read('samples.html') if has_any else ''}</section>"


def render_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as HTML; the first cell is the heading."""
    cells = "".join(
        f"<tr><th>{html.escape(first)}</th>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells_behind)}</tr>"
        for first, *cells_behind in rows
    )
    return f'<div class="table"><table>{cells}</table></div>'


def _anchor(metric: str) -> str:
    return html.escape(f"metric-{metric}")


def _embed(value: Any) -> str:
    """Return JSON without any end of an HTML element, for arbitrary strings."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _read(name: str) -> str:
    return (files("megarl.ops.report") / name).read_text(encoding="utf-8")
