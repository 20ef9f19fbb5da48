"""The curves of a run, from its metric records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from megarl.files.texts import read_table
from megarl.run.metrics_log import UNJUDGED


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric over the run."""

    x: np.ndarray
    """float64 [P], global step; mini-batch m of n is at step + m/n."""
    y: np.ndarray
    """float64 [P], may hold NaN and infinities."""

    @property
    def finite(self) -> np.ndarray:
        """float64 [F], the F values that can be plotted."""
        return self.y[np.isfinite(self.y)]

    def per_step(self) -> Curve:
        """Return the mean of each step's finite values; NaN for a step without any."""
        steps, group = np.unique(np.floor(self.x), return_inverse=True)
        group, values = group[np.isfinite(self.y)], self.finite
        count = np.bincount(group, minlength=len(steps))
        total = np.bincount(group, weights=values, minlength=len(steps))
        return Curve(steps, np.where(count > 0, total / np.maximum(count, 1), np.nan))


Curves = Mapping[str, Curve]
"""By metric."""


def make_curves(records: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """Return the curve of every metric with a finite value, from records as ``read_metrics`` returns them.

    A metric in several kinds of record is taken from "step", else from "minibatch".
    """
    num_minibatches = Counter(record["step"] for record in records if record["kind"] == "minibatch")
    points: dict[str, dict[str, list[tuple[float, float]]]] = {"eval": {}, "minibatch": {}, "step": {}}
    for record in records:
        x = float(record["step"])
        if record["kind"] == "minibatch":
            x += record["minibatch"] / num_minibatches[record["step"]]
        for name, value in record.items():
            if name not in ("kind", "step", "minibatch", UNJUDGED):
                points[record["kind"]].setdefault(name, []).append((x, value))
    curves = [(name, Curve(*np.array(p, dtype=np.float64).T)) for kind in points.values() for name, p in kind.items()]
    return {name: curve for name, curve in curves if curve.finite.size}


def benchmarks(curves: Curves) -> list[str]:
    """Return the benchmarks of a run with several benchmarks; a single benchmark has the name "eval/..."."""
    return [name[5:-10] for name in curves if name.startswith("eval/") and name.endswith("/pass_rate") and name[5:-10]]


def layer_curves(curves: Curves, prefixes: Sequence[str]) -> dict[int, Curve]:
    """Return the curves of the first prefix that has any, by layer number, in order.

    The panel names the routers' native choice first, which replay records, because the experts in use agree by
    construction.
    """
    for prefix in prefixes:
        of_prefix = {name.removeprefix(prefix): curve for name, curve in curves.items() if name.startswith(prefix)}
        if numbers := sorted((int(number), number) for number in of_prefix if number.isdigit()):
            return {layer: of_prefix[number] for layer, number in numbers}
    return {}


def smooth(y: np.ndarray, window: int) -> np.ndarray:
    """Return the centred moving average [P] over about ``window`` neighbours, fewer at the ends; NaN stays NaN."""
    finite = np.isfinite(y)
    kernel = np.ones(window | 1)  # odd: the average has a centre
    half = len(kernel) // 2
    total = np.convolve(np.pad(np.where(finite, y, 0.0), half), kernel, mode="valid")
    count = np.convolve(np.pad(finite.astype(np.float64), half), kernel, mode="valid")
    return np.where(finite, total / np.maximum(count, 1.0), np.nan)


def thin(curve: Curve, max_points: int = 1000) -> Curve:
    """Return at most about ``most`` points of a curve: of each run of neighbours the smallest and the largest value.

    A spike of a single step stays. Runs without a finite value keep one point, the gap.
    """
    if len(curve.x) <= max_points:
        return curve
    runs = np.array_split(np.arange(len(curve.x)), max_points // 2)
    indices: list[int] = []
    for run in runs:
        finite = run[np.isfinite(curve.y[run])]
        y = curve.y[finite]
        indices += sorted({int(finite[y.argmin()]), int(finite[y.argmax()])}) if finite.size else [int(run[0])]
    return Curve(curve.x[indices], curve.y[indices])


Scale = Literal["free", "zero", "log", "percent", "whole percent"]
"""The y axis: as it comes; from zero up; decades; percent from zero up, from 0 to 100."""


@dataclass(frozen=True, slots=True)
class Line:
    """One metric in a panel."""

    metric: str
    label: str
    color: str = "blue"
    """A name of ``figures.COLORS``."""
    style: Literal["line", "dots"] = "line"
    """"dots" is for evaluations: evaluations are few, and never smoothed."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One figure of the report."""

    title: str
    caption: str
    """How to read the figure, in one or two sentences."""
    y_label: str
    lines: tuple[Line, ...] = ()
    metrics: tuple[str, ...] = ()
    """Of a map of layers against steps, prefixes: the first prefix with metrics counts."""
    scale: Scale = "free"
    wide: bool = False
    """True for the whole width of the page."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The metrics; any metric is enough."""
        return (*(f"{prefix}XX" for prefix in self.metrics), *(line.metric for line in self.lines))

    def is_recorded(self, curves: Curves) -> bool:
        """True if any metric has a value to plot."""
        return bool(layer_curves(curves, self.metrics)) or any(name in curves for name in self.needs)


def read_panels() -> dict[str, Panel]:
    """Return the panels by their short names, in the order of the page."""
    tables = read_table(__file__, "panels.toml").items()
    return {k: Panel(**table | {"lines": tuple(Line(*row) for row in table.get("lines", ()))}) for k, table in tables}
