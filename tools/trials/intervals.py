"""Intervals of a few independent seeds, and the words for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

Interval = tuple[float, float, float]
"""Middle, low, high."""


def median_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Return the median and the narrowest pair of order statistics that holds the true median with ``level``.

    Free of assumptions on the distribution. The extremes if ``level`` is out of reach.
    """
    ordered = sorted(values)
    rank = narrowest_rank(len(ordered), level)
    return float(np.median(ordered)), ordered[rank - 1], ordered[-rank]


def narrowest_rank(size: int, level: float = 0.95) -> int:
    """Return the largest rank whose pair of order statistics covers the median with ``level``; 1 if none does."""
    return max((rank for rank in range(2, size // 2 + 1) if cover_median(size, rank) >= level), default=1)


def cover_median(size: int, rank: int) -> float:
    """Return the chance that the values of ranks r and n + 1 - r, of n, enclose the median of the distribution.

    ``1 - 2 P[X < r]`` with X from Binomial(n, 1/2).
    """
    return 1 - 2 * sum(math.comb(size, i) for i in range(rank)) / 2**size


@dataclass(frozen=True, slots=True)
class Difference:
    """Paired differences over seeds: the median, and the interval of ``median_interval``.

    Six pairs give [least, largest] with a coverage of 96.9 %, five 93.8 %, three 75 %.
    """

    median: float
    low: float
    high: float
    coverage: float
    pairs: int

    @property
    def is_shown(self) -> bool:
        """Whether the interval has at least 95 % and leaves 0 out."""
        return self.coverage >= 0.95 and not self.low <= 0 <= self.high


def compare_pairs(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Compare the values of equal seeds: first minus second."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    size = len(differences)
    return Difference(*median_interval(differences), cover_median(size, narrowest_rank(size)), size)


def bound_share(count: int, total: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share."""
    z = 1.959964
    center, spread = count + z * z / 2, z * math.sqrt(count * (total - count) / total + z * z / 4)
    return max(center - spread, 0.0) / (total + z * z), min(center + spread, total + z * z) / (total + z * z)


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
