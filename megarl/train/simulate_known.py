"""Numbers that are known exactly, beside what the real collector finds when it draws."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megarl.core.choices.stopping import POSITIVE, Keep
from megarl.core.sampling import (
    Collector,
    SamplingRule,
    Sequential,
    Uniform,
    ada_seq_balance,
    ada_seq_pos,
    allocate,
    allocate_by_weights,
    expected_samples,
    gradient_variance,
    gvm_allocate,
    objective_slope,
    stopping_law,
    tier_cost,
)
from megarl.train.simulate_fit import BetaMixture, fit
from megarl.train.simulate_rules import SimulatedRewards, drive

POST_POINTS = {4: 0.627, 32: 0.796, 256: 0.813}
"""pass@k of Qwen2.5-Math-1.5B in a post on adaptive sampling: the default, and the tiers whose cost is 60.14."""
_RATES, _TOTAL = (0.1, 0.3, 0.5, 0.9), 32
_UNCAPPED = 2000
"""A cap that is never met at the pass rates below."""


@dataclass(frozen=True, slots=True)
class Known:
    """One number."""

    what: str
    exact: float
    found: float
    """By Monte Carlo."""
    error: float
    """Its standard error."""
    note: str = ""
    """What a source says instead."""


@dataclass(frozen=True, slots=True)
class Shares:
    """How a budget is shared among prompts, and what that does to the variance."""

    what: str
    counts: tuple[int, ...]
    variance: float | None
    """``sum f'^2 noise / n``; None for a rule with another aim."""
    equal: float | None
    """The same with equal counts."""
    found: float | None
    """The first by Monte Carlo."""
    error: float | None
    """Its standard error."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """4 samples, then up to 32 in all, then up to 256, until one is positive; all train."""

    ends: tuple[int, ...] = (4, 32, 256)
    threshold: float = POSITIVE
    train_size: int | None = None

    def next_samples(self, prompt: int, asked: int, positives: int, negatives: int) -> int:
        """To the end of the next tier; 0 after a positive or the last one."""
        return 0 if positives else next((end - asked for end in self.ends if end > asked), 0)

    def resolved(self, positives: int, negatives: int) -> bool:
        """Whether it was solved."""
        return positives > 0

    def keeps(self, positives: int, negatives: int) -> Keep:
        """Any: all train."""
        return "any"


def known_numbers(seed: int) -> list[Known]:
    """Draw what the closed forms and laws say: a second or two."""
    found = []
    for rate, good, bad, plays, note in (
        (0.8, 4, 0, 1000, ""),
        (0.05, 4, 0, 100, ""),
        (0.5, 4, 4, 1000, "posts: k / (p q) = 16"),
        (0.1, 4, 4, 200, "posts: 44.4"),
        (0.5, 1, 1, 1000, "posts: 4"),
    ):
        rule = Sequential(good, bad, 1, _UNCAPPED, train_size=None)
        samples = _samples(rule, np.full(plays, rate), (seed, 3, len(found)))
        what = f"samples, one at a time, to {good} right and {bad} wrong, p = {rate}"
        found.append(_known(what, expected_samples(rate, good, bad), samples, note))
    for name, rule, rate in (
        ("balance 2 + 2", ada_seq_balance(), 0.05),
        ("balance 2 + 2", ada_seq_balance(), 0.1),
        ("balance 2 + 2", ada_seq_balance(), 0.5),
        ("one right", ada_seq_pos(), 0.1),
    ):
        samples = _samples(rule, np.full(1000, rate), (seed, 3, len(found)))
        what = f"samples, rounds of 8 up to 32, {name}, p = {rate}"
        found.append(_known(what, stopping_law(rule, rate).expected_samples, samples))
    return [*found, _dead_groups(seed), _tiers(seed)]


def shared_budgets(seed: int) -> list[Shares]:
    """32 samples for four prompts with p = 0.1, 0.3, 0.5, 0.9, by every objective, and GVM's worked example."""
    rates = np.array(_RATES)
    equal = np.full(rates.size, _TOTAL // rates.size)
    rows = []
    for place, objective in enumerate(("linear", "log", "raft", "power:0.5", "arcsin")):
        counts = allocate(_RATES, _TOTAL, objective)
        found, error = _drawn_variance(counts, objective, np.random.default_rng((seed, 4, place)))
        best, even = (gradient_variance(rates, n, objective) for n in (counts, equal))
        rows.append(Shares(objective, tuple(counts.tolist()), best, even, found, error))
    other = {
        "1 / p": allocate_by_weights(1 / rates, _TOTAL),
        "log, 4 to 12 each": allocate(_RATES, _TOTAL, "log", 4, 12),
        "gvm, G = 1 2 1 3 5, p = 1/8 1/2 1 0 1/4, 40": gvm_allocate([0.125, 0.5, 1, 0, 0.25], [1, 2, 1, 3, 5], 40),
    }
    return rows + [Shares(what, tuple(counts.tolist()), None, None, None, None) for what, counts in other.items()]


def _samples(rule: SamplingRule, rates: np.ndarray, seed: tuple[int, ...]) -> np.ndarray:
    """int64 [B], what the rule draws of prompts with these pass rates."""
    return drive(Collector(rule, rates.size), SimulatedRewards(rates, seed)).drawn[1]


def _known(what: str, exact: float, values: np.ndarray, note: str = "") -> Known:
    return Known(what, exact, float(values.mean()), float(values.std(ddof=1)) / math.sqrt(values.size), note)


def _dead_groups(seed: int) -> Known:
    pools = drive(Collector(Uniform(8), 2000), SimulatedRewards(np.full(2000, 0.1), (seed, 5))).drawn
    law = stopping_law(Uniform(8), 0.1)
    exact = float(law.probabilities[law.positives == 0].sum())
    return _known("groups of 8 without a right one, p = 0.1: 0.9^8", exact, pools[3] == 0, "one paper prints 19 %")


def _tiers(seed: int) -> Known:
    mixture: BetaMixture = fit(POST_POINTS)
    samples = _samples(Tiers(), mixture.draw(2000, np.random.default_rng((seed, 6))), (seed, 7))
    solved = np.diff(list(POST_POINTS.values()), prepend=0.0)
    return _known(
        "samples, tiers of 4, 32, 256 until solved", tier_cost((4, 32, 256), solved.tolist()), samples, "posts: 12.268"
    )


def _drawn_variance(counts: np.ndarray, objective: str, rng: np.random.Generator) -> tuple[float, float]:
    """``sum f'(p)^2 noise / n`` from draws: of the mean of n advantages, or of n rewards where there is no baseline."""
    rates, plays = np.array(_RATES), 20_000
    means = rng.binomial(counts, rates, size=(plays, rates.size)) / counts
    # Without a baseline a sample's term is r times a score of variance 1 that the reward does not see: sum r / n^2.
    noise = means / counts if objective == "raft" else (means - rates) ** 2
    totals = noise @ objective_slope(rates, objective) ** 2
    return float(totals.mean()), float(totals.std(ddof=1)) / math.sqrt(plays)
