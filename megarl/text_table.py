"""Tables of plain text, for terminals and for logs (standard library only)."""

import shutil
import textwrap
from collections.abc import Iterable, Sequence

from megarl.errors import printable

_GAP = "  "
_NARROWEST = 20
"""Fewest characters of the last column, however narrow the terminal is."""


def text_table(rows: Iterable[Sequence[str]], headings: Sequence[str] = (), *, words: int | None = None) -> str:
    """Return cells in columns, under headings and a rule if given.

    The first ``words`` columns are aligned to the left, the numbers behind them to the right; None: all columns are
    words. The last column is wrapped at the width of the terminal (80 characters without a terminal). Control
    characters are escaped. An empty row is an empty line. ValueError if rows differ in length.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    lines = [list(headings), *cells] if headings else cells
    widths = [max(map(len, column)) for column in zip(*filter(None, lines), strict=True)]
    if not widths:
        return ""
    indent = sum(widths[:-1]) + len(_GAP) * (len(widths) - 1)
    widths[-1] = min(widths[-1], max(_NARROWEST, shutil.get_terminal_size().columns - indent))
    if headings:
        lines.insert(1, ["-" * width for width in widths])
    return "\n".join(line for row in lines for line in _lay_out(row, widths, indent, words))


def _lay_out(row: Sequence[str], widths: Sequence[int], indent: int, words: int | None) -> list[str]:
    if not row:
        return [""]
    num_words = len(row) if words is None else words
    first, *continued = textwrap.wrap(row[-1], widths[-1], break_on_hyphens=False) or [""]
    columns = enumerate(zip([*row[:-1], first], widths, strict=True))
    cells = [cell.ljust(width) if place < num_words else cell.rjust(width) for place, (cell, width) in columns]
    return [_GAP.join(cells).rstrip(), *(" " * indent + line for line in continued)]
