"""Judges the records of a run in order; the state does not grow with the run."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from megarl.config.tables.health import FALLING, HealthConfig
from megarl.run.metrics_log import UNJUDGED
from megarl.run.status import LEVELS, HealthVerdict
from megarl.watch.health.checks import CHECKS, METRICS, Check, largest

_RECENT_STEPS = 50
_SPIKE_STEPS = 20
_FEWEST_PROMPTS = 48
"""With fewer prompts, no prompt may have contrast by chance."""
_NOISE = 6.0
"""Standard deviations: the best of many noisy means may be three too high, and the latest three too low."""


def judge_run(records: Sequence[Mapping[str, Any]], limits: HealthConfig | None = None) -> list[HealthVerdict]:
    """Return the warnings and alarms that hold after the last record, worst first; empty for a healthy run.

    records: lines of metrics.jsonl as ``read_metrics`` returns them; if the first lines are missing, the first steps
    present are the run's start. limits: default those of [health].
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
        self._announced: dict[str, HealthVerdict] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        """Judge the next record. The record of a step follows the records of the mini-batches, and completes the
        step."""
        if record["kind"] == "minibatch":
            for name in METRICS & record.keys():
                self._of_minis.setdefault(name, []).append(record[name])
        elif record["kind"] == "step":
            minis, self._of_minis = self._of_minis, {}
            values = {name: sum(numbers) / len(numbers) for name, numbers in minis.items()}
            if norms := minis.get("grad_norm"):
                values["grad_norm"] = largest(norms)
            values |= {name: record[name] for name in METRICS & record.keys()}
            for judge in self._judges:
                judge.take(record["step"], values, record.get(UNJUDGED))

    def verdicts(self) -> list[HealthVerdict]:
        """Return warnings and alarms, worst first; at equal levels, the earliest first."""
        verdicts = (judge.verdict() for judge in self._judges if judge.level)
        return sorted(verdicts, key=lambda verdict: (verdict.level != "alarm", verdict.since))

    def news(self) -> list[str]:
        """Return lines about verdicts that have appeared, become alarms or ended since the last call."""
        verdicts, announced = {verdict.check: verdict for verdict in self.verdicts()}, self._announced
        self._announced, lines = verdicts, list[str]()
        for check, verdict in verdicts.items():
            if check not in announced:
                lines += verdict.lines()
            elif announced[check].level != "alarm" == verdict.level:
                lines += verdict.lines()[:1]
        return lines + [f"{check}: within its limits again" for check in announced if check not in verdicts]


class _Judge:
    """A check, and the state of the judgement."""

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
        self._observation = ""

    def take(self, step: int, values: Mapping[str, float], unjudged: str | None = None) -> None:
        """Judge a step; a step without the check's metrics changes nothing. unjudged: why responses have no reward."""
        metrics, value = self._check.look(values)
        if value is None:
            return
        is_number = math.isfinite(value)
        if (score := self._score(value) if is_number else value) is None:
            return
        level = self._grade(score) if is_number else 2
        if not level and value > 0 and self._check.against in ("calm", "spikes"):
            self._reference.append(value)
        self._levels.append(level)
        latest = [*self._levels]
        rise = max(self._rise, _steps_of_enough_prompts(metrics)) if is_number else 1
        certain = min(latest[-rise:]) if len(latest) >= rise else 0
        self.level = max(certain, min(self.level, max(latest[-self._fall :])))
        if level:
            wrong = (f"{name}: found {number}" for name, number in metrics.items() if not math.isfinite(number))
            self._observation = self._describe(value, score) if is_number else ", ".join(wrong)
            if self._check.names_failure and unjudged:
                self._observation += f"; {unjudged}"
            if self._since is None:
                self._since = step - max(0, self._streak - 1)
        elif not self.level:
            self._since = None

    def verdict(self) -> HealthVerdict:
        check, level = self._check, LEVELS[self.level]
        return HealthVerdict(check.name, level, self._observation, self._since, check.cause, check.advice)

    def _score(self, value: float) -> float | None:
        """Return the value compared with the limits; None without a reference."""
        match self._check.against:
            case "limits":
                return value
            case "streak":
                self._streak = self._streak + 1 if value else 0
                return self._streak
            case "best":
                return self._over_best(value)
            case against:
                if len(self._reference) < self._start_steps:
                    if value > 0 or against == "start":
                        self._reference.append(value)
                    return None
                reference = max(median(self._reference), self._check.floor)
                return value / reference if reference > 0 else None

    def _over_best(self, value: float) -> float | None:
        """Return the mean of the latest values over the best mean; 1 if the difference may be noise."""
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
        falls = self._check.name in FALLING
        return sum(score <= limit if falls else score >= limit for limit in self._limits)

    def _describe(self, value: float, score: float) -> str:
        check, down = self._check, " down" * (self._check.name in FALLING)
        levels = zip(LEVELS[1:], self._limits, strict=False)
        limits = ", ".join(f"{level} from {check.score_form.format(limit)}{down}" for level, limit in levels)
        number, score_text = check.form.format(value), check.score_form.format(score)
        observation = {
            "limits": score_text,
            "streak": f"{score_text} in a row",
            "start": f"{number}, {score_text} the start",
            "best": f"{number}; lately {score_text} the best",
        }.get(check.against, f"{number}, {score_text} the usual")
        return f"{check.subject} {observation} ({limits})"


def _steps_of_enough_prompts(metrics: Mapping[str, float]) -> int:
    """Return the number of steps that have _FEWEST_PROMPTS prompts; 1 for a check without counts of prompts."""
    samples, of_prompt = metrics.get("sampling/samples", 0.0), metrics.get("sampling/samples_per_prompt", 0.0)
    if not (math.isfinite(samples) and 0.0 < of_prompt <= samples):
        return 1
    return math.ceil(min(_FEWEST_PROMPTS, _FEWEST_PROMPTS * of_prompt / samples))
