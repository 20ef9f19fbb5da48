"""The exact averages of what ``simulate_rules`` measures, for rules whose law is known.

From the law of the rule and how many of each class it trains on, with the credit written out from its definition and
without the collector: that the two agree says something about both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megarl.core.sampling import Sequential, StoppingLaw, Uniform, stopping_law, unbiased_rates
from megarl.core.sampling.subsampling import positives_to_keep
from megarl.train.simulate_fit import BetaMixture
from megarl.train.simulate_rules import Arm

FixedRule = Sequential | Uniform


@dataclass(frozen=True, slots=True)
class Exact:
    """Averages over prompts of the batch."""

    cost: float
    """Samples drawn."""
    effective: float
    """Share of prompts with contrast."""
    dead_wrong: float
    """Share without a positive."""
    variance: float
    """Of the gradient."""
    signal: float
    """Mean square of the expected gradient."""

    @property
    def noise(self) -> float:
        """Variance over squared gradient."""
        return self.variance / self.signal if self.signal > 0 else float("inf")


def exact(arm: Arm, mixture: BetaMixture) -> Exact | None:
    """Return the averages over the mixture, None where counts come from estimates.

    Where prompts are replaced, a batch takes ``1 / contrast`` prompts per place (Wald): all is divided by the contrast,
    and there is no average if no prompt has any.
    """
    rule = arm.fixed
    if rule is None:
        return None
    cap = rule.num_samples if isinstance(rule, Uniform) else rule.max_samples
    rates, weights = mixture.quadrature(2 * cap + 4)
    ends = _Ends(rule, arm.unbiased)
    means = weights @ np.array([ends.moments(stopping_law(rule, rate), rate) for rate in rates.tolist()])
    cost, contrast, wrong, variance, signal = means.tolist()
    places = contrast if arm.refill else 1.0
    if not places:
        return None
    return Exact(cost / places, contrast / places, 0.0 if arm.refill else wrong, variance / places, signal / places)


class _Ends:
    """What trains at each end of a rule's law, and with what advantage."""

    def __init__(self, rule: FixedRule, unbiased: bool) -> None:
        self._rule, self._unbiased = rule, unbiased
        self._known: dict[tuple[int, int], tuple[float, float, float]] = {}

    def moments(self, law: StoppingLaw, rate: float) -> tuple[float, float, float, float, float]:
        """Return cost, contrast, chance of no positive, variance and squared mean of the gradient, at one pass rate."""
        ends = [self._end(n, k) for n, k in zip(law.samples.tolist(), law.positives.tolist(), strict=True)]
        up, down, squares = np.array(ends).T
        gradient = up * (1 - rate) + down * rate
        mean = float(law.probabilities @ gradient)
        outcome = float(law.probabilities @ (gradient - mean) ** 2)
        wrong = float(law.probabilities[law.positives == 0].sum())
        return law.expected_samples, law.contrast, wrong, outcome + float(law.probabilities @ squares), mean**2

    def _end(self, n: int, k: int) -> tuple[float, float, float]:
        """Sums over what trains, per sample: of positive advantages, of negative ones, and of all squared."""
        if (n, k) not in self._known:
            self._known[n, k] = self._train(n, k) if 0 < k < n else (0.0, 0.0, 0.0)
        return self._known[n, k]

    def _train(self, n: int, k: int) -> tuple[float, float, float]:
        rule = self._rule
        size = n if rule.train_size is None else min(rule.train_size, n)
        keep = rule.keeps(k, n - k)
        assert size == n or keep != "any", "which samples train must follow from the counts"
        right = k if size == n else positives_to_keep(k, n - k, size, keep)
        wrong = size - right
        if self._unbiased:
            assert isinstance(rule, Sequential)
            rounds = [rule.round_size] * (n // rule.round_size) + [n % rule.round_size] * (n % rule.round_size > 0)
            product = unbiased_rates(rule, rounds, rounds, k).product
            return product, product, product**2 * (1 / right + 1 / wrong)
        high, low = 1 - k / n, k / n
        return right * high / size, wrong * low / size, (right * high**2 + wrong * low**2) / size**2
