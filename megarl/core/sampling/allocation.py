"""Share a budget of samples among prompts whose pass rates are estimated.

Maximising ``E[f(p)]`` has the gradient ``E[f'(p) grad p]``, and a prompt with n samples adds ``f'(p)^2 p (1 - p) / n``
to its variance, which is least, for a given total, if ``n ~ f'(p) sqrt(p (1 - p))``.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from megarl.core.choices.credit import parse_allocation, parse_objective
from megarl.errors import refusal

Numbers = Sequence[float] | np.ndarray


def allocate(pass_rates: Numbers, total: int, objective: str, low: int = 1, high: int | None = None) -> np.ndarray:
    """Return how many samples each prompt gets: ``n ~ f'(p) sqrt(p (1 - p))``, of least variance, in whole numbers.

    objective: "linear" f = p; "log" f = ln p; "raft" ln p without a baseline (noise p): ``n ~ 1 / sqrt(p)``; "power:A"
    f = p^A; "arcsin" f = 2 arcsin sqrt(p), the same n for all. pass_rates: [B], 0 to 1; low, high: bounds of each
    count; total: the exact sum of the counts; result: int64 [B]. Rates: ``clamp_rates``. Raises ValueError if the
    bounds cannot hold, ConfigError for an unknown objective.

    A post prints sqrt((1 - p) / p) for "log" and "raft" and claims ten times as many samples for p = 0.01 as for p = 1:
    true for "raft", 1 / sqrt(p), while "log" gives solved prompts the fewest samples. "power:A" favours hard prompts (p
    to 0) only for A below 1/2; f' favours hard prompts for A below 1.
    """
    rates = clamp_rates(pass_rates, None, default=max(1, -(-total // max(len(pass_rates), 1))))
    return allocate_by_weights(budget_weights(rates, objective), total, low, high)


def budget_weights(pass_rates: Numbers, allocation: str, eps: float = 1e-3) -> np.ndarray:
    """Return what counts are in proportion to, float64 [B], for ``allocate_by_weights``.

    "inverse:A": ``1 / (p + eps)^A``, of which "ada_est" is A = 1/2 (arXiv 2510.04996, third version; eps is not printed
    there). For an objective f: ``f'(p) sqrt(p (1 - p))``, which needs pass_rates off 0 and 1 (``clamp_rates``).
    ValueError for rates outside of 0 to 1, or no eps.
    """
    rates = check_rates(pass_rates)
    kind, exponent = parse_allocation(allocation)
    if kind == "inverse":
        if not eps > 0:
            raise ValueError(f"eps is {eps}, expected more than 0: a pass rate may be 0")
        return (rates + eps) ** -exponent
    return objective_slope(rates, allocation) * np.sqrt(rates if kind == "raft" else rates * (1 - rates))


def allocate_by_weights(weights: Numbers, total: int, low: int = 1, high: int | None = None) -> np.ndarray:
    """Return whole numbers near ``clip(s * weights, low, high)`` that add up to ``total``; s is solved for.

    Counts are rounded down, and the rest goes to the largest remainders, ties to the first. Prompts of weight 0 get
    ``low``, and more only if all others are at ``high``; if all weights are 0 the shares are equal. weights: [B], 0
    or more; result: int64 [B]. Raises ValueError if ``B low <= total <= B high`` does not hold.
    """
    values = check_weights(weights, "weight")
    top = total if high is None else high
    return _round_to_total(bounded_shares(values, total, low, top), total, top)


def bounded_shares(values: np.ndarray, total: int, low: int, top: int) -> np.ndarray:
    """Return ``clip(s * values, low, top)`` with the sum ``total``, float64 [B]: ``allocate_by_weights``, unrounded.
    ValueError if the bounds cannot hold.
    """
    size = values.size
    if not 0 <= low <= top and size:
        raise ValueError(f"a prompt gets {low} to {top} samples, expected 0 <= low <= high <= total = {total}")
    if not size * low <= total <= size * top:
        facts = {"size": size, "low": low, "top": top, "least": size * low, "most": size * top, "total": total}
        raise ValueError(refusal("total_outside_bounds", **facts))
    positive = values > 0
    shares = np.full(size, float(low))
    at_most = int(positive.sum()) * top
    if at_most + (size - int(positive.sum())) * low < total:
        shares[positive] = top
        shares[~positive] = (total - at_most) / (size - int(positive.sum()))
    elif positive.any():
        shares[positive] = _scale_into_box(values[positive], total - low * float((~positive).sum()), low, top)
    return shares


def objective_slope(pass_rates: Numbers, objective: str) -> np.ndarray:
    """Return f'(p): the weight of a prompt's gradient where sampling does not follow the objective by itself.

    "linear" 1; "log" and "raft" 1 / p; "power:A" A p^(A - 1); "arcsin" 1 / sqrt(p (1 - p)). pass_rates: [B], clamped
    off 0 and 1 where this would be infinite (``clamp_rates``); result: float64 [B]. ConfigError for an unknown name.
    """
    rates = np.asarray(pass_rates, dtype=np.float64)
    kind, exponent = parse_objective(objective)
    if kind == "linear":
        return np.ones_like(rates)
    if kind == "arcsin":
        return 1 / np.sqrt(rates * (1 - rates))
    return exponent * rates ** (exponent - 1) if kind == "power" else 1 / rates


def clamp_rates(pass_rates: Numbers, num_samples: int | None, default: int = 1) -> np.ndarray:
    """Return pass rates off 0 and 1, float64 [B]: at least 1 / (2 num_samples) away from both.

    num_samples None: only 0 and 1 themselves move, to ``1 / (2 default)`` or as near as the nearest other estimate.
    ValueError for rates outside of 0 to 1.
    """
    rates = check_rates(pass_rates)
    if num_samples is not None:
        if num_samples < 1:
            raise ValueError(f"estimates from {num_samples} samples, expected at least 1")
        return np.clip(rates, 0.5 / num_samples, 1 - 0.5 / num_samples)
    margins = np.minimum(rates, 1 - rates)
    margin = min(0.5 / default, margins[margins > 0].min(initial=0.5))
    return np.where(rates == 0, margin, np.where(rates == 1, 1 - margin, rates))


def _scale_into_box(values: np.ndarray, total: float, low: float, high: float) -> np.ndarray:
    """clip(s * values, low, high) with the sum ``total``: the sum is linear in s between neighbouring kinks."""
    kinks = np.unique(np.concatenate([low / values, high / values]))
    # The sum grows with s: the kinks on both sides of the total.
    last = bisect_right(kinks, total, 1, max(kinks.size - 1, 1), key=lambda s: np.clip(s * values, low, high).sum())
    below, above = (np.clip(s * values, low, high) for s in (kinks[last - 1], kinks[min(last, kinks.size - 1)]))
    rise = above.sum() - below.sum()
    fraction = 0.0 if rise == 0 else min(max((total - below.sum()) / rise, 0.0), 1.0)
    return below + fraction * (above - below)


def _round_to_total(shares: np.ndarray, total: int, high: int) -> np.ndarray:
    counts = np.floor(shares).astype(np.int64)
    missing = total - int(counts.sum())
    # Rounded, or ties would be broken by noise. A share of 3 that is computed as 2.9999999999 has the remainder 1.
    remainders = np.where(counts < high, np.round(shares - counts, 9), -1.0)
    counts[np.argsort(-remainders, kind="stable")[:missing]] += 1
    assert int(counts.sum()) == total, f"{shares} became {counts}, which do not add up to {total}"
    return counts


def expected_samples(pass_rate: float, positives: int, negatives: int) -> float:
    """Return E[n] for drawing single samples, without a cap, until both classes are complete.

    With p the pass rate and q = 1 - p:
    ``positives / p + negatives / q - sum_{i < positives, j < negatives} C(i + j, i) p^i q^j``. The sum is E[min] of the
    two waiting times. Infinite if a class that is needed never comes.

    The sources say ``k / (p q)`` for k of both classes; wrong: the truth is near ``k / min(p, q)``, and at p = 1/2
    theirs is up to twice too large (k = 4: 10.1875, not 16; k = 1: 3, not 4). Raises ValueError unless 0 <= p <= 1 and
    counts are 0 or more.
    """
    check_rates([pass_rate])
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


def check_rates(pass_rates: Numbers) -> np.ndarray:
    """Return float64 [B]; ValueError unless every rate is from 0 to 1."""
    rates = check_weights(pass_rates, "pass rate")
    if (rates > 1).any():
        raise ValueError(f"pass rate {int(rates.argmax())} is {rates.max()}, expected 0 to 1")
    return rates


def check_weights(values: Numbers, label: str) -> np.ndarray:
    """Return float64 [B]; ValueError unless every value is finite and 0 or more."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"one {label} per prompt is expected, [B], got {list(array.shape)}")
    bad = ~(np.isfinite(array) & (array >= 0))
    if bad.any():
        raise ValueError(f"{label} {int(bad.argmax())} is {array[bad.argmax()]}, expected a number of 0 or more")
    return array
