"""Lines, bands and bars of ``megarl report``, and the style of all its pictures.

None uses pyplot, so no global state changes and no display is needed.
"""

import io
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from megarl.report.series import Curve, Curves, benchmarks, smooth

BLUE, ORANGE, TEAL, RED, PURPLE, GREY = "#2563a8", "#d9772b", "#2a9187", "#b8383d", "#77569f", "#6b7280"
PHASES = {
    "rollout": BLUE,
    "prepare": "#8fb6dd",
    "old_logprobs": ORANGE,
    "ref_logprobs": "#efc79f",
    "advantages": "#c8b560",
    "train": TEAL,
    "sync": PURPLE,
    "eval": "#d9a5c0",
    "checkpoint": "#c9ced6",
    "verify": "#b8b8b8",
}
"""Colour of each phase that the trainer times, in the order of a step. The last three lie outside the step."""
INK, MUTED = "#1f2933", "#5b6673"
_SMOOTHED_FROM = 40
"""Number of steps from which a curve is plotted as its moving average."""
_MAX_BARS = 100
_STYLE = str(Path(__file__).with_name("report.mplstyle"))

Scale = Literal["free", "zero", "log", "percent", "whole percent", "percent to 100"]
"""The y axis: as matplotlib likes; from zero up; decades; percent from zero up, from 0 to 100, from anywhere to 100."""


@dataclass(frozen=True, slots=True)
class Line:
    """One metric in a panel."""

    metric: str
    label: str
    color: str = BLUE
    style: Literal["line", "dashed", "dots"] = "line"
    """"dots" is for evaluations: they are few and each one counts, so they are never smoothed."""


def render_png(size: tuple[float, float], plot: Callable[[Figure], None], dpi: int = 144) -> bytes:
    """Return a PNG of ``size`` inches that ``plot`` fills, in the report's style."""
    with style.context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        plot(figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def plot_lines(axes: Axes, curves: Curves, lines: Sequence[Line]) -> None:
    """Plot those of the metrics that were recorded: mini-batches as mean and range, long curves as moving averages."""
    for line in lines:
        curve = curves.get(line.metric)
        if curve is not None and line.style == "dots":
            dots = {"marker": "o", "markersize": 6, "markeredgecolor": "white", "zorder": 3}
            axes.plot(curve.x, curve.y, color=line.color, label=line.label, **dots)
        elif curve is not None:
            _plot_curve(axes, curve, line)


def _plot_curve(axes: Axes, curve: Curve, line: Line) -> None:
    mean, low, high = curve.per_step()
    is_long = len(mean.x) >= _SMOOTHED_FROM
    if len(mean.x) < len(curve.x):
        axes.fill_between(mean.x, low.y, high.y, color=line.color, alpha=0.16, linewidth=0)
    elif is_long:
        axes.plot(mean.x, mean.y, color=line.color, alpha=0.28, linewidth=0.9)
    axes.plot(
        mean.x,
        smooth(mean.y, max(5, len(mean.y) // 25)) if is_long else mean.y,
        color=line.color,
        label=line.label,
        marker="o" if len(mean.x) <= 2 else None,
        linestyle="--" if line.style == "dashed" else "-",
    )


def plot_by_index(axes: Axes, curves: Curves, lines: Sequence[Line]) -> None:
    """Plot metrics of mini-batches against the index of the mini-batch in its step, as means over all steps."""
    for line in lines:
        if (curve := curves.get(line.metric)) is not None:
            known = np.isfinite(curve.y)
            _, index = np.unique(np.round(curve.x[known] % 1, 9), return_inverse=True)
            means = np.bincount(index, curve.y[known]) / np.bincount(index)
            axes.plot(np.arange(len(means)), means, color=line.color, label=line.label, marker="o")
    axes.set_xlabel("index of the mini-batch")


def scale_y(axes: Axes, scale: Scale) -> None:
    """Set the y axis of a panel whose lines are plotted."""
    top = float(axes.dataLim.y1)
    if "percent" in scale:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    if scale == "zero":
        axes.set_ylim(bottom=0.0)
    elif scale == "whole percent":
        axes.set_ylim(-0.02, 1.02)
    elif scale == "percent to 100":
        axes.set_ylim(top=1.0 + 0.02 * (1.0 - axes.get_ylim()[0]))
    elif scale == "percent" and top > 0:
        axes.set_ylim(-0.015 * top, 1.08 * top)
    elif scale == "log" and top > 0:
        axes.set_yscale("log", nonpositive="mask")
    elif scale in ("percent", "log"):
        axes.set_ylim(-0.0005, 0.0105)
        axes.text(0.5, 0.5, "zero in every step", transform=axes.transAxes, ha="center", color=MUTED)


def plot_reward(axes: Axes, curves: Curves) -> None:
    """Plot the training reward and pass rate, as one line where they are equal, and the evaluations."""
    reward, passed = curves.get("reward/mean"), curves.get("reward/pass_rate")
    if reward is not None and passed is not None and np.array_equal(reward.y, passed.y, equal_nan=True):
        lines = [Line("reward/pass_rate", "pass rate = mean reward (training)")]
    else:
        lines = [Line("reward/mean", "mean reward (training)", GREY), Line("reward/pass_rate", "pass rate (training)")]
    if curves.get("eval/pass_rate") is not None:
        lines.append(Line("eval/pass_rate", "pass rate (held-out)", ORANGE, "dots"))
    else:
        lines.append(Line("eval/reward", "mean reward (held-out)", ORANGE, "dots"))
    colors = itertools.cycle((TEAL, PURPLE, RED, "#b59f3b", "#4aa3c7", "#8a5a44"))
    lines += [Line(f"eval/{name}/pass_rate", name, next(colors), "dots") for name in benchmarks(curves)]
    plot_lines(axes, curves, lines)
    if axes.dataLim.y0 >= 0 and axes.dataLim.y1 <= 1:
        axes.set_ylim(-0.02, 1.02)


def plot_frontier(axes: Axes, curves: Curves) -> None:
    """Plot the held-out pass rate, else that of training, over the tokens drawn, coloured by entropy."""
    passed, tokens = curves.get("eval/pass_rate", curves.get("reward/pass_rate")), curves.get("cost/tokens")
    if passed is None or tokens is None:
        return
    spent = np.interp(passed.x, np.append(0, tokens.x), np.append(0, tokens.y))
    axes.plot(spent, passed.y, color=GREY, linewidth=0.9)
    entropy = curves.get("entropy")
    colors = np.full(spent.shape, np.nan) if entropy is None else np.interp(passed.x, entropy.x, entropy.y)
    points = axes.scatter(spent, passed.y, c=colors, cmap="viridis", plotnonfinite=True, zorder=3)
    if entropy is not None and axes.figure is not None:
        axes.figure.colorbar(points, ax=axes, label="entropy (nats per token)")
    axes.set_xlabel("tokens drawn for training")


def plot_kl(axes: Axes, curves: Curves) -> None:
    """Plot k3 and the size of k1, which may be negative."""
    k1, k3 = curves.get("rollout/k1"), curves.get("rollout/k3")
    if k1 is not None:
        axes.plot(k1.x, np.abs(k1.y), color=GREY, linewidth=0.9, alpha=0.7, label="|k1|")
        if len(k1.x) < 2 * _SMOOTHED_FROM:
            below = k1.y < 0
            axes.plot(k1.x[below], -k1.y[below], "o", color=GREY, ms=3.5, markerfacecolor="white", label="k1 < 0")
    plot_lines(axes, curves, [Line("rollout/k3", "k3")])
    # With perfect replay all values may be zero, which has no logarithm.
    if any(curve is not None and (curve.finite > 0).any() for curve in (k1, k3)):
        axes.set_yscale("log", nonpositive="mask")


def plot_ratio(axes: Axes, curves: Curves) -> None:
    """Plot the mean policy ratio with bands of its spread and its range."""
    low, high, mean, std = (curves.get(f"ratio/{name}") for name in ("min", "max", "mean", "std"))
    if low is not None and high is not None:
        lowest, highest = low.per_step()[1], high.per_step()[2]
        axes.fill_between(lowest.x, lowest.y, highest.y, color=BLUE, alpha=0.13, linewidth=0, label="min to max")
    if mean is not None:
        middle = mean.per_step()[0]
        if std is not None:
            spread = std.per_step()[2].y
            band = (middle.y - spread, middle.y + spread)
            axes.fill_between(middle.x, *band, color=BLUE, alpha=0.32, linewidth=0, label="mean ± largest std")
        axes.plot(middle.x, middle.y, color=BLUE, label="mean")
    axes.axhline(1.0, color=GREY, linewidth=0.8, linestyle=":")


def plot_time(axes: Axes, curves: Curves) -> None:
    """Plot the seconds of each phase as stacked bars, and the whole step as a line."""
    phases = {phase: curve for phase in PHASES if (curve := curves.get(f"time/{phase}_s")) is not None}
    steps = np.unique(np.concatenate([curve.x for curve in phases.values()]))
    # More bars than _MAX_BARS would be thinner than a pixel. Then each bar is the mean of several steps.
    stride = -(-len(steps) // _MAX_BARS)
    starts = np.arange(0, len(steps), stride)
    sizes = np.diff(np.append(starts, len(steps)))
    middles = np.add.reduceat(steps, starts) / sizes
    width = (float(np.diff(steps).min()) if len(steps) > 1 else 1.0) * stride * (0.92 if stride == 1 else 1.0)
    bottom = np.zeros(len(starts))
    for phase, curve in phases.items():
        height = np.add.reduceat(_align_to(curve, steps), starts) / sizes
        label = phase.replace("_", " ")
        axes.bar(middles, height, width, bottom=bottom, color=PHASES[phase], label=label, linewidth=0)
        bottom += height
    if (total := curves.get("time/step_s")) is not None:
        # Before the first step there may be an evaluation. It belongs to no step, so the line has a gap there.
        known = np.add.reduceat(np.isin(steps, total.x[np.isfinite(total.y)]).astype(np.float64), starts)
        whole = np.add.reduceat(_align_to(total, steps), starts) / np.where(known > 0, known, np.nan)
        marker = "o" if np.isfinite(whole).sum() <= 2 else None
        axes.plot(middles, whole, color=INK, linewidth=0.9, marker=marker, label="whole step")
    axes.set_ylabel("seconds per step" if stride == 1 else f"seconds per step (mean of {stride})")
    axes.grid(axis="x", visible=False)


def _align_to(curve: Curve, steps: np.ndarray) -> np.ndarray:
    """Return the curve at the given steps [P]; 0 where it has no finite value, because the phase did not run."""
    values = np.zeros(len(steps))
    known = np.isin(curve.x, steps) & np.isfinite(curve.y)
    values[np.searchsorted(steps, curve.x[known])] = curve.y[known]
    return values
