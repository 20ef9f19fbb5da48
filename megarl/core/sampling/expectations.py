"""Closed forms for adaptive sampling: expected numbers of samples, biases, implied objectives, costs of tiers.

``p`` is the pass rate of a prompt, ``q = 1 - p``. Where the sources print something else, the function says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megarl.core.sampling.stopping_law import check_rate


def expected_samples(pass_rate: float, positives: int, negatives: int) -> float:
    """Return E[n] when samples are drawn one at a time, without a cap, until there are so many of either class.

    ``positives / p + negatives / q - sum_{i < positives, j < negatives} C(i + j, i) p^i q^j``; the sum is E[min] of the
    two waiting times. With negatives = 0 it is ``k / p``. Infinite if a class that is needed never comes.

    The sources say ``k / (p q)`` for k of each, which is wrong: the truth is near ``k / min(p, q)``, and at p = 1/2
    theirs is up to twice too large (k = 4: 10.1875, not 16; k = 1: 3, not 4). Only its minimum at 1/2 is right. Nor
    has it the U-shape of the slope 1 / sqrt(p q) of GRPO's objective, as they say, but about that of its square.
    Raises ValueError unless 0 <= p <= 1 and counts are 0 or more. For rounds and a cap see ``stopping_law``.
    """
    check_rate(pass_rate)
    _check_counts(positives, negatives)
    if _never(pass_rate, positives, negatives):
        return math.inf
    waits = _over(positives, pass_rate) + _over(negatives, 1 - pass_rate)
    return waits - sum(alive for _, alive in _unfinished(pass_rate, positives, negatives))


def samples_variance(pass_rate: float, positives: int, negatives: int) -> float:
    """Return Var[n] of the same; with negatives = 0 it is ``k q / p^2``. Infinite if a needed class never comes."""
    check_rate(pass_rate)
    _check_counts(positives, negatives)
    if _never(pass_rate, positives, negatives):
        return math.inf
    second = 0.0
    for count, rate in ((positives, pass_rate), (negatives, 1 - pass_rate)):
        second += _over(count * (1 - rate), rate**2) + _over(count, rate) ** 2
    second -= sum((2 * drawn + 1) * alive for drawn, alive in _unfinished(pass_rate, positives, negatives))
    return second - expected_samples(pass_rate, positives, negatives) ** 2


def inverse_sampling_mean(pass_rate: float, positives: int) -> float:
    """Return E[k / n] when samples are drawn one at a time until there are k positives: more than p.

    ``k p int_0^1 u^(k-1) / (p + q u) du``; for k = 1 it is ``-p ln(p) / q``: at p = 0.1 a mean of 0.256. The sources
    take k / n as if it were unbiased. ``inverse_sampling_rate`` is.
    """
    check_rate(pass_rate)
    if positives < 1:
        raise ValueError(f"{positives} positives to wait for, expected at least 1")
    if pass_rate == 0:
        return 0.0
    q = 1 - pass_rate
    if pass_rate > 0.5:  # a smooth integrand, where the recurrence below would divide by little
        nodes, weights = np.polynomial.legendre.leggauss(positives // 2 + 40)
        u = (nodes + 1) / 2
        integral = float(weights @ (u ** (positives - 1) / (pass_rate + q * u))) / 2
    else:
        integral = -math.log(pass_rate) / q
        for power in range(1, positives):
            integral = (1 / power - pass_rate * integral) / q
    return positives * pass_rate * integral


def inverse_sampling_rate(positives: int, samples: int) -> float:
    """Return ``(k - 1) / (n - 1)``, unbiased for p when n samples were drawn one at a time until the k-th positive.

    Needs k >= 2, else ValueError. For rounds, caps and two classes see ``unbiased_rates``.
    """
    if not 2 <= positives <= samples:
        raise ValueError(f"{positives} positives of {samples} samples; expected at least 2, and as many samples")
    return (positives - 1) / (samples - 1)


def balanced_slope(pass_rate: float, share: float = 0.5) -> float:
    """Return c(p): how much more than grad p a batch that is balanced by choice pushes a prompt.

    Positives are a ``share`` of what trains whatever p is, with advantage r - p; then the expected gradient is
    ``c(p) grad p`` with ``c = share q / p + (1 - share) p / q``, for one half ``(q^2 + p^2) / (2 p q)``: 1 at p = 0.5,
    49.5 at p = 0.01. So the balanced batch maximises ``ln(p / q) / 2 - p`` and not p: a nonlinear objective, which the
    sources do not mention when they find "no degradation". The unbiased combination takes this factor out
    (``Credit.combination``). Raises ValueError unless 0 < p < 1 and 0 <= share <= 1.
    """
    check_rate(pass_rate)
    if pass_rate in (0, 1) or not 0 <= share <= 1:
        raise ValueError(f"pass rate {pass_rate}, share {share}: expected more than 0 and less than 1, and 0 to 1")
    q = 1 - pass_rate
    return share * q / pass_rate + (1 - share) * pass_rate / q


def tier_cost(tiers: Sequence[int], solved: Sequence[float], *, reuse: bool = True) -> float:
    """Return the mean number of samples of a prompt that is tried in tiers until it is solved.

    tiers: samples in all by the end of each tier, ascending; solved: share of all prompts that each tier solves, the
    rest is never solved and pays for all tiers. ``reuse``: a tier draws only what the one before lacks; without it each
    starts again. Tiers (4, 32, 256) that solve (0.627, 0.169, 0.017) cost 60.14, or 68.16 without reuse. A post says
    12.268: it leaves out the unsolved 18.7 %, which alone cost 47.87. Raises ValueError for other input.
    """
    sizes, shares = np.asarray(tiers, dtype=np.float64), np.asarray(solved, dtype=np.float64)
    bad_sizes = sizes.ndim != 1 or sizes.shape != shares.shape or (np.diff(sizes, prepend=0) <= 0).any()
    if bad_sizes or (shares < 0).any() or shares.sum() > 1 + 1e-9:
        raise ValueError(
            f"tiers {list(tiers)} and shares {list(solved)}: expected ascending, as many, at most 1 in all"
        )
    drawn = np.diff(sizes, prepend=0) if reuse else sizes
    reached = 1 - np.concatenate([[0.0], np.cumsum(shares)[:-1]])
    return float(drawn @ reached)


def _unfinished(pass_rate: float, positives: int, negatives: int) -> list[tuple[int, float]]:
    """(samples, probability that neither class is complete after them), as long as that is possible."""
    if not positives or not negatives:
        return []
    chances, pmf = [], np.ones(1)
    for drawn in range(positives + negatives - 1):
        chances.append((drawn, float(pmf[max(drawn - negatives + 1, 0) : positives].sum())))
        pmf = np.convolve(pmf, [1 - pass_rate, pass_rate])
    return chances


def _never(pass_rate: float, positives: int, negatives: int) -> bool:
    return (positives > 0 and pass_rate == 0) or (negatives > 0 and pass_rate == 1)


def _over(numerator: float, denominator: float) -> float:
    """The quotient, with 0 / 0 = 0: nothing to wait for."""
    return numerator / denominator if numerator else 0.0


def _check_counts(positives: int, negatives: int) -> None:
    if min(positives, negatives) < 0:
        raise ValueError(f"{positives} positives and {negatives} negatives to wait for, expected 0 or more")
