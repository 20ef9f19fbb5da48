"""How each panel of the report is drawn: one function per panel, all with the same palette.

A function draws into the axis it is given what the run has recorded, and names the axis with its unit.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from megarl.report.series import Curve, Series, layer_curves, smooth

BLUE, ORANGE, TEAL, RED, PURPLE, GREY = "#2563a8", "#d9772b", "#2a9187", "#b8383d", "#77569f", "#6b7280"
PHASE_COLORS = (BLUE, "#8fb6dd", ORANGE, "#efc79f", "#c8b560", TEAL, PURPLE, "#d9a5c0", "#c9ced6")
INK, MUTED, GRID = "#1f2933", "#5b6673", "#e3e7ec"
SMOOTHED_FROM = 40
"""Steps from which on a curve is drawn as its moving average."""
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.edgecolor": "#b6bec8",
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "text.color": INK,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}

MAX_BARS = 100
PHASES = (
    "rollout",
    "prepare",
    "old_logprobs",
    "ref_logprobs",
    "advantages",
    "train",
    "sync",
    "eval",
    "checkpoint",
)
"""What the trainer times, in the order of a step; the last two are no part of it."""


def render_png(size: tuple[float, float], plot: Callable[[Figure], None], dpi: int = 144) -> bytes:
    """Return a PNG of ``size`` inches that ``plot`` fills, in the report's style.

    Does not use pyplot, so no global state changes and no display is needed.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        plot(figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def _line(
    axes: Axes, series: Series, name: str, label: str, color: str, *, complement: bool = False, **style: Any
) -> None:
    """Draws a metric (or 1 - metric) if it was recorded.

    Several mini-batches of a step become their mean with a band from the lowest to the highest; a long noisy curve
    gets a moving average over the pale original.
    """
    curve = series.find(name)
    if curve is None:
        return
    if complement:
        curve = Curve(curve.x, 1.0 - curve.y)
    mean, low, high = curve.per_step()
    if len(mean.x) < len(curve.x):
        axes.fill_between(mean.x, low.y, high.y, color=color, alpha=0.16, linewidth=0)
    elif len(mean.x) >= SMOOTHED_FROM:
        axes.plot(mean.x, mean.y, color=color, alpha=0.28, linewidth=0.9)
    smoothed = len(mean.x) >= SMOOTHED_FROM
    y = smooth(mean.y, max(5, len(mean.y) // 25)) if smoothed else mean.y
    axes.plot(mean.x, y, color=color, label=label, marker="o" if len(mean.x) <= 2 else None, **style)


def _dots(axes: Axes, series: Series, name: str, label: str) -> None:
    """Evaluations are few and count one by one: dots, joined by a line, never smoothed."""
    curve = series.find(name)
    if curve is not None:
        axes.plot(
            curve.x, curve.y, color=ORANGE, label=label, marker="o", markersize=6, markeredgecolor="white", zorder=3
        )


def _percent(axes: Axes, *, whole: bool = False) -> None:
    """Percent from zero up; ``whole``: always up to 100 %. A curve that never leaves zero is said to be zero."""
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    if whole:
        axes.set_ylim(-0.02, 1.02)
        return
    top = float(axes.dataLim.y1)
    if top > 0:
        axes.set_ylim(-0.015 * top, 1.08 * top)
    else:
        axes.set_ylim(-0.0005, 0.0105)
        axes.text(0.5, 0.5, "zero in every step", transform=axes.transAxes, ha="center", color=MUTED)


def _log_if_positive(axes: Axes, series: Series, names: Iterable[str]) -> None:
    """Logarithmic only if there is something above zero: an all-zero curve (perfect replay) has no logarithm."""
    curves = [curve for name in names if (curve := series.find(name)) is not None]
    if any((curve.finite > 0).any() for curve in curves):
        axes.set_yscale("log", nonpositive="mask")


def draw_reward(axes: Axes, series: Series) -> None:
    reward, passed = series.find("reward/mean"), series.find("reward/pass_rate")
    if reward is not None and passed is not None and np.array_equal(reward.y, passed.y, equal_nan=True):
        _line(axes, series, "reward/pass_rate", "pass rate = mean reward (training)", BLUE)
    else:
        _line(axes, series, "reward/mean", "mean reward (training)", GREY)
        _line(axes, series, "reward/pass_rate", "pass rate (training)", BLUE)
    name = "eval/pass_rate" if series.find("eval/pass_rate") is not None else "eval/reward"
    _dots(axes, series, name, "pass rate (held-out)" if name == "eval/pass_rate" else "mean reward (held-out)")
    axes.set_ylabel("share of responses, mean reward")
    if axes.dataLim.y0 >= 0 and axes.dataLim.y1 <= 1:
        axes.set_ylim(-0.02, 1.02)


def draw_effective(axes: Axes, series: Series) -> None:
    _line(axes, series, "sampling/contrast_fraction", "of those drawn", GREY, linestyle="--")
    _line(axes, series, "prompts/effective_ratio", "of those that train", BLUE)
    axes.set_ylabel("share of prompts")
    _percent(axes, whole=True)


def draw_samples(axes: Axes, series: Series) -> None:
    _line(axes, series, "sampling/samples_per_prompt", "drawn, per prompt", BLUE)
    _line(axes, series, "sampling/rounds", "rounds", ORANGE)
    axes.set_ylabel("responses, rounds")
    axes.set_ylim(bottom=0.0)


def draw_estimates(axes: Axes, series: Series) -> None:
    _line(axes, series, "estimate/rate_mean", "estimated pass rate", BLUE)
    _line(axes, series, "estimate/error", "distance to what was drawn", ORANGE)
    _line(axes, series, "gvm/acceptance_rate", "accepted in the first stage", BLUE)
    _line(axes, series, "gvm/hopeless_fraction", "prompts without an accepted one", ORANGE)
    axes.set_ylabel("share")
    _percent(axes, whole=True)


def draw_episodes(axes: Axes, series: Series) -> None:
    _line(axes, series, "episode/turns_mean", "turns", BLUE)
    _line(axes, series, "episode/failed_fraction", "share that failed", ORANGE)
    axes.set_ylabel("turns, share")
    axes.set_ylim(bottom=0.0)


def draw_length(axes: Axes, series: Series) -> None:
    _line(axes, series, "response/length_max", "longest", GREY, linestyle="--")
    _line(axes, series, "response/length_mean", "mean", BLUE)
    _dots(axes, series, "eval/length_mean", "mean (held-out)")
    axes.set_ylabel("response length (tokens)")
    axes.set_ylim(bottom=0.0)


def draw_truncated(axes: Axes, series: Series) -> None:
    _line(axes, series, "response/truncated_fraction", "cut off at the length limit", ORANGE)
    axes.set_ylabel("share of responses")
    _percent(axes)


def draw_entropy(axes: Axes, series: Series) -> None:
    _line(axes, series, "entropy", "training engine", BLUE)
    _line(axes, series, "rollout/entropy", "start of the step", ORANGE)
    axes.set_ylabel("entropy (nats per token)")
    axes.set_ylim(bottom=0.0)


def draw_kl(axes: Axes, series: Series) -> None:
    k1 = series.find("rollout/k1")
    if k1 is not None:
        axes.plot(k1.x, np.abs(k1.y), color=GREY, linewidth=0.9, alpha=0.7, label="|k1|")
        if len(k1.x) < 2 * SMOOTHED_FROM:
            below = k1.y < 0
            axes.plot(k1.x[below], -k1.y[below], "o", color=GREY, ms=3.5, markerfacecolor="white", label="k1 < 0")
    _line(axes, series, "rollout/k3", "k3", BLUE)
    axes.set_ylabel("KL[rollout || old] (nats per token)")
    _log_if_positive(axes, series, ("rollout/k3", "rollout/k1"))


def draw_ratio(axes: Axes, series: Series) -> None:
    low, high, mean, std = (series.find(f"ratio/{name}") for name in ("min", "max", "mean", "std"))
    if low is not None and high is not None and np.array_equal(low.x, high.x):
        lowest, highest = low.per_step()[1], high.per_step()[2]
        axes.fill_between(lowest.x, lowest.y, highest.y, color=BLUE, alpha=0.13, linewidth=0, label="min to max")
    if mean is not None and std is not None and np.array_equal(mean.x, std.x):
        middle, spread = mean.per_step()[0], std.per_step()[2]
        band = (middle.y - spread.y, middle.y + spread.y)
        axes.fill_between(middle.x, *band, color=BLUE, alpha=0.32, linewidth=0, label="mean ± largest std")
    if mean is not None:
        middle = mean.per_step()[0]
        axes.plot(middle.x, middle.y, color=BLUE, label="mean")
    axes.axhline(1.0, color=GREY, linewidth=0.8, linestyle=":")
    axes.set_ylabel("ratio of new to old policy")


def draw_clip(axes: Axes, series: Series) -> None:
    _line(axes, series, "clip/high", "above, A > 0", BLUE)
    _line(axes, series, "clip/low", "below, A < 0", ORANGE)
    _line(axes, series, "tis/truncated", "weight capped (TIS)", PURPLE)
    axes.set_ylabel("share of tokens")
    _percent(axes)


def draw_ess(axes: Axes, series: Series) -> None:
    _line(axes, series, "rollout/ess/fraction", "old against rollout", BLUE)
    _line(axes, series, "tis/ess/fraction", "weights of the loss", PURPLE)
    axes.set_ylabel("effective sample size (share)")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.set_ylim(top=1.0 + 0.02 * (1.0 - axes.get_ylim()[0]))


def draw_extreme(axes: Axes, series: Series) -> None:
    _line(axes, series, "rollout/extreme_2", "ratio above 2 or below 1/2", RED)
    axes.set_ylabel("share of tokens, F(2)")
    _percent(axes)


def draw_router(axes: Axes, series: Series) -> None:
    _line(axes, series, "router/native/token_any", "own, any layer", ORANGE)
    _line(axes, series, "router/native/flip", "own, per layer", PURPLE)
    _line(axes, series, "router/token_any", "in use, any layer", BLUE)
    _line(axes, series, "router/flip", "in use, per layer", TEAL)
    axes.set_ylabel("share that differs")
    _percent(axes)


def draw_router_layers(axes: Axes, series: Series) -> None:
    curves = layer_curves(series)
    steps = np.unique(np.concatenate([curve.x for curve in curves.values()]))
    grid = np.full((len(curves), len(steps)), np.nan)
    for row, curve in enumerate(curves.values()):
        grid[row, np.searchsorted(steps, curve.x)] = np.where(np.isfinite(curve.y), curve.y, np.nan)
    width = np.diff(steps).min() if len(steps) > 1 else 1.0
    edges = np.append(steps, steps[-1] + width) - width / 2
    top = float(np.nanmax(grid)) or 0.01  # all zero under replay: then the scale is one percent
    image = axes.pcolormesh(
        edges, np.arange(len(curves) + 1) - 0.5, grid, cmap="YlGnBu", vmin=0.0, vmax=top, rasterized=True
    )
    axes.grid(False)
    axes.set_facecolor("#f1f2f4")  # a step without a value is grey, not "no disagreement"
    shown = range(0, len(curves), max(1, len(curves) // 12))
    axes.set_yticks(list(shown), [str(list(curves)[row]) for row in shown])
    axes.invert_yaxis()
    axes.set_ylabel("MoE layer")
    bar = axes.figure.colorbar(image, ax=axes, pad=0.01, label="share of tokens routed differently")
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    bar.outline.set_visible(False)


def draw_missing(axes: Axes, series: Series) -> None:
    _line(axes, series, "rollout/missing_rows_fraction", "tokens without a recorded route", RED)
    axes.set_ylabel("share of tokens")
    _percent(axes)


def draw_grad_norm(axes: Axes, series: Series) -> None:
    _line(axes, series, "grad_norm", "before clipping", BLUE)
    axes.set_ylabel("gradient norm")
    axes.set_ylim(bottom=0.0)


def draw_loss(axes: Axes, series: Series) -> None:
    _line(axes, series, "loss", "surrogate loss", BLUE)
    axes.set_ylabel("loss")


def draw_time(axes: Axes, series: Series) -> None:
    curves = {phase: curve for phase in PHASES if (curve := series.find(f"time/{phase}_s")) is not None}
    total = series.find("time/step_s")
    steps = np.unique(np.concatenate([curve.x for curve in curves.values()]))
    # More bars than this would be thinner than a pixel: each then stands for the mean of several steps.
    stride = -(-len(steps) // MAX_BARS)
    starts = np.arange(0, len(steps), stride)
    sizes = np.diff(np.append(starts, len(steps)))
    middles = np.add.reduceat(steps, starts) / sizes
    width = (float(np.diff(steps).min()) if len(steps) > 1 else 1.0) * stride * (0.92 if stride == 1 else 1.0)
    bottom = np.zeros(len(starts))
    for phase, color in zip(PHASES, PHASE_COLORS, strict=True):
        if phase in curves:
            height = np.add.reduceat(_on_steps(curves[phase], steps), starts) / sizes
            axes.bar(middles, height, width, bottom=bottom, color=color, label=phase.replace("_", " "), linewidth=0)
            bottom += height
    if total is not None:
        # Before the first step there may be an evaluation, but no step that took no time.
        known = np.add.reduceat(np.isin(steps, total.x[np.isfinite(total.y)]).astype(np.float64), starts)
        whole = np.add.reduceat(_on_steps(total, steps), starts) / np.where(known > 0, known, np.nan)
        marker = "o" if np.isfinite(whole).sum() <= 2 else None
        axes.plot(middles, whole, color=INK, linewidth=0.9, marker=marker, label="whole step")
    axes.set_ylabel("seconds per step" if stride == 1 else f"seconds per step (mean of {stride})")
    axes.grid(axis="x", visible=False)


def _on_steps(curve: Curve, steps: np.ndarray) -> np.ndarray:
    """The curve at the given steps [P]; 0 where it has no finite value: the phase did not run."""
    values = np.zeros(len(steps))
    known = np.isin(curve.x, steps) & np.isfinite(curve.y)
    values[np.searchsorted(steps, curve.x[known])] = curve.y[known]
    return values


def draw_speed(axes: Axes, series: Series) -> None:
    _line(axes, series, "speed/tokens_per_s", "tokens of a step / its time", TEAL)
    axes.set_ylabel("tokens per second")
    axes.set_ylim(bottom=0.0)
