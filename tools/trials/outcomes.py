"""What the metrics of a run say."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from megarl.run.metrics_log import iterate_metrics
from megarl.run.status import read_status
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run, as it is stored."""

    cell: Cell
    seed: int
    digest: str
    """``testbed.fingerprint``, of all that decides the run."""
    broke_off: bool
    """Whether a value was not finite; later rewards then count as 0."""
    series: dict[str, list[float]]
    """Short name of a metric -> value of each step."""
    scores: list[float]
    """Share of right responses to held-out prompts, before the first step and after each quarter."""

    @property
    def rewards(self) -> list[float]:
        """Share of right responses, of each step."""
        return [*self.series["reward"], *[0.0] * (self.cell.steps - len(self.series["reward"]))]

    @property
    def window(self) -> int:
        """Steps of the means that judge a run: a quarter of all."""
        return max(self.cell.steps // 4, 1)

    @property
    def final(self) -> float:
        """Mean reward of the last quarter."""
        return mean(self.rewards[-self.window :])

    @property
    def growth(self) -> float:
        """Mean k3 of the last quarter that ran, relative to the first step's."""
        return mean(self.series["k3"][-self.window :]) / self.series["k3"][0]

    @property
    def has_collapsed(self) -> bool:
        """Whether the run ended below half of its best quarter, or below half of its first reward."""
        windows = [mean(self.rewards[i : i + self.window]) for i in range(len(self.rewards) - self.window + 1)]
        return self.final < max(*windows, self.rewards[0]) / 2


def read_outcome(run: Path, cell: Cell, seed: int, digest: str) -> Outcome:
    """Read the metrics of a run's folder, rounded to four digits.

    SystemExit for a run that neither finished nor met a value that is not finite: what stopped it is no outcome.
    """
    status = read_status(run) if (run / "status.json").exists() else {"state": "not begun", "error_kind": None}
    broke_off = status["error_kind"] == "NumericsError"
    if status["state"] != "finished" and not broke_off:
        raise SystemExit(f"{run}: {status['state']}, expected a finished run; see log.txt, and give the command again")
    steps: dict[float, dict[str, Any]] = {}
    scores: list[float] = []
    for record in iterate_metrics(run / "metrics.jsonl"):
        if record["kind"] == "step":
            steps[record["step"]] = record
        elif record["kind"] == "eval":
            scores.append(record["eval/pass_rate"])
    series = {
        name: [float(f"{step.get(metric, math.nan):.4g}") for step in steps.values()]
        for name, metric in METRICS.items()
    }
    return Outcome(cell, seed, digest, broke_off, series, scores)


def to_line(outcome: Outcome) -> str:
    """One line of JSON."""
    return json.dumps(asdict(outcome), separators=(",", ":"))


def from_line(line: str) -> Outcome:
    """Read a line of JSON."""
    table = json.loads(line)
    return Outcome(**table | {"cell": Cell(**table["cell"])})
