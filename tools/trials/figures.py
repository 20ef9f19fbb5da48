"""The pictures of docs/evidence.md, from stored outcomes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from trials.grids import ARMS, TABLES
from trials.intervals import compare_pairs
from trials.outcomes import Outcome
from trials.results import Results, Runs
from trials.verdicts import ANCHORS

COLORS = {"none": "#8a8a8a", "r2": "#d98200", "r3": "#0b6fb8", "extra": "#b02a5b", "further": "#2c8f5a"}
"""Also told apart by marker or dash: no picture needs colours."""
MARKERS = {"none": "o", "r2": "s", "r3": "^"}
REPLAYS = {"none": "no replay", "r2": "R2", "r3": "R3"}
GAPS = {
    "none": "none\n(fp32)", "bf16": "bf16", "fp8_weights": "FP8\nweights", "fp8_activations": "FP8 act.",
    "weak_noise": "noise\n0.1", "strong_noise": "noise\n0.3",
}  # fmt: skip
METRICS = {"reward": "reward", "entropy": "entropy, nats", "k3": "k3[mu || old], nats"}


def save(figure: Figure, path: Path) -> None:
    """Write an SVG whose bytes depend on the figure alone."""
    FigureCanvasSVG(figure)
    with mpl.rc_context({"svg.hashsalt": "megarl", "svg.fonttype": "path", "font.size": 9}):
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def make_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def tidy(axes: Axes, title: str = "", x: str = "", y: str = "") -> None:
    """Set titles, a light grid and no box."""
    axes.set_title(title, loc="left", fontsize=9.5)
    axes.set(xlabel=x, ylabel=y)
    axes.grid(color="#e3e7ec", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def mark_runs(axes: Axes, place: float, runs: Runs, color: str, marker: str = "o", label: str | None = None) -> None:
    """Mark each run's final reward at x = place, a collapsed one with a cross, and the median as a bar."""
    for run in runs.values():
        is_dead = run.has_collapsed
        axes.plot(
            place,
            run.final,
            "x" if is_dead else marker,
            color=color,
            ms=5,
            mew=1.2,
            mfc="none" if is_dead else color,
            alpha=0.8,
        )
    if runs:
        axes.hlines(
            median(run.final for run in runs.values()), place - 0.13, place + 0.13, color=color, lw=2, label=label
        )


def plot_calibration(results: Results) -> Figure:
    """Final reward without replay, by learning rate, gap and arm."""
    [grid] = TABLES["grids"]["calibration"]
    figure = make_figure(8, 2.6)
    pairs = list(product(grid["arms"], grid["gap"]))
    for axes, (arm, gap) in zip(figure.subplots(1, len(pairs), sharey=True), pairs, strict=True):
        for place, lr in enumerate(grid["lr"]):
            mark_runs(axes, place, results.runs(arm, "none", calibrates=True, gap=gap, lr=lr), COLORS["none"])
        axes.set_xticks(range(len(grid["lr"])), [f"{lr:g}" for lr in grid["lr"]], fontsize=7)
        title = f"{ARMS[arm]['label']}, {gap.replace('_', ' ')}"
        tidy(axes, title, "learning rate", "final reward" if axes.get_subplotspec().is_first_col() else "")
        axes.set_ylim(-0.03, 1)
    return figure


def plot_trust_regions(results: Results) -> Figure:
    """Final rewards of all arms, by replay."""
    arms = TABLES["grids"]["trust_regions"][0]["arms"]
    figure = make_figure(10, 4)
    axes = figure.subplots()
    for place, arm in enumerate(arms):
        for shift, replay in zip((-0.27, 0, 0.27), REPLAYS, strict=True):
            label = REPLAYS[replay] if place == 0 else None
            mark_runs(axes, place + shift, results.runs(arm, replay), COLORS[replay], MARKERS[replay], label)
    axes.set_xticks(range(len(arms)), [ARMS[arm]["label"].replace(" at", "\nat").replace(" (", "\n(") for arm in arms])
    axes.tick_params(axis="x", labelsize=7.5)
    tidy(axes, "router noise 0.3, 4 updates per step; bars: medians, crosses: collapsed runs", "", "final reward")
    axes.legend(ncols=3, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.16))
    return figure


def plot_core(results: Results) -> Figure:
    """Final rewards without replay and with R3: a line for each seed."""
    arms = ("uncorrected", "pg_is", "grpo_mu", "minirl_c5")
    figure = make_figure(8, 2.8)
    for axes, arm in zip(figure.subplots(1, len(arms), sharey=True), arms, strict=True):
        cells = [results.runs(arm, replay) for replay in ("none", "r3")]
        for seed in cells[0].keys() & cells[1].keys():
            axes.plot([0, 1], [runs[seed].final for runs in cells], color="#c8ccd2", lw=0.8, zorder=0)
        for place, (replay, runs) in enumerate(zip(("none", "r3"), cells, strict=True)):
            mark_runs(axes, place, runs, COLORS[replay], MARKERS[replay])
        axes.set_xticks((0, 1), ("no replay", "R3"))
        axes.set_xlim(-0.4, 1.4)
        tidy(axes, ARMS[arm]["label"], "", "final reward" if arm == arms[0] else "")
    return figure


def plot_anchors(results: Results) -> Figure:
    """Final reward at mu minus at old, by mask and replay."""
    figure = make_figure(6, 2.8)
    axes = figure.subplots()
    for place, (at_mu, at_old) in enumerate(ANCHORS.values()):
        for shift, replay in ((-0.15, "none"), (0.15, "r3")):
            first, second = results.runs(at_mu, replay), results.runs(at_old, replay)
            seeds = first.keys() & second.keys()
            if not seeds:
                continue
            values = [first[seed].final - second[seed].final for seed in seeds]
            difference = compare_pairs(values, [0.0] * len(values))
            x = place + shift
            axes.vlines(x, difference.low, difference.high, color=COLORS[replay], lw=1)
            axes.plot([x] * len(values), values, MARKERS[replay], color=COLORS[replay], ms=5, alpha=0.7)
            axes.hlines(
                difference.median,
                x - 0.08,
                x + 0.08,
                color=COLORS[replay],
                lw=2.5,
                label=None if place else REPLAYS[replay],
            )
    axes.axhline(0, color="black", lw=0.8)
    axes.set_xticks(range(len(ANCHORS)), list(ANCHORS))
    tidy(axes, "above 0: the mask at mu ends higher than the equal mask at old", "", "difference of\nfinal rewards")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


Line = tuple[str, Runs, str, str]
"""Label, runs, colour and dash of a line."""


def plot_curves(columns: Mapping[str, Sequence[Line]]) -> Figure:
    """Reward, entropy, k3 and held-out score by update, a column per entry: medians and range of the seeds."""
    figure = make_figure(3.2 * len(columns) + 0.6, 7)
    grid = figure.subplots(4, len(columns), sharex=True, sharey="row", squeeze=False)
    for column, (title, lines) in enumerate(columns.items()):
        for label, runs, color, dash in lines:
            if runs:
                plot_line(grid[:, column], label, runs, color, dash)
        for row, name in enumerate((*METRICS.values(), "held-out score")):
            tidy(
                grid[row, column], title if row == 0 else "", "updates" if row == 3 else "", name if column == 0 else ""
            )
        grid[2, column].set_yscale("log")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5), frameon=False)
    return figure


def plot_line(rows: Sequence[Axes], label: str, runs: Runs, color: str, dash: str) -> None:
    """Plot the medians of a cell's runs into four rows."""
    every = list(runs.values())
    for axes, metric in zip(rows, METRICS, strict=False):
        values = np.array([smooth(series_of(run, metric)) for run in every])
        updates = every[0].cell.updates * np.arange(1, values.shape[1] + 1)
        axes.plot(updates, np.nanmedian(values, 0), dash, color=color, lw=1.6, label=label)
        axes.fill_between(updates, np.nanmin(values, 0), np.nanmax(values, 0), color=color, alpha=0.1, lw=0)
    scores = np.array([(run.scores + [0.0] * 5)[:5] for run in every])
    quarters = np.arange(5) * every[0].cell.budget / 4
    rows[3].plot(quarters, np.median(scores, 0), dash, color=color, lw=1.6, marker=".", ms=4)


def series_of(run: Outcome, metric: str) -> list[float]:
    """A metric of every step; NaN, or a reward of 0, after a run broke off."""
    return (
        run.rewards
        if metric == "reward"
        else run.series[metric] + [np.nan] * (run.cell.steps - len(run.series[metric]))
    )


def smooth(values: Sequence[float]) -> np.ndarray:
    """The mean of up to five values that end at each."""
    return np.array([np.nanmean(values[max(0, i - 4) : i + 1]) for i in range(len(values))])


def plot_staleness(results: Results) -> Figure:
    """MiniRL's figures 2 to 4: N = 2, 4, 8."""
    cells = [
        ("no mask, no replay", "no_clip", "none", "extra", ":"),
        ("no mask, R2", "no_clip", "r2", "further", "-."),
        ("no replay", "minirl_c5", "none", "none", "--"),
        ("R2", "minirl_c5", "r2", "r2", "-"),
        ("R3", "minirl_c5", "r3", "r3", "-"),
    ]
    return plot_curves(
        {
            f"N = {updates}": [
                (label, results.runs(arm, replay, updates=updates), COLORS[color], dash)
                for label, arm, replay, color, dash in cells
            ]
            for updates in (2, 4, 8)
        }
    )


def plot_on_policy(results: Results) -> Figure:
    """MiniRL's figure 1: N = 1."""
    arms = {
        "minirl_c5": ("MiniRL", "-"),
        "length_norm": ("with length norm", "--"),
        "no_is": ("without weight to mu", ":"),
    }
    columns = {
        REPLAYS[replay]: [
            (label, results.runs(arm, replay, updates=1), color, dash)
            for (arm, (label, dash)), color in zip(
                arms.items(), (COLORS["r3"], COLORS["r2"], COLORS["extra"]), strict=True
            )
        ]
        for replay in ("none", "r3")
    }
    return plot_curves(columns)


def plot_gaps(results: Results) -> Figure:
    """k3, flips and final reward of MiniRL (C = 5), by gap and replay."""
    figure = make_figure(10, 3)
    panels = figure.subplots(1, 3)
    for place, gap in enumerate(GAPS):
        for shift, replay in zip((-0.25, 0, 0.25), REPLAYS, strict=True):
            runs, label = results.runs("minirl_c5", replay, gap=gap), REPLAYS[replay] if place == 0 else None
            for axes, metric in zip(panels, ("k3", "flip"), strict=False):
                values = [run.series[metric][0] for run in runs.values()]
                axes.plot([place + shift] * len(values), values, MARKERS[replay], color=COLORS[replay], ms=4)
            mark_runs(panels[2], place + shift, runs, COLORS[replay], MARKERS[replay], label)
    panels[0].set_yscale("log")
    titles = ("k3[mu || old] of the first step, nats", "other experts, share of (token, layer)", "final reward")
    for axes, title in zip(panels, titles, strict=True):
        axes.set_xticks(range(len(GAPS)), list(GAPS.values()), fontsize=7)
        tidy(axes, title)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def plot_cold_starts(results: Results) -> Figure:
    """Three lengths of the cold start."""
    looks = {340: ("extra", ":"), 420: ("r2", "--"), 560: ("r3", "-")}
    lines = [
        (
            f"{length} supervised steps",
            results.runs("minirl_c5", "r2", updates=2, cold_start=length),
            COLORS[color],
            dash,
        )
        for length, (color, dash) in looks.items()
    ]
    return plot_curves({"MiniRL (C = 5), R2, N = 2": lines})


FIGURES = {
    "calibration": plot_calibration, "trust_regions": plot_trust_regions, "anchors": plot_anchors, "core": plot_core,
    "staleness": plot_staleness, "on_policy": plot_on_policy, "gaps": plot_gaps, "cold_starts": plot_cold_starts,
}  # fmt: skip
