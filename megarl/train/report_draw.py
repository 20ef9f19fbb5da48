"""How each panel of the report is drawn: one function per panel, all with the same palette.

A function draws into the axis it is given what the run has recorded, and names the axis with its unit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from megarl.train.report_series import Series, layer_curves, smooth

BLUE, ORANGE, TEAL, RED, PURPLE, GREY = "#2563a8", "#d9772b", "#2a9187", "#b8383d", "#77569f", "#6b7280"
PHASE_COLORS = (BLUE, "#8fb6dd", ORANGE, TEAL, PURPLE, "#d9a5c0", "#c9ced6")
INK, MUTED, GRID = "#1f2933", "#5b6673", "#e3e7ec"
PHASES = ("rollout", "reward", "old_logprobs", "train", "sync", "eval", "checkpoint")


def _line(axes: Axes, series: Series, name: str, label: str, color: str, **style: Any) -> None:
    """Draws a metric if it was recorded; long noisy curves get a moving average over the pale original."""
    curve = series.find(name)
    if curve is None:
        return
    marker = "o" if len(curve.x) <= 2 else None
    if len(curve.x) < 40:
        axes.plot(curve.x, curve.y, color=color, label=label, marker=marker, **style)
        return
    axes.plot(curve.x, curve.y, color=color, alpha=0.28, linewidth=0.9)
    axes.plot(curve.x, smooth(curve.y, max(5, len(curve.y) // 25)), color=color, label=label, **style)


def _percent(axes: Axes, *, top_free: bool = True) -> None:
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.set_ylim(bottom=0.0)
    if not top_free:
        axes.set_ylim(-0.02, 1.02)


def _log_if_positive(axes: Axes, series: Series, names: Iterable[str]) -> None:
    """Logarithmic only if there is something above zero: an all-zero curve (perfect replay) has no logarithm."""
    curves = [curve for name in names if (curve := series.find(name)) is not None]
    if any((curve.finite > 0).any() for curve in curves):
        axes.set_yscale("log", nonpositive="mask")


def draw_reward(axes: Axes, series: Series) -> None:
    _line(axes, series, "reward/mean", "reward (training)", GREY)
    _line(axes, series, "reward/pass_rate", "pass rate (training)", BLUE)
    for name, label, color in (
        ("eval/pass_rate", "pass rate (held-out)", ORANGE),
        ("eval/reward", "reward (held-out)", PURPLE),
    ):
        curve = series.find(name)
        if curve is not None and (name == "eval/pass_rate" or series.find("eval/pass_rate") is None):
            axes.plot(
                curve.x, curve.y, color=color, label=label, marker="o", markersize=6, markeredgecolor="white", zorder=3
            )
    axes.set_ylabel("share of responses, mean reward")
    drawn = np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines])
    if np.nanmin(drawn) >= 0 and np.nanmax(drawn) <= 1:
        axes.set_ylim(-0.02, 1.02)


def draw_effective(axes: Axes, series: Series) -> None:
    _line(axes, series, "prompts/effective_ratio", "prompts whose responses differ in reward", BLUE)
    axes.set_ylabel("share of prompts")
    _percent(axes, top_free=False)


def draw_length(axes: Axes, series: Series) -> None:
    _line(axes, series, "response/length_max", "longest", GREY, linestyle="--")
    _line(axes, series, "response/length_mean", "mean", BLUE)
    curve = series.find("eval/length_mean")
    if curve is not None:
        axes.plot(curve.x, curve.y, color=ORANGE, label="mean (held-out)", marker="o", markeredgecolor="white")
    axes.set_ylabel("response length (tokens)")
    axes.set_ylim(bottom=0.0)


def draw_truncated(axes: Axes, series: Series) -> None:
    _line(axes, series, "response/truncated_fraction", "cut off at the length limit", ORANGE)
    axes.set_ylabel("share of responses")
    _percent(axes)


def draw_entropy(axes: Axes, series: Series) -> None:
    _line(axes, series, "entropy", "training engine", BLUE)
    _line(axes, series, "rollout/entropy", "rollout engine", ORANGE)
    axes.set_ylabel("entropy (nats per token)")
    axes.set_ylim(bottom=0.0)


def draw_kl(axes: Axes, series: Series) -> None:
    k1 = series.find("rollout/k1")
    if k1 is not None:
        with np.errstate(invalid="ignore"):
            axes.plot(k1.x, np.abs(k1.y), color=GREY, linewidth=1.0, label="|k1|")
            axes.plot(
                k1.x[k1.y < 0],
                -k1.y[k1.y < 0],
                "o",
                color=GREY,
                markersize=3.5,
                markerfacecolor="white",
                label="k1 < 0",
            )
    _line(axes, series, "rollout/k3", "k3", BLUE)
    axes.set_ylabel("KL[rollout || old] (nats per token)")
    _log_if_positive(axes, series, ("rollout/k3", "rollout/k1"))


def draw_ratio(axes: Axes, series: Series) -> None:
    low, high, mean, std = (series.find(f"ratio/{name}") for name in ("min", "max", "mean", "std"))
    if low is not None and high is not None and len(low.x) == len(high.x):
        axes.fill_between(low.x, low.y, high.y, color=BLUE, alpha=0.13, linewidth=0, label="min to max")
    if mean is not None and std is not None and len(mean.x) == len(std.x):
        axes.fill_between(
            mean.x, mean.y - std.y, mean.y + std.y, color=BLUE, alpha=0.3, linewidth=0, label="mean ± std"
        )
    if mean is not None:
        axes.plot(mean.x, mean.y, color=BLUE, label="mean")
    axes.axhline(1.0, color=GREY, linewidth=0.8, linestyle=":")
    axes.set_ylabel("ratio of new to old policy")


def draw_clip(axes: Axes, series: Series) -> None:
    _line(axes, series, "clip/high", "above, A > 0", BLUE)
    _line(axes, series, "clip/low", "below, A < 0", ORANGE)
    _line(axes, series, "tis/truncated", "weight capped (TIS)", PURPLE)
    axes.set_ylabel("share of tokens")
    _percent(axes)


def draw_ess(axes: Axes, series: Series) -> None:
    _line(axes, series, "rollout/ess", "old against rollout", BLUE)
    _line(axes, series, "tis/ess", "weights of the loss", PURPLE)
    axes.set_ylabel("effective sample size (share)")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.set_ylim(top=1.0 + 0.02 * (1.0 - axes.get_ylim()[0]))


def draw_extreme(axes: Axes, series: Series) -> None:
    _line(axes, series, "rollout/extreme_2", "ratio above 2 or below 1/2", RED)
    axes.set_ylabel("share of tokens, F(2)")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.set_ylim(bottom=0.0)


def draw_router(axes: Axes, series: Series) -> None:
    _line(axes, series, "router/token_any", "tokens with any layer differing", ORANGE)
    _line(axes, series, "router/flip", "(token, layer) sets differing", BLUE)
    overlap = series.find("router/overlap")
    if overlap is not None:
        axes.plot(overlap.x, 1.0 - overlap.y, color=TEAL, linestyle="--", label="experts differing (1 - overlap)")
    axes.set_ylabel("share")
    _percent(axes)


def draw_router_layers(axes: Axes, series: Series) -> None:
    curves = layer_curves(series)
    steps = np.unique(np.concatenate([curve.x for curve in curves.values()]))
    grid = np.full((len(curves), len(steps)), np.nan)
    for row, curve in enumerate(curves.values()):
        grid[row, np.searchsorted(steps, curve.x)] = np.where(np.isfinite(curve.y), curve.y, np.nan)
    edges = np.append(steps, steps[-1] + (np.diff(steps).min() if len(steps) > 1 else 1.0))
    top = max(float(np.nanmax(grid)), 1e-6)
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
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]


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
    steps = np.unique(np.concatenate([curve.x for curve in curves.values()]))
    width = float(np.diff(steps).min()) * 0.92 if len(steps) > 1 else 0.8
    bottom = np.zeros(len(steps))
    for phase, color in zip(PHASES, PHASE_COLORS, strict=True):
        curve = curves.get(phase)
        if curve is None or not curve.finite.any():
            continue
        height = np.zeros(len(steps))
        height[np.searchsorted(steps, curve.x)] = np.where(np.isfinite(curve.y), curve.y, 0.0)
        axes.bar(steps, height, width, bottom=bottom, color=color, label=phase.replace("_", " "), linewidth=0)
        bottom += height
    total = series.find("time/step_s")
    if total is not None:
        axes.plot(total.x, total.y, color=INK, linewidth=0.9, label="whole step")
    axes.set_ylabel("seconds per step")
    axes.grid(axis="x", visible=False)


def draw_speed(axes: Axes, series: Series) -> None:
    _line(axes, series, "speed/tokens_per_s", "tokens of a step / its time", TEAL)
    axes.set_ylabel("tokens per second")
    axes.set_ylim(bottom=0.0)
