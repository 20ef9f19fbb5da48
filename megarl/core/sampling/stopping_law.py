"""The exact law of a sampling rule, computed from the answers of the rule object itself.

Samples of a prompt are independent and positive with probability p, its pass rate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.core.choices.stopping import SamplingRule


@dataclass(frozen=True, slots=True, eq=False)
class StoppingLaw:
    """Where a prompt's sampling ends: one row per possible end."""

    samples: np.ndarray
    """int64 [S], samples drawn."""
    positives: np.ndarray
    """int64 [S], positive samples."""
    probabilities: np.ndarray
    """float64 [S], adds up to 1."""

    @property
    def expected_samples(self) -> float:
        """E[n], what the prompt costs."""
        return float(self.probabilities @ self.samples)

    @property
    def contrast(self) -> float:
        """Probability of a pool with both classes: of a prompt that teaches something."""
        mixed = (self.positives > 0) & (self.positives < self.samples)
        return float(self.probabilities[mixed].sum())


def stopping_law(rule: SamplingRule, pass_rate: float, prompt: int = 0) -> StoppingLaw:
    """Return the law of the samples drawn by ``rule`` for a prompt with the pass rate.

    For rounds of M this gives ``E[n] = M * sum_r P(not done after r rounds)``. Raises ValueError unless
    0 <= pass_rate <= 1.
    """
    _check_rate(pass_rate)
    pending: dict[int, np.ndarray] = {0: np.ones(1)}
    ends: dict[tuple[int, int], float] = {}
    while pending:
        num_asked = min(pending)
        for positives, probability in enumerate(pending.pop(num_asked)):
            if probability == 0:
                continue
            count = rule.next_samples(prompt, num_asked, positives, num_asked - positives)
            if not count:
                ends[num_asked, positives] = probability
                continue
            next_counts = pending.setdefault(num_asked + count, np.zeros(num_asked + count + 1))
            next_counts[positives : positives + count + 1] += probability * binomial(count, pass_rate)
    points = np.array(list(ends), dtype=np.int64)
    return StoppingLaw(points[:, 0], points[:, 1], np.array(list(ends.values())))


def expected_samples(pass_rate: float, positives: int, negatives: int) -> float:
    """Return E[n] for drawing single samples, without a cap, until both classes are complete.

    With p the pass rate and q = 1 - p:
    ``positives / p + negatives / q - sum_{i < positives, j < negatives} C(i + j, i) p^i q^j``. The sum is E[min] of the
    two waiting times. Infinite if a class that is needed never comes. For rounds and a cap see ``stopping_law``.

    The sources say ``k / (p q)`` for k of both classes; wrong: the truth is near ``k / min(p, q)``, and at p = 1/2
    theirs is up to twice too large (k = 4: 10.1875, not 16; k = 1: 3, not 4). Raises ValueError unless 0 <= p <= 1 and
    counts are 0 or more.
    """
    _check_rate(pass_rate)
    if min(positives, negatives) < 0:
        raise ValueError(f"{positives} positives and {negatives} negatives to wait for, expected 0 or more")
    fail_rate = 1 - pass_rate
    if (positives and not pass_rate) or (negatives and not fail_rate):
        return math.inf
    expected = (positives / pass_rate if positives else 0.0) + (negatives / fail_rate if negatives else 0.0)
    pmf = np.ones(1)  # of the positives among ``drawn`` samples
    for drawn in range(positives + negatives - 1 if positives and negatives else 0):
        # Subtract the probability that neither class is complete after ``drawn`` samples.
        expected -= float(pmf[max(drawn - negatives + 1, 0) : positives].sum())
        pmf = np.convolve(pmf, [fail_rate, pass_rate])
    return expected


def unbiased_rates(
    rule: SamplingRule, requested: Sequence[int], drawn: Sequence[int], positives: int, prompt: int = 0
) -> tuple[float, float]:
    """Return estimates of p and p (1 - p) from a pool that ``rule`` ended, unbiased over all ends of the rule.

    The share of positives in a pool is biased if the rule reads rewards. The first round has a fixed size: mean and
    sample variance of the first round are unbiased (0 for a round of one). The estimates average them over all
    histories of the rule with equal rounds and positives (Girshick, Mosteller and Savage, 1946). With rounds of one
    sample and k positives to exit this is the ``(k - 1) / (n - 1)`` of inverse sampling.

    requested: samples of each round; drawn: samples of each round without failure; positives: in total. Failures
    must not depend on the reward. Raises ValueError if the rule has no such history.
    """
    if (
        len(requested) != len(drawn)
        or not requested
        or any(not 0 <= d <= a for a, d in zip(requested, drawn, strict=True))
    ):
        raise ValueError(
            f"rounds of {list(requested)} samples of which {list(drawn)} arrived: expected as many, at most"
        )
    first, total = drawn[0], sum(drawn)
    # The distribution of histories given the end does not depend on p; near the share of positives nothing underflows.
    nominal = min(max(positives / max(total, 1), 0.5 / max(total, 1)), 1 - 0.5 / max(total, 1))
    ways = np.diag(binomial(first, nominal))  # [positives in the first round, positives so far]
    sum_asked, sum_drawn = requested[0], first
    for size, arrived in zip(requested[1:], drawn[1:], strict=True):
        goes_on = [rule.next_samples(prompt, sum_asked, s, sum_drawn - s) == size for s in range(sum_drawn + 1)]
        step = binomial(arrived, nominal)
        ways = np.stack([np.convolve(row, step) for row in np.where(goes_on, ways, 0.0)])
        sum_asked, sum_drawn = sum_asked + size, sum_drawn + arrived
    weights = ways[:, positives] if 0 <= positives <= total else np.zeros(1)
    if not weights.sum() > 0:
        raise ValueError(f"{rule} cannot end with {positives} positives in rounds of {list(drawn)} samples")
    weights = weights / weights.sum()
    counts = np.arange(first + 1)
    rate = float(weights @ counts) / max(first, 1)
    product = float(weights @ (counts * (first - counts))) / (first * (first - 1)) if first > 1 else 0.0
    return rate, product


def _check_rate(pass_rate: float) -> None:
    if not 0 <= pass_rate <= 1:
        raise ValueError(f"the pass rate is {pass_rate}, expected 0 to 1")


def binomial(size: int, rate: float) -> np.ndarray:
    """Return float64 [size + 1], the probabilities of 0..size positives among ``size`` samples."""
    if size == 0:
        return np.ones(1)
    half = binomial(size // 2, rate)
    whole = np.convolve(half, half)
    return np.convolve(whole, [1 - rate, rate]) if size % 2 else whole
