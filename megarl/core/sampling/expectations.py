"""The expected number of samples in closed form, without rounds and without a cap.

``p`` is the pass rate of a prompt, ``q = 1 - p``.
"""

from __future__ import annotations

import math

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
