"""The figures of ``megarl report`` as plotly's JSON: a dict with "data" and "layout" each. page.js adds the theme.

plotly, because its wheel brings the whole plotly.js: zoom, hover and clickable legends, without a network and without a
build step. Colours and fonts of light and dark mode are set in the page; those here suit both.

Of a single run, each series has a colour; several runs have a colour each. Each series has a dash pattern either way,
and later lines are thinner: of two coinciding lines, the first shows on both sides of the second.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megarl.ops.report.series import (
    Curve,
    Curves,
    Line,
    Panel,
    benchmarks,
    layer_curves,
    read_table,
    smooth,
    sum_judged,
    thin,
)
from megarl.run.metrics_log import describe_judged

Figure = dict[str, Any]
_THEME = read_table("colors.toml")
COLORS: dict[str, str] = _THEME["series"]
PHASES = {phase: color if color.startswith("#") else COLORS[color] for phase, color in _THEME["phases"].items()}
"""Colour of each timed phase, in the order of a step. The last three lie outside the step."""
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_SMOOTHED_FROM = 40
"""Number of steps from which a moving average is plotted."""
_MAX_BARS = 100
_MAX_COLUMNS = 300
"""Most columns of a map; wider maps show means of several steps."""
_PERCENT = {"tickformat": ".3~%", "hoverformat": ".3~%"}


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a report."""

    name: str
    curves: Curves
    color: str | None = None
    """Of all its lines; None: a colour per series."""


def make_figures(panel: Panel, runs: Sequence[Run]) -> list[Figure]:
    """Return the figures of a panel: a figure of all runs with its metrics, or for maps and bars a figure per run."""
    runs = [run for run in runs if panel.is_recorded(run.curves)]
    if panel.kind in ("layers", "time"):
        plot = _plot_layers if panel.kind == "layers" else _plot_time
        figures = [plot(panel, run) for run in runs]
        if runs[0].color is not None:  # several are compared
            for run, figure in zip(runs, figures, strict=True):
                figure["layout"]["title"] = {"text": html_name(run.name)}
        if panel.kind == "layers":
            maps = [figure["data"][0] for figure in figures]
            top = max(heatmap["zmax"] for heatmap in maps)  # a common scale, for comparable colours
            for heatmap in maps:
                heatmap["zmax"] = top
        return figures
    layout: Figure = {"xaxis": _axis("global step"), "yaxis": _axis(panel.y_label)}
    data = [trace for place, run in enumerate(runs) for trace in _plot_lines(panel, run, place)]
    _scale_y(layout, panel, data)
    return [{"data": data, "layout": layout}]


def html_name(text: str) -> str:
    """Escape a name for plotly, because plotly reads HTML tags in texts."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def numbers(values: np.ndarray) -> list[float | None]:
    """Return the values [P] with six digits; None for values that are not finite."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in np.asarray(values, float).tolist()]


def _map_trace(grid: np.ndarray, x: np.ndarray, layers: Sequence[int]) -> Figure:
    """Return a map of layers against columns, the share of tokens routed differently; NaN is left blank.

    grid: float [L, columns]; x: [columns].
    """
    top = float(np.nanmax(grid, initial=0.0)) or 0.01  # without any disagreement the scale is one percent
    return {
        "type": "heatmap",
        "z": [numbers(row) for row in grid],
        "x": numbers(x),
        "y": [str(layer) for layer in layers],
        "zmin": 0.0,
        "zmax": top,
        "colorscale": "Viridis",
        "colorbar": {"tickformat": ".3~%", "thickness": 12},
        "hovertemplate": "layer %{y}, %{x}: %{z:.3~%}<extra></extra>",
    }


def _axis(title: str, **options: Any) -> Figure:
    return {"title": {"text": title}, **options}


def _reward_lines(curves: Curves) -> list[Line]:
    """Training reward and pass rate, and the evaluations."""
    judged = describe_judged(sum_judged(curves))
    lines = [
        Line("reward/pass_rate", "pass rate (training)"),
        Line("reward/mean", f"mean reward (training{judged and f', {judged}'})", "grey"),
    ]
    if curves.get("eval/pass_rate") is not None:
        lines.append(Line("eval/pass_rate", "pass rate (held-out)", "orange", "dots"))
    else:
        lines.append(Line("eval/reward", "mean reward (held-out)", "orange", "dots"))
    colors = itertools.cycle(("teal", "purple", "red", "yellow", "cyan", "brown"))
    return lines + [Line(f"eval/{name}/pass_rate", name, next(colors), "dots") for name in benchmarks(curves)]


def _plot_lines(panel: Panel, run: Run, place: int) -> Iterator[Figure]:
    """Plot the recorded metrics: mini-batches as mean and range, long curves as moving averages."""
    for index, line in enumerate(_reward_lines(run.curves) if panel.kind == "reward" else panel.lines):
        if (curve := run.curves.get(line.metric)) is not None:
            style = _style(run, line, place, index)
            if line.style == "dots":
                yield _trace(style, curve, "lines+markers", marker={"size": 9, "color": style["line"]["color"]})
            else:
                yield from _plot_curve(curve, style, run)


def _style(run: Run, line: Line, place: int, index: int) -> Figure:
    """The common settings of the traces of a line. The legend hides line, band and pale values together."""
    prefix = "" if run.color is None else f"{run.name}: "
    width = (3.6, 2.2, 1.5)[min(index if run.color is None else place, 2)]
    name = html_name(prefix + line.label)
    return {
        "type": "scatter",
        "name": name,
        "legendgroup": name,
        "line": {"color": run.color or COLORS[line.color], "width": width, "dash": _DASHES[index % len(_DASHES)]},
    }


def _trace(style: Figure, curve: Curve, mode: str, **options: Any) -> Figure:
    return {**style, "mode": mode, **options, "x": numbers(curve.x), "y": numbers(curve.y)}


def _plot_curve(curve: Curve, style: Figure, run: Run) -> Iterator[Figure]:
    mean, low, high = curve.per_step()
    is_long = len(mean.x) >= _SMOOTHED_FROM
    if len(mean.x) < len(curve.x) and run.color is None:
        yield from _band(low, high, style)
    elif is_long:
        pale = {"line": {**style["line"], "width": 1, "dash": "solid"}, "opacity": 0.35, "showlegend": False}
        yield _trace(style, thin(mean), "lines", **pale, hoverinfo="skip")
    shown = thin(replace(mean, y=smooth(mean.y, max(5, len(mean.y) // 25)))) if is_long else mean
    yield _trace(style, shown, "lines" if len(shown.x) > 12 else "lines+markers", marker={"size": 4})


def _band(low: Curve, high: Curve, style: Figure) -> Iterator[Figure]:
    """The area between two curves with equal steps."""
    is_finite = np.isfinite(low.y) & np.isfinite(high.y)
    low, high = thin(Curve(low.x[is_finite], low.y[is_finite])), thin(Curve(high.x[is_finite], high.y[is_finite]))
    outline = Curve(np.concatenate([high.x, low.x[::-1]]), np.concatenate([high.y, low.y[::-1]]))
    color = style["line"]["color"]
    area = {"line": {"width": 0, "color": color}, "fill": "toself", "fillcolor": f"{color}29"}  # an opacity of 0.16
    yield _trace(style, outline, "lines", **area, showlegend=False, hoverinfo="skip")


def _plot_layers(panel: Panel, run: Run) -> Figure:
    """Plot a map of MoE layers against steps; the metrics of the panel are prefixes as in ``layer_curves``."""
    layers = {layer: curve.per_step()[0] for layer, curve in layer_curves(run.curves, panel.metrics).items()}
    steps = np.unique(np.concatenate([curve.x for curve in layers.values()]))
    grid = np.full((len(layers), len(steps)), np.nan)
    for row, curve in enumerate(layers.values()):
        grid[row, np.searchsorted(steps, curve.x)] = np.where(np.isfinite(curve.y), curve.y, np.nan)
    starts = np.arange(0, len(steps), -(-len(steps) // _MAX_COLUMNS))
    counts = np.add.reduceat(np.isfinite(grid), starts, axis=1)
    grid = np.where(counts, np.add.reduceat(np.nan_to_num(grid), starts, axis=1) / np.maximum(counts, 1), np.nan)
    vertical = _axis(panel.y_label, type="category", autorange="reversed")
    layout = {"xaxis": _axis("global step"), "yaxis": vertical}
    return {"data": [_map_trace(grid, steps[starts], tuple(layers))], "layout": layout}


def _plot_time(panel: Panel, run: Run) -> Figure:
    """Plot the seconds of each phase as stacked bars."""
    phases = {phase: curve for phase in PHASES if (curve := run.curves.get(f"time/{phase}_s")) is not None}
    steps = np.unique(np.concatenate([curve.x for curve in phases.values()]))
    # More bars than _MAX_BARS would be thinner than a pixel. Bars are then means of several steps.
    stride = -(-len(steps) // _MAX_BARS)
    starts = np.arange(0, len(steps), stride)
    sizes = np.diff(np.append(starts, len(steps)))
    middles = np.add.reduceat(steps, starts) / sizes
    data: list[Figure] = []
    for phase, curve in phases.items():
        height = np.add.reduceat(_align_to(curve, steps), starts) / sizes
        look = {"type": "bar", "name": phase.replace("_", " "), "marker": {"color": PHASES[phase]}}
        data.append({**look, "x": numbers(middles), "y": numbers(height)})
    label = panel.y_label if stride == 1 else f"{panel.y_label} (mean of {stride})"
    bars = {"barmode": "stack", "bargap": 0.08 if stride == 1 else 0.0, "legend": {"traceorder": "normal"}}
    return {"data": data, "layout": {"xaxis": _axis("global step"), "yaxis": _axis(label), **bars}}


def _align_to(curve: Curve, steps: np.ndarray) -> np.ndarray:
    """Return the curve at the given steps [P]; 0 where it has no finite value, because the phase did not run."""
    values = np.zeros(len(steps))
    is_finite = np.isin(curve.x, steps) & np.isfinite(curve.y)
    values[np.searchsorted(steps, curve.x[is_finite])] = curve.y[is_finite]
    return values


def _scale_y(layout: Figure, panel: Panel, data: Sequence[Figure]) -> None:
    """Set the y axis of a panel whose lines are plotted."""
    axis, scale = layout["yaxis"], panel.scale
    values = [value for trace in data for value in trace["y"] if value is not None]
    top = max(values, default=0.0)
    if "percent" in scale:
        axis |= _PERCENT
    if scale == "whole percent" or (panel.kind == "reward" and min(values, default=0.0) >= 0 and top <= 1):
        axis["range"] = [-0.02, 1.02]
    elif scale == "percent to 100":
        axis["autorangeoptions"] = {"include": 1.0}
    elif scale == "log" and top > 0:
        axis |= {"type": "log", "exponentformat": "power", "hoverformat": ".3g"}
        lowest = min(value for value in values if value > 0)
        for trace in data:  # zero has no logarithm: a line has a gap, a band ends at the least value
            none = lowest if "fill" in trace else None
            trace["y"] = [value if value is None or value > 0 else none for value in trace["y"]]
    elif scale in ("percent", "log") and top <= 0:
        axis["range"] = [-0.0005, 0.0105]
    elif scale in ("zero", "percent"):
        axis["rangemode"] = "tozero"
