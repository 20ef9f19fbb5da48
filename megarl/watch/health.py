"""Is a run healthy? Verdicts from its records: observation, first step, usual cause, and advice.

``CHECKS`` are data in ``megarl/watch/limits.toml``, beside the default limits: inputs of each check, and the words of a
verdict. ``judge_run`` judges a list of records, ``Health`` a stream of records in order; its state does not grow with
the run. Nothing here imports torch.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal

from megarl.config.tables import health
from megarl.config.tables.health import FALLING, HealthConfig
from megarl.run.metrics_log import UNJUDGED
from megarl.run.status import LEVELS, HealthVerdict

Step = Mapping[str, float]
"""Metrics of a step: metrics of the step's record, and means over the mini-batches; of gradient norms, the largest."""

SOLVED = 0.9
"""From this pass rate on, success looks like few prompts with contrast and a low entropy."""


def largest(values: Collection[float]) -> float:
    """Return the largest value, or a value that is not finite."""
    return next((value for value in values if not math.isfinite(value)), max(values))


def _largest(step: Step) -> float:
    """Return the largest metric.

    >>> _largest({"a": 1.0, "b": 3.0})
    3.0
    """
    return largest(step.values())


def _are_zero(step: Step, fewest: int = 3) -> float | None:
    """Return 1 if every value is 0, else 0; a mean reward of 0 may come from rewards that cancel out.

    >>> _are_zero({"a": 0.0, "b": 0.0, "c": 0.0}), _are_zero({"a": 0.0, "b": 0.5, "c": 0.0}), _are_zero({"a": 0.0})
    (1.0, 0.0, None)
    """
    if len(step) < fewest:
        return None
    return next((value for value in step.values() if not math.isfinite(value)), float(not any(step.values())))


def _contrast(step: Step, solved: bool = False) -> float | None:
    """Return the share of prompts with contrast, if the step is (not) ``solved``; None if contrast is impossible.

    >>> _contrast({"reward/pass_rate": 0.5, "prompts/effective_ratio": 0.25})
    0.25
    """
    rate, mean = step.get("reward/pass_rate", 0.0), step.get("reward/mean", math.nan)
    share = step.get("prompts/effective_ratio")
    is_single = step.get("sampling/samples_per_prompt", math.inf) <= 1
    is_zero = not (rate or mean or share)  # a separate check
    return None if is_single or is_zero or solved != (rate >= SOLVED) else share


def _unsolved_entropy(step: Step) -> float | None:
    """Return the entropy; None if the step is solved.

    >>> _unsolved_entropy({"reward/pass_rate": 0.5, "rollout/entropy": 0.25})
    0.25
    """
    return None if step.get("reward/pass_rate", 0.0) >= SOLVED else step.get("rollout/entropy")


def _flip(step: Step) -> float:
    """Under r3 the experts in use agree by construction; the routers' own choice does not.

    >>> _flip({"router/native/flip": 0.25, "router/flip": 0.0})
    0.25
    """
    return step.get("router/native/flip", step.get("router/flip", math.nan))


def _missing_rows(step: Step) -> float | None:
    """Return the share beyond a token per response: no engine processes the last token.

    >>> _missing_rows({"rollout/missing_rows_fraction": 0.5, "sampling/samples": 1.0, "sampling/tokens": 4.0})
    0.25
    """
    if (share := step.get("rollout/missing_rows_fraction")) is None or not math.isfinite(share):
        return share
    tokens = step.get("sampling/tokens", 0.0)
    return max(0.0, share - (step.get("sampling/samples", 0.0) / tokens if tokens > 0 else 0.0))


def _idle(step: Step) -> float | None:
    """Return the share of a step's time that no other metric explains.

    >>> _idle({"time/train_s": 1.0, "time/step_s": 4.0})
    0.75
    """
    whole = step.get("time/step_s", 0.0)
    if "time/train_s" not in step or whole <= 0:
        return None
    return 1.0 - sum(value for name, value in step.items() if name != "time/step_s") / whole


@dataclass(frozen=True, slots=True)
class Check:
    """A check. The limits are the key of the same name in [health]."""

    name: str
    metrics: tuple[str, ...]
    """Its inputs, the judged metric first; a step without these metrics is not judged."""
    subject: str
    """The subject of a verdict."""
    cause: str
    advice: str
    read: Callable[[Step], float | None] = _largest
    """Gets the check's metrics of a step; returns None to skip the step."""
    form: str = "{:.1%}"
    against: Literal["limits", "start", "calm", "spikes", "best", "streak"] = "limits"
    """The value compared with the limits.

    - limits: the value itself;
    - start: the value over its median in the first steps;
    - calm, spikes: the value over its median in recent steps within the limits; for spikes, a single step is enough;
    - best: the mean of the latest steps over the best such mean, if noise does not explain the difference;
    - streak: the number of steps in a row with a value other than 0.
    """
    floor: float = 0.0
    """The smallest median used."""
    names_failure: bool = False
    """True: the verdict counts the judged responses, and names the first failure."""

    def look(self, step: Step) -> tuple[Step, float | None]:
        """Return the check's metrics of a step, and the value; None to skip the step."""
        metrics = {name: step[name] for name in self.metrics if name in step}
        return metrics, self.read(metrics) if metrics else None

    @property
    def score_form(self) -> str:
        """How a limit is written."""
        return {"limits": self.form, "streak": "{:.0f} steps"}.get(self.against, "{:.3g} x")


_READS: dict[str, Callable[[Step], float | None]] = {
    "largest": _largest,
    "smallest": lambda step: -largest([-value for value in step.values()]),
    "total": lambda step: sum(step.values()),
    "zero": _are_zero,
    "zero_gradient": partial(_are_zero, fewest=1),
    "contrast": _contrast,
    "solved_contrast": partial(_contrast, solved=True),
    "unsolved_entropy": _unsolved_entropy,
    "flip": _flip,
    "missing_rows": _missing_rows,
    "idle": _idle,
}
_OF_LIMITS = ("limits", "meaning", "falls")
"""Keys of a check for the configuration."""


def _make_check(name: str, table: Mapping[str, Any]) -> Check:
    fields = {key: value for key, value in table.items() if key not in _OF_LIMITS}
    fields |= {"metrics": tuple(table["metrics"]), "read": _READS[table.get("read", "largest")]}
    return Check(name, **fields)


CHECKS = tuple(_make_check(name, table) for name, table in health.CHECKS.items())
"""In the order of the table in docs/health.md."""

METRICS = frozenset(name for check in CHECKS for name in check.metrics)


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
        self._rise = 1 if check.against in ("streak", "spikes") else limits.patience_steps
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
        return mean / self._best if mean < self._best - _NOISE * noise else 1.0

    def _grade(self, score: float) -> int:
        return sum(score <= limit if self._check.name in FALLING else score >= limit for limit in self._limits)

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
