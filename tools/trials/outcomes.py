"""What the metrics of a run say, and intervals over runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb, sqrt
from pathlib import Path
from statistics import mean, median
from typing import Any

from megarl.run.metrics_log import iterate_metrics
from trials.grids import Cell

METRICS = {
    "reward": "reward/mean",
    "entropy": "rollout/entropy",
    "k3": "rollout/k3",
    "flip": "router/flip",
    "native_flip": "router/native/flip",
    "largest_ratio": "rollout/ratio/max",
    "ess": "rollout/ess/fraction",
}
"""Stored per step, under a short name. k3 is of KL[mu || old], in nats per token; ratios are old/mu."""
WINDOW = 10
"""Steps of the means that judge a run."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run, as it is stored."""

    cell: Cell
    seed: int
    code: int
    """megarl's exit code; not 0: the run broke off, and its later rewards count as 0."""
    series: dict[str, list[float]]
    """Short name of a metric -> value of each step."""
    scores: list[float]
    """Share of right responses to held-out prompts, before the first step and after every tenth."""

    @property
    def rewards(self) -> list[float]:
        """Share of right responses, of each step."""
        return [*self.series["reward"], *[0.0] * (self.cell.steps - len(self.series["reward"]))]

    @property
    def final(self) -> float:
        """Mean reward of the last ten steps."""
        return mean(self.rewards[-WINDOW:])

    @property
    def has_collapsed(self) -> bool:
        """Whether the run ended below half of its best ten steps, or below half of its first reward."""
        windows = [mean(self.rewards[i : i + WINDOW]) for i in range(len(self.rewards) - WINDOW + 1)]
        return self.code != 0 or self.final < max(*windows, self.rewards[0]) / 2

    def average(self, metric: str) -> float:
        """The mean of a metric over all steps that have it."""
        return mean(self.series[metric])


def read_outcome(run: Path, cell: Cell, seed: int, code: int) -> Outcome:
    """Read the metrics of a run's folder, rounded to four digits."""
    steps: dict[float, dict[str, Any]] = {}
    scores: list[float] = []
    records = iterate_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else ()
    for record in records:
        if record["kind"] == "step":
            steps[record["step"]] = record
        elif record["kind"] == "eval":
            scores.append(record["eval/pass_rate"])
    series = {
        name: [float(f"{step[metric]:.4g}") for step in steps.values() if metric in step]
        for name, metric in METRICS.items()
    }
    return Outcome(cell, seed, code, series, scores)


def to_line(outcome: Outcome) -> str:
    """One line of JSON."""
    return json.dumps(asdict(outcome), separators=(",", ":"))


def from_line(line: str) -> Outcome:
    """Read a line of JSON."""
    table = json.loads(line)
    return Outcome(**table | {"cell": Cell(**table["cell"])})


def bound_share(count: int, total: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share."""
    z = 1.959964
    center, spread = count + z * z / 2, z * sqrt(count * (total - count) / total + z * z / 4)
    return max(center - spread, 0.0) / (total + z * z), min(center + spread, total + z * z) / (total + z * z)


@dataclass(frozen=True, slots=True)
class Difference:
    """Paired differences over seeds, with an interval of their median that assumes no distribution.

    ``[d_(k), d_(n+1-k)]`` covers the median with ``1 - 2 P[Binomial(n, 1/2) < k]``; k is the largest for at least 95 %,
    or 1. Six pairs give [least, largest] with 96.9 %, five 93.8 %, three 75 %.
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
    pairs = sorted(a - b for a, b in zip(first, second, strict=True))
    n, best = len(pairs), (1, cover_median(len(pairs), 1))
    for k in range(2, n // 2 + 1):
        if (coverage := cover_median(n, k)) >= 0.95:
            best = k, coverage
    k, coverage = best
    return Difference(median(pairs), pairs[k - 1], pairs[n - k], coverage, n)


def cover_median(n: int, k: int) -> float:
    """Return the chance that the k-th least and k-th largest of n values enclose the median."""
    return 1 - 2 * sum(comb(n, i) for i in range(k)) / 2**n
