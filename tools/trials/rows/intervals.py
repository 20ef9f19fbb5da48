"""Intervals of a few independent seeds, and the words for them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

Interval = tuple[float, float, float]
"""Middle, low, high."""


def median_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Return the median and the narrowest pair of order statistics that holds the true median with ``level``.

    Free of assumptions on the distribution: the pair of ranks r and n + 1 - r has the coverage ``1 - 2 P(X < r)`` with
    X from Binomial(n, 1/2). The extremes if ``level`` is out of reach.
    """
    ordered = sorted(values)
    size, rank, missing = len(ordered), 0, 2 * 0.5 ** len(ordered)
    while rank + 1 < (size + 1) // 2 and 1 - (missing + 2 * math.comb(size, rank + 1) * 0.5**size) >= level:
        rank += 1
        missing += 2 * math.comb(size, rank) * 0.5**size
    return float(np.median(ordered)), ordered[rank], ordered[size - 1 - rank]


def first_reach(curve: Sequence[float], positions: Sequence[float], level: float) -> float:
    """Return where a curve [S] first reaches ``level``, interpolated between positions [S].

    ValueError if the curve stays below.
    """
    reached = np.flatnonzero(np.asarray(curve) >= level)
    if not reached.size:
        raise ValueError(f"a curve that ends at {curve[-1]} never reaches {level}")
    place = int(reached[0])
    if place == 0:
        return float(positions[0])
    share = (level - curve[place - 1]) / (curve[place] - curve[place - 1])
    return float(positions[place - 1] + share * (positions[place] - positions[place - 1]))


def describe(interval: Sequence[float], digits: int = 2, unit: str = "", signed: bool = False) -> str:
    """Return ``median unit (low to high)`` of a ``median_interval`` [3]."""
    middle, low, high = (f"{value:{'+' if signed else ''}.{digits}f}" for value in interval)
    return f"{middle}{unit} ({low} to {high})"


def plot_intervals(
    axes: Axes, intervals: Sequence[Sequence[float]], rows: np.ndarray, *, color: str, label: str
) -> None:
    """Plot one horizontal error bar per ``median_interval`` [B][3], at heights ``rows`` [B]."""
    middles, lows, highs = np.array(intervals).T
    errors = [middles - lows, highs - middles]
    axes.errorbar(middles, rows, xerr=errors, fmt="o", color=color, markersize=4, capsize=2, label=label)
