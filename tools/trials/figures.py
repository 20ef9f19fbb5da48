"""The pictures of docs/evidence.md, from stored outcomes alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from trials.rows.source_row import BLUE, GRAY, GREEN, ORANGE, RED
from trials.verdicts import ANCHORS

COLORS = {"none": GRAY, "r2": ORANGE, "r3": BLUE, "extra": RED, "further": GREEN}
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


def mark_runs(
    axes: Axes, place: float, runs: Runs, color: str, marker: str = "o", label: str | None = None
) -> dict[int, tuple[float, float]]:
    """Mark each run's final reward beside x = place, a collapsed one with a cross, and the median as a bar.

    Returns the point of each seed.
    """
    shifts = np.linspace(-0.07, 0.07, len(runs)).tolist()
    points = {seed: (place + shift, run.final) for shift, (seed, run) in zip(shifts, runs.items(), strict=True)}
    for run, point in zip(runs.values(), points.values(), strict=True):
        mark, fill = ("x", "none") if run.has_collapsed else (marker, color)
        axes.plot(*point, mark, color=color, ms=4.5, mew=1.2, mfc=fill, alpha=0.8)
    if runs:
        axes.hlines(median(run.final for run in runs.values()), place - 0.13, place + 0.13, color=color, lw=2)
        axes.plot([], [], marker, color=color, label=label)
    return points


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
    axes.legend(*axes.get_legend_handles_labels(), ncols=3, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.16))
    return figure


def plot_core(results: Results) -> Figure:
    """Final rewards without replay and with R3: a line for each seed."""
    arms = ("uncorrected", "pg_is", "grpo_mu", "minirl_c5")
    figure = make_figure(8, 2.8)
    for axes, arm in zip(figure.subplots(1, len(arms), sharey=True), arms, strict=True):
        first, second = (
            mark_runs(axes, place, results.runs(arm, replay), COLORS[replay], MARKERS[replay])
            for place, replay in enumerate(("none", "r3"))
        )
        for seed in first.keys() & second.keys():
            axes.plot(*zip(first[seed], second[seed], strict=True), color="#c8ccd2", lw=0.8, zorder=0)
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
            label = None if place else REPLAYS[replay]
            axes.plot([x] * len(values), values, MARKERS[replay], color=COLORS[replay], ms=5, alpha=0.7, label=label)
            axes.hlines(difference.median, x - 0.08, x + 0.08, color=COLORS[replay], lw=2.5)
    axes.axhline(0, color="black", lw=0.8)
    axes.set_xticks(range(len(ANCHORS)), list(ANCHORS))
    axes.set_xlim(-0.5, len(ANCHORS) - 0.5)
    tidy(axes, "above 0: the mask at mu ends higher than the equal mask at old", "", "difference of\nfinal rewards")
    axes.legend(*axes.get_legend_handles_labels(), frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


@dataclass(frozen=True, slots=True)
class Line:
    """A cell, as a line of a figure and of the table below it."""

    label: str
    arm: str
    replay: str
    color: str
    dash: str
    axes: Mapping[str, int]
    """Settings of the cell that differ from the usual ones."""


def list_lines(*looks: tuple[str, str, str, str, str], **axes: int) -> list[Line]:
    """The lines of a column: label, arm, replay, colour and dash of each."""
    return [Line(label, arm, replay, COLORS[color], dash, axes) for label, arm, replay, color, dash in looks]


CURVES: dict[str, dict[str, list[Line]]] = {
    "staleness": {
        f"N = {updates}": list_lines(
            ("no mask, no replay", "no_clip", "none", "extra", ":"),
            ("no mask, R2", "no_clip", "r2", "further", "-."),
            ("no replay", "minirl_c5", "none", "none", "--"),
            ("R2", "minirl_c5", "r2", "r2", "-"),
            ("R3", "minirl_c5", "r3", "r3", "-"),
            updates=updates,
        )
        for updates in (2, 4, 8)
    },
    "on_policy": {
        label: list_lines(
            ("MiniRL", "minirl_c5", replay, "r3", "-"),
            ("with length norm", "length_norm", replay, "r2", "--"),
            ("without weight to mu", "no_is", replay, "extra", ":"),
            updates=1,
        )
        for replay, label in REPLAYS.items()
        if replay != "r2"
    },
    "cold_starts": {
        "N = 2, R2": [
            line
            for length, color, dash in ((340, "extra", ":"), (420, "r2", "--"), (560, "r3", "-"))
            for line in list_lines(
                (f"{length} supervised steps", "minirl_c5", "r2", color, dash), updates=2, cold_start=length
            )
        ]
    },
}
"""MiniRL's figures 2 to 4, 1 and 5: columns, each with its lines."""


def plot_curves(results: Results, columns: Mapping[str, Sequence[Line]]) -> Figure:
    """Reward, entropy, k3 and held-out score by update, a column per entry: medians and range of the seeds."""
    figure = make_figure(3.2 * len(columns) + 0.6, 7)
    grid = figure.subplots(4, len(columns), sharex=True, sharey="row", squeeze=False)
    for column, (title, lines) in enumerate(columns.items()):
        for line in lines:
            if runs := results.runs(line.arm, line.replay, **line.axes):
                plot_line(grid[:, column], line, runs)
        for row, name in enumerate((*METRICS.values(), "held-out score")):
            panel = grid[row, column]
            tidy(panel, "" if row else title, "updates" if row == 3 else "", "" if column else name)
        grid[2, column].set_yscale("log")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2 * len(columns) - 1, frameon=False)
    return figure


def plot_line(rows: Sequence[Axes], line: Line, runs: Runs) -> None:
    """Plot the medians of a cell's runs into four rows."""
    every = list(runs.values())
    for axes, metric in zip(rows, METRICS, strict=False):
        values = np.array([smooth(series_of(run, metric)) for run in every])
        updates = every[0].cell.updates * np.arange(1, values.shape[1] + 1)
        axes.plot(updates, np.nanmedian(values, 0), line.dash, color=line.color, lw=1.6, label=line.label)
        axes.fill_between(updates, np.nanmin(values, 0), np.nanmax(values, 0), color=line.color, alpha=0.1, lw=0)
    scores = np.array([(run.scores + [0.0] * 5)[:5] for run in every])
    quarters = np.arange(5) * every[0].cell.budget / 4
    rows[3].plot(quarters, np.median(scores, 0), line.dash, color=line.color, lw=1.6, marker=".", ms=4)


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
    figure.legend(*panels[2].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


FIGURES: dict[str, Callable[[Results], Figure]] = {
    "calibration": plot_calibration, "trust_regions": plot_trust_regions, "anchors": plot_anchors, "core": plot_core,
    "gaps": plot_gaps,
} | {name: partial(plot_curves, columns=columns) for name, columns in CURVES.items()}  # fmt: skip
