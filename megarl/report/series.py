"""The curves of a run, from its metric records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

LAYER_PREFIXES = ("router/native/flip/layer_", "router/flip/layer_")


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric over the run."""

    x: np.ndarray
    """float64 [P], global step; mini-batch m of n is at step + m/n."""
    y: np.ndarray
    """float64 [P], may hold NaN and infinities."""

    @property
    def finite(self) -> np.ndarray:
        """float64, the values that can be plotted."""
        return self.y[np.isfinite(self.y)]

    def per_step(self) -> tuple[Curve, Curve, Curve]:
        """Return (mean, lowest, highest) of each step's finite values; NaN for a step without any."""
        steps, group = np.unique(np.floor(self.x), return_inverse=True)
        finite = np.isfinite(self.y)
        count = np.bincount(group[finite], minlength=len(steps))
        low, high = np.full(len(steps), np.inf), np.full(len(steps), -np.inf)
        np.minimum.at(low, group[finite], self.y[finite])
        np.maximum.at(high, group[finite], self.y[finite])
        total = np.bincount(group[finite], weights=self.y[finite], minlength=len(steps))
        some = count > 0
        rows = (total / np.maximum(count, 1), low, high)
        mean, low, high = (Curve(steps, np.where(some, row, np.nan)) for row in rows)
        return mean, low, high


@dataclass(frozen=True, slots=True)
class Series:
    """All curves of a run, by kind of record."""

    step: dict[str, Curve]
    minibatch: dict[str, Curve]
    eval: dict[str, Curve]

    @classmethod
    def of(cls, records: Iterable[dict[str, Any]]) -> Series:
        """Return the curves of records, as ``read_metrics`` returns them."""
        records = list(records)
        num_minibatches: dict[int, int] = {}
        for record in records:
            if record["kind"] == "minibatch":
                num_minibatches[record["step"]] = max(num_minibatches.get(record["step"], 0), record["minibatch"] + 1)
        points: dict[str, dict[str, list[tuple[float, float]]]] = {"step": {}, "minibatch": {}, "eval": {}}
        for record in records:
            x = float(record["step"])
            if record["kind"] == "minibatch":
                x += record["minibatch"] / num_minibatches[record["step"]]
            for name, value in record.items():
                if name not in ("kind", "step", "minibatch"):
                    points[record["kind"]].setdefault(name, []).append((x, value))
        return cls(
            **{
                kind: {name: Curve(*np.array(p, dtype=np.float64).T) for name, p in curves.items()}
                for kind, curves in points.items()
            }
        )

    def find(self, name: str) -> Curve | None:
        """Return the curve of a metric from the first kind of record with a finite value; None if there is none."""
        for curves in (self.step, self.minibatch, self.eval):
            if name in curves and curves[name].finite.size:
                return curves[name]
        return None


def layer_curves(series: Series) -> dict[int, Curve]:
    """Return the curves of router disagreement by layer number, in order.

    They compare the routers' own choice where replay recorded it, because the experts in use then agree by
    construction; otherwise the experts in use.
    """
    for prefix in LAYER_PREFIXES:
        found = {}
        for name in {**series.minibatch, **series.step}:
            number = name.removeprefix(prefix)
            curve = series.find(name) if name.startswith(prefix) and number.isdigit() else None
            if curve is not None:
                found[int(number)] = curve
        if found:
            return dict(sorted(found.items()))
    return {}


def smooth(y: np.ndarray, window: int) -> np.ndarray:
    """Return the centred moving average [P] over about ``window`` neighbours, fewer at the ends; NaN stays NaN."""
    finite = np.isfinite(y)
    kernel = np.ones(window | 1)  # odd, so that the average has a centre
    half = len(kernel) // 2
    total = np.convolve(np.pad(np.where(finite, y, 0.0), half), kernel, mode="valid")
    count = np.convolve(np.pad(finite.astype(np.float64), half), kernel, mode="valid")
    return np.where(finite, total / np.maximum(count, 1.0), np.nan)
