"""Judges the records of a run one after the other; what it keeps of them does not grow with the run."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from megarl.config.tables.health import FALLING, HealthConfig
from megarl.run.metrics_log import UNJUDGED
from megarl.run.verdict import LEVELS, Verdict
from megarl.watch.health.checks import CHECKS, METRICS, Check, largest

_RECENT_STEPS = 50
_SPIKE_STEPS = 20
_FEWEST_PROMPTS = 48
"""Of fewer, none may have contrast by chance."""
_NOISE = 6.0
"""Standard deviations: the best of many noisy means is too good by three of them, and the latest may be as bad."""


def judge_run(records: Sequence[Mapping[str, Any]], limits: HealthConfig | None = None) -> list[Verdict]:
    """Return the warnings and alarms that hold after the last record, worst first; empty for a healthy run.

    records: lines of metrics.jsonl as ``read_metrics`` returns them; of the last ones alone, their first steps are the
    run's start. limits: default those of [health].
    """
    health = Health(HealthConfig() if limits is None else limits)
    for record in records:
        health.add(record)
    return health.verdicts()


class Health:
    """The verdicts about a run so far."""

    def __init__(self, limits: HealthConfig) -> None:
        self._judges = [_Judge(check, limits) for check in CHECKS if getattr(limits, check.name) != "off"]
        self._of_minis: dict[str, list[float]] = {}
        self._told: dict[str, Verdict] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        """Judge the next record. A step is judged when its own record comes, after those of its mini-batches."""
        if record["kind"] == "minibatch":
            for name in METRICS & record.keys():
                self._of_minis.setdefault(name, []).append(record[name])
        elif record["kind"] == "step":
            minis, self._of_minis = self._of_minis, {}
            values = {name: sum(found) / len(found) for name, found in minis.items()}
            if norms := minis.get("grad_norm"):
                values["grad_norm"] = largest(norms)
            values |= {name: record[name] for name in METRICS & record.keys()}
            for judge in self._judges:
                judge.take(record["step"], values, record.get(UNJUDGED))

    def verdicts(self) -> list[Verdict]:
        """Return warnings and alarms, worst first, then those that began first."""
        found = [judge.verdict() for judge in self._judges if judge.level]
        return sorted(found, key=lambda verdict: (verdict.level != "alarm", verdict.since))

    def news(self) -> list[str]:
        """Return lines about verdicts that have appeared, become alarms or ended since the last call."""
        verdicts, told = {verdict.check: verdict for verdict in self.verdicts()}, self._told
        self._told, lines = verdicts, list[str]()
        for check, verdict in verdicts.items():
            if check not in told:
                lines += verdict.lines()
            elif told[check].level != "alarm" == verdict.level:
                lines += verdict.lines()[:1]
        return lines + [f"{check}: within its limits again" for check in told if check not in verdicts]


class _Judge:
    """One check, and what it remembers."""

    def __init__(self, check: Check, limits: HealthConfig) -> None:
        self.level = 0
        self._check, self._limits = check, getattr(limits, check.name)
        self._start_steps = limits.start_steps
        at_once = check.against in ("streak", "spikes")
        self._rise = 1 if at_once else limits.patience_steps
        self._fall = {"streak": 1, "spikes": _SPIKE_STEPS}.get(check.against, limits.patience_steps)
        self._levels: deque[int] = deque(maxlen=max(self._rise, self._fall, _FEWEST_PROMPTS))
        self._reference: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._latest: deque[float] = deque(maxlen=limits.start_steps)
        self._best, self._streak = 0.0, 0
        self._since: int | None = None
        self._found = ""

    def take(self, step: int, values: Mapping[str, float], unjudged: str | None = None) -> None:
        """Judge a step. One without the check's metrics changes nothing. unjudged: why responses have no reward."""
        given, value = self._check.look(values)
        if value is None:
            return
        is_number = math.isfinite(value)
        score = self._score(value) if is_number else value
        if score is None:
            return
        level = self._grade(score) if is_number else 2
        if not level and value > 0 and self._check.against in ("calm", "spikes"):
            self._reference.append(value)
        self._levels.append(level)
        latest = [*self._levels]
        rise = max(self._rise, _steps_of_enough_prompts(given)) if is_number else 1
        certain = min(latest[-rise:]) if len(latest) >= rise else 0
        self.level = max(certain, min(self.level, max(latest[-self._fall :])))
        if level:
            wrong = ", ".join(f"{name}: found {one}" for name, one in given.items() if not math.isfinite(one))
            self._found = self._describe(value, score) if is_number else wrong
            if self._check.names_failure and unjudged:
                self._found += f"; {unjudged}"
            if self._since is None:
                self._since = step - max(0, self._streak - 1)
        elif not self.level:
            self._since = None

    def verdict(self) -> Verdict:
        check = self._check
        return Verdict(check.name, LEVELS[self.level], self._found, self._since, check.cause, check.advice)

    def _score(self, value: float) -> float | None:
        """Return what is compared with the limits; None as long as there is nothing to compare with."""
        match self._check.against:
            case "limits":
                return value
            case "streak":
                self._streak = self._streak + 1 if value else 0
                return self._streak
            case "best":
                return self._over_best(value)
            case against:
                known = self._reference
                if len(known) < self._start_steps:
                    if value > 0 or against == "start":
                        known.append(value)
                    return None
                reference = max(median(known), self._check.least)
                return value / reference if reference > 0 else None

    def _over_best(self, value: float) -> float | None:
        """Return the mean of the latest values over the best one; 1 if the difference may be noise."""
        if self._latest:
            self._reference.append(abs(value - self._latest[-1]))
        self._latest.append(value)
        if len(self._latest) < self._start_steps or not self._reference:
            return None
        mean = sum(self._latest) / len(self._latest)
        self._best = max(self._best, mean)
        # The median distance of two independent normal values is 0.95 standard deviations.
        noise = median(self._reference) / math.sqrt(len(self._latest))
        is_lower = mean < self._best - _NOISE * noise
        return mean / self._best if is_lower else 1.0

    def _grade(self, score: float) -> int:
        falling = self._check.name in FALLING
        return sum(score <= limit if falling else score >= limit for limit in self._limits)

    def _describe(self, value: float, score: float) -> str:
        check = self._check
        limits = ", ".join(
            f"{level} from {check.score_form.format(limit)}{' down' * (check.name in FALLING)}"
            for level, limit in zip(LEVELS[1:], self._limits, strict=False)
        )
        shown = check.score_form.format(score)
        told = {
            "limits": shown,
            "streak": f"{shown} in a row",
            "start": f"{check.form.format(value)}, {shown} the start",
            "best": f"{check.form.format(value)}; lately {shown} the best",
        }.get(check.against, f"{check.form.format(value)}, {shown} the usual")
        return f"{check.what} {told} ({limits})"


def _steps_of_enough_prompts(given: Mapping[str, float]) -> int:
    """Return the steps that have _FEWEST_PROMPTS; 1 for a check that does not count prompts."""
    samples, of_prompt = given.get("sampling/samples", 0.0), given.get("sampling/samples_per_prompt", 0.0)
    if not (math.isfinite(samples) and 0.0 < of_prompt <= samples):
        return 1
    return math.ceil(min(_FEWEST_PROMPTS, _FEWEST_PROMPTS * of_prompt / samples))
