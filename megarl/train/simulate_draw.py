"""The pictures of ``megarl simulate``, in the report's style: pass@k, cost by pass rate, counts by pass rate, rules."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter, StrMethodFormatter

from megarl.core.sampling import Sequential, expected_samples, stopping_law
from megarl.report.panels import STYLE
from megarl.report.plots import BLUE, GREY, MUTED, ORANGE, PURPLE, RED, TEAL
from megarl.train.simulate_exact import Exact
from megarl.train.simulate_fit import BetaMixture
from megarl.train.simulate_outcome import Outcome
from megarl.train.simulate_rules import Arm

_BINS = 16
_LEAST_PROMPTS = 4
"""Prompts in a bin, below which its mean says too little to be drawn."""


def draw_pass_at_k(mixture: BetaMixture, points: dict[int, float], rates: np.ndarray) -> bytes:
    """The curve of the mixture with the points it was fitted to, and the pass rates that were drawn from it."""
    with mpl.rc_context(STYLE):
        figure, (left, right) = _figure(1, 2, (10.4, 3.9), width_ratios=(1.15, 1))
        top = max([256, *points]) * 2
        ks = np.geomspace(1, top, 120)
        left.plot(ks, mixture.pass_at(ks), color=BLUE, label="mixture")
        if points:
            left.plot(
                list(points),
                list(points.values()),
                "o",
                color=ORANGE,
                markersize=7,
                mec="white",
                label="given",
                zorder=3,
            )
        if mixture.never > 0:
            left.axhline(1 - mixture.never, color=GREY, linestyle=":", linewidth=1.1, label="can be solved at all")
        left.set_xscale("log", base=2)
        left.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
        left.set_xlabel("samples k")
        left.set_ylabel("pass@k")
        left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        left.set_ylim(0, 1.02)
        _legend(left)
        _draw_density(right, mixture, rates)
        return _png(figure)


def _draw_density(axes: Axes, mixture: BetaMixture, rates: np.ndarray) -> None:
    edges = np.linspace(0, 1, 21)
    width = float(edges[1])
    shares = np.histogram(rates[rates > 0], edges)[0] / rates.size
    axes.stairs(shares, edges, fill=True, color=BLUE, alpha=0.28, label="drawn")
    inside = np.linspace(0.004, 0.996, 249)
    axes.plot(inside, width * mixture.density(inside), color=BLUE, label="mixture")
    top = float(shares.max())
    if mixture.never > 0:
        never = float((rates == 0).mean())
        axes.bar([-width], [never], 0.8 * width, color=GREY, label="never solved")
        top = max(top, never)
    axes.set_ylim(0, 1.08 * top)  # the density may be infinite at 0 and 1
    axes.set_xlim(-1.7 * width, 1.01)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.set_xlabel("pass rate p")
    axes.set_ylabel(f"share of prompts per {width:g}")
    _legend(axes)


def draw_cost(balance: Arm, pos: Arm, outcomes: dict[str, Outcome]) -> bytes:
    """What a prompt costs by its pass rate: for both classes a U, for positives alone a slope."""
    with mpl.rc_context(STYLE):
        figure, panels = _figure(1, 2, (10.4, 4.2), sharey=True)
        for axes, arm in zip(panels, (balance, pos), strict=True):
            rule = arm.fixed
            assert isinstance(rule, Sequential)
            _draw_cost(axes, rule, outcomes[arm.name])
            axes.set_title(f"{arm.name}: {_needs(rule)}", loc="left", fontsize=10, fontweight="bold")
            axes.set_xlabel("pass rate p")
            _legend(axes, above=False)
        panels[0].set_ylabel("samples per prompt")
        return _png(figure)


def _draw_cost(axes: Axes, rule: Sequential, outcome: Outcome) -> None:
    rates = np.linspace(0.005, 0.995, 199)
    single = [expected_samples(p, rule.positives, rule.negatives) for p in rates]
    axes.plot(rates, single, color=TEAL, label="one at a time, no cap")
    if rule.positives == rule.negatives:
        axes.plot(
            rates, rule.positives / (rates * (1 - rates)), color=RED, linestyle=":", label="k / (p q), as posts have it"
        )
    ends = np.linspace(0, 1, 201)
    law = [stopping_law(rule, p).expected_samples for p in ends]
    axes.plot(ends, law, color=BLUE, label=f"rounds of {rule.round_size}, at most {rule.max_samples}")
    middles, means = _binned(outcome.rates, outcome.drawn)
    axes.plot(middles, means, "o", color=ORANGE, markersize=5.5, mec="white", label="simulated", zorder=3)
    axes.set_yscale("log", base=2)
    axes.set_ylim(0.8, 3.2 * rule.max_samples)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))


def draw_counts(outcomes: dict[str, Outcome]) -> bytes:
    """Samples drawn and samples trained on, by pass rate, one panel per rule."""
    with mpl.rc_context(STYLE):
        columns = 3
        rows = -(-len(outcomes) // columns)
        figure, grid = _figure(rows, columns, (10.4, 2.55 * rows + 0.3), sharex=True, sharey=True)
        panels = np.asarray(grid).reshape(-1)
        top = 1.0
        for axes, (name, outcome) in zip(panels, outcomes.items(), strict=False):
            # Where all that is drawn trains, the wide line shows on both sides of the narrow one.
            for values, color, label, width in (
                (outcome.drawn, BLUE, "drawn", 3.6),
                (outcome.trained, ORANGE, "in the batch", 1.5),
            ):
                middles, means = _binned(outcome.rates, values)
                axes.fill_between(middles, means, color=color, alpha=0.14, linewidth=0)
                axes.plot(middles, means, color=color, linewidth=width, marker="o", markersize=1.6 + width, label=label)
                top = max(top, float(means.max(initial=0.0)))
            axes.set_title(name, loc="left", fontsize=10, fontweight="bold")
            axes.tick_params(labelbottom=True)
        for axes in panels[len(outcomes) :]:
            axes.set_visible(False)
        panels[0].set_ylim(0, 1.06 * top)
        for axes in panels[: len(outcomes)][-columns:]:
            axes.set_xlabel("pass rate p")
        for row in range(rows):
            panels[row * columns].set_ylabel("samples per prompt")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=2, handlelength=1.4)
        return _png(figure)


def draw_rules(rows: Sequence[tuple[Arm, Outcome, Exact | None]]) -> bytes:
    """The table as bars, exact averages as ticks."""
    with mpl.rc_context(STYLE):
        figure, panels = _figure(1, 4, (10.4, 0.27 * len(rows) + 1.2), sharey=True)
        places = np.arange(len(rows))
        values = {
            "samples per prompt": ([o.cost for _, o, _ in rows], [e.cost if e else np.nan for *_, e in rows], BLUE),
            "prompts with contrast": ([o.effective for _, o, _ in rows], [_of(e, "effective") for *_, e in rows], TEAL),
            "noise x samples drawn": (
                [o.cost * o.noise for _, o, _ in rows],
                [_noise(e, None) for *_, e in rows],
                PURPLE,
            ),
            "noise x samples in the batch": (
                [o.train_cost * o.noise for _, o, _ in rows],
                [_noise(e, o.train_cost) for _, o, e in rows],
                ORANGE,
            ),
        }
        for axes, (label, (means, averages, color)) in zip(panels, values.items(), strict=True):
            found, known = (np.where(np.isfinite(some), some, np.nan) for some in (means, averages))
            axes.barh(places, found, 0.66, color=color, alpha=0.55, linewidth=0)
            axes.plot(known, places, "|", color=color, markersize=10, markeredgewidth=2)
            axes.set_xlabel(label)
            axes.grid(axis="y", visible=False)
            axes.tick_params(axis="y", length=0)
            axes.set_xlim(0, 1.06 * max(np.nanmax([*found, *known, 0.0]), 1e-3))
        panels[1].xaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        panels[0].set_yticks(places, [arm.name for arm, *_ in rows])
        panels[0].invert_yaxis()
        figure.legend(
            [
                Patch(color=MUTED, alpha=0.55),
                Line2D([], [], color=MUTED, marker="|", markersize=10, mew=2, linestyle=""),
            ],
            ["simulated", "exact"],
            loc="outside upper left",
            ncols=2,
            handlelength=1.4,
        )
        return _png(figure)


def _of(exact: Exact | None, name: str) -> float:
    return float("nan") if exact is None else float(getattr(exact, name))


def _noise(exact: Exact | None, samples: float | None) -> float:
    if exact is None:
        return float("nan")
    return (exact.cost if samples is None else samples) * exact.noise


def _needs(rule: Sequential) -> str:
    classes = [f"{count} {name}" for count, name in ((rule.positives, "right"), (rule.negatives, "wrong")) if count]
    return "until " + " and ".join(classes)


def _binned(rates: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean pass rate and mean value by bin of pass rate, p = 0 in one of its own; values: [2, P], NaN left out."""
    known = ~np.isnan(values)
    bins = np.where(rates == 0, 0, 1 + np.minimum((rates * _BINS).astype(np.int64), _BINS - 1))
    counts = np.bincount(bins, weights=known.sum(axis=0), minlength=_BINS + 1)
    sums = np.bincount(bins, weights=np.nansum(values, axis=0), minlength=_BINS + 1)
    middles = np.bincount(bins, weights=rates * known.sum(axis=0), minlength=_BINS + 1)
    some = counts >= 2 * _LEAST_PROMPTS
    return middles[some] / counts[some], sums[some] / counts[some]


def _figure(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, **options)


def _legend(axes: Axes, *, above: bool = True) -> None:
    if above:
        axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=3, handlelength=1.4, columnspacing=1.2)
    else:
        axes.legend(loc="upper center", ncols=2, handlelength=1.6, columnspacing=1.2)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=144)
    return buffer.getvalue()
