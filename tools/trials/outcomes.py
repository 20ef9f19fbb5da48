"""What the metrics of a run say."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
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
