"""avg@k and pass@k of an evaluation, with intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

Counts = Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and where the truth lies with the chosen confidence."""

    value: float
    low: float
    high: float


def pass_at_k(num_samples: Counts, num_correct: Counts, k: int) -> np.ndarray:
    """Return ``1 - C(n - c, k) / C(n, k)`` per prompt: the unbiased estimate of solving it in k tries.

    The share of the n samples' k-subsets with a correct one; for k = 1 it is c / n. ``1 - (1 - c / n)^k`` would be too
    low. num_samples, num_correct: integer [B]; result: float64 [B]. Raises ValueError if a prompt has fewer than k
    samples. Source: Chen et al., arXiv 2107.03374, eq. 1.
    """
    n, c = np.asarray(num_samples, dtype=np.int64), np.asarray(num_correct, dtype=np.int64)
    if n.shape != c.shape or n.ndim != 1 or ((c < 0) | (c > n)).any():
        raise ValueError("expected as many samples as correct ones in [B], and 0 <= correct <= samples")
    if k < 1 or (n < k).any():
        raise ValueError(f"pass@{k} needs at least {max(k, 1)} samples per prompt, the fewest are {n.min(initial=k)}")
    # The product of (n - c - i) / (n - i) over the k draws; 0 with fewer than k wrong samples.
    misses = np.ones(n.size)
    for draw in range(k):
        misses *= np.maximum(n - c - draw, 0) / (n - draw)
    return 1 - misses


def mean_interval(values: Sequence[float] | np.ndarray, level: float = 0.95) -> Interval:
    """Return the mean of one value per prompt, plus and minus ``z`` standard errors.

    Prompts count as a draw from a population; samples of a prompt are no independent evidence: give each prompt's mean
    (avg@k) or ``pass_at_k``. values: [B], at least two; level: between 0 and 1. The normal approximation says little
    below some 20 prompts, and a width of 0 where all values are equal. ValueError for fewer values.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size < 2 or not np.isfinite(array).all():
        raise ValueError(f"an interval needs at least two finite values, [B], got {list(array.shape)}")
    z, mean = NormalDist().inv_cdf((1 + level) / 2), float(array.mean())
    half = z * float(array.std(ddof=1)) / math.sqrt(array.size)
    return Interval(mean, mean - half, mean + half)


def wilson_interval(num_correct: int, num_samples: int, level: float = 0.95) -> Interval:
    """Return the pass rate of one prompt with Wilson's interval: inside [0, 1], and never of width 0. ValueError for
    counts that do not fit.
    """
    if not 0 <= num_correct <= num_samples or num_samples < 1:
        raise ValueError(f"{num_correct} of {num_samples} samples are correct; expected at least one sample")
    z, n, rate = NormalDist().inv_cdf((1 + level) / 2), num_samples, num_correct / num_samples
    middle = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    # At the ends of the scale the interval ends there too, but for rounding.
    return Interval(rate, middle - half if num_correct else 0.0, middle + half if num_correct < num_samples else 1.0)
