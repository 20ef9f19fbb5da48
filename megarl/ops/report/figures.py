"""The figures of ``megarl report`` as plotly's JSON: a dict with "data" and "layout" each. page.js adds the theme.

plotly, because its wheel brings the whole plotly.js: zoom, hover and clickable legends, without a network and without a
build step. Colours and fonts of light and dark mode are set in the page; those here suit both.

Of a single run, each series has a colour; several runs have a colour each, darker for held-out series (lighter in dark
mode: page.js). Each series has a dash pattern either way, held-out series have patterns and markers of their own, and
later lines are thinner: of two coinciding lines, the first shows on both sides of the second.
"""

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import numpy as np

from megarl.files.texts import read_table
from megarl.ops.report import series

Figure = dict[str, Any]
_TABLES = read_table(__file__, "colors.toml")
COLORS, _HEATMAP = _TABLES["series"], _TABLES["heatmap"]
_DASHES = ("solid", "dash", "longdash", "dashdot", "dot", "longdashdot")
_HELD_OUT_DASHES = ("dot", "longdashdot")
_SYMBOLS = ("square", "cross", "circle", "diamond", "triangle-up", "star")
_SMOOTHED_FROM = 40
"""Number of steps from which a moving average is plotted."""
_MAX_COLUMNS = 300
"""Most columns of a map; wider maps show means of several steps."""
_PERCENT = {"tickformat": ".3~%", "hoverformat": ".3~%"}


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a report."""

    name: str
    curves: series.Curves
    color: str | None = None
    """Of all its lines; None: a colour per series."""


def make_figures(panel: series.Panel, runs: Sequence[Run]) -> list[Figure]:
    """Return the figures of a panel: a figure of all runs with its metrics, or for maps a figure per run."""
    runs = [run for run in runs if panel.is_recorded(run.curves)]
    if panel.metrics:
        figures = [_plot_layers(panel, run) for run in runs]
        top = max(figure["data"][0]["zmax"] for figure in figures)  # a common scale, for comparable colours
        for run, figure in zip(runs, figures, strict=True):
            figure["data"][0]["zmax"] = top
            if run.color is not None:  # several are compared
                figure["layout"]["title"] = {"text": html.escape(run.name, quote=False)}
        return figures
    layout: Figure = {"xaxis": _axis("global step"), "yaxis": _axis(panel.y_label)}
    data = [trace for place, run in enumerate(runs) for trace in _plot_lines(panel, run, place)]
    _scale_y(layout, panel, data)
    return [{"data": data, "layout": layout}]


def numbers(values: np.ndarray) -> list[float | None]:
    """Return the values [P] with six digits; None for NaN and infinities."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in np.asarray(values, float).tolist()]


def _axis(title: str, **options: Any) -> Figure:
    return {"title": {"text": title}, **options}


def _plot_lines(panel: series.Panel, run: Run, place: int) -> Iterator[Figure]:
    """Plot the recorded metrics: mini-batches as their mean, long curves as moving averages."""
    for index, line in enumerate(_lines_of(panel, run.curves)):
        if (curve := run.curves.get(line.metric)) is None:
            continue
        style = _style(run, line, place, index)
        if line.style == "dots":
            color, width = style["line"]["color"], style["line"]["width"]
            marker = {"size": 4 * width, "color": color, "symbol": _SYMBOLS[index % len(_SYMBOLS)]}
            yield _trace(style, curve, "lines+markers", marker=marker)
            continue
        mean = curve.per_step()
        shown = series.thin(mean)
        if len(mean.x) >= _SMOOTHED_FROM:
            pale = {"line": {**style["line"], "width": 1, "dash": "solid"}, "opacity": 0.35, "showlegend": False}
            yield _trace(style, shown, "lines", **pale, hoverinfo="skip")
            shown = series.thin(replace(mean, y=series.smooth(mean.y, max(5, len(mean.y) // 25))))
        yield _trace(style, shown, "lines" if len(shown.x) > 12 else "lines+markers", marker={"size": 4})


def _lines_of(panel: series.Panel, curves: series.Curves) -> list[series.Line]:
    """Return the lines of a panel, for a metric of NAME a line of each benchmark."""
    pairs = [*zip(series.benchmarks(curves), cycle([*COLORS][4:]), strict=False)]
    rows = [(line, *pair) for line in panel.lines for pair in (pairs if "NAME" in line.metric else [("", line.color)])]
    parts = [(a, a.metric.replace("NAME", name), a.label.replace("NAME", name), color) for a, name, color in rows]
    return [replace(line, metric=metric, label=label, color=color) for line, metric, label, color in parts]


def _style(run: Run, line: series.Line, place: int, index: int) -> Figure:
    """The common settings of the traces of a line. The legend hides line, band and pale values together."""
    prefix, is_held_out = "" if run.color is None else f"{run.name}: ", line.style == "dots"
    dashes = _HELD_OUT_DASHES if is_held_out else _DASHES
    widths = (2.6, 1.6) if is_held_out else (3.6, 2.2, 1.5)
    width = widths[index % 2] if is_held_out else widths[min(index if run.color is None else place, 2)]
    color, is_shaded = run.color or COLORS[line.color], is_held_out and run.color is not None
    color = "#" + "".join(f"{int(color[i : i + 2], 16) * 11 // 20:02x}" for i in (1, 3, 5)) if is_shaded else color
    name = html.escape(prefix + line.label, quote=False)  # plotly reads HTML tags in texts
    return {
        "type": "scatter",
        "name": name,
        "legendgroup": name,
        "meta": "shade" if is_shaded else None,
        "line": {"color": color, "width": width, "dash": dashes[index % len(dashes)]},
    }


def _trace(style: Figure, curve: series.Curve, mode: str, **options: Any) -> Figure:
    return {**style, "mode": mode, **options, "x": numbers(curve.x), "y": numbers(curve.y)}


def _plot_layers(panel: series.Panel, run: Run) -> Figure:
    """Plot a map of MoE layers against steps, the share of tokens routed differently; NaN is left blank.

    The metrics of the panel are prefixes as in ``layer_curves``.
    """
    layers = {layer: curve.per_step() for layer, curve in series.layer_curves(run.curves, panel.metrics).items()}
    steps = np.unique(np.concatenate([curve.x for curve in layers.values()]))
    grid = np.full((len(layers), len(steps)), np.nan)
    for row, curve in enumerate(layers.values()):
        grid[row, np.searchsorted(steps, curve.x)] = np.where(np.isfinite(curve.y), curve.y, np.nan)
    starts = np.arange(0, len(steps), -(-len(steps) // _MAX_COLUMNS))
    counts = np.add.reduceat(np.isfinite(grid), starts, axis=1)
    grid = np.where(counts, np.add.reduceat(np.nan_to_num(grid), starts, axis=1) / np.maximum(counts, 1), np.nan)
    layout = {"xaxis": _axis("global step"), "yaxis": _axis(panel.y_label, type="category", autorange="reversed")}
    trace = {
        **_HEATMAP,
        "z": [numbers(row) for row in grid],
        "x": numbers(steps[starts]),
        "y": [str(layer) for layer in layers],
        "zmax": float(np.nanmax(grid, initial=0.0)) or 0.01,  # without any disagreement the scale is one percent
    }
    return {"data": [trace], "layout": layout}


def _scale_y(layout: Figure, panel: series.Panel, data: Sequence[Figure]) -> None:
    """Set the y axis of a panel whose lines are plotted."""
    axis, scale = layout["yaxis"], panel.scale
    top = max([value for trace in data for value in trace["y"] if value is not None], default=0.0)
    if "percent" in scale:
        axis |= _PERCENT
    if scale == "whole percent":
        axis["range"] = [-0.02, 1.02]
    elif scale == "log" and top > 0:
        axis |= {"type": "log", "exponentformat": "power", "hoverformat": ".3g"}
        for trace in data:  # zero has no logarithm: a line has a gap
            trace["y"] = [value if value is None or value > 0 else None for value in trace["y"]]
    elif scale in ("zero", "percent", "log"):
        axis["rangemode"] = "tozero"
