"""The variance of a policy gradient, measured from the gradient norms of single responses."""

from __future__ import annotations

import numpy as np
import torch

from megarl.core.metrics import Stat


def optimal_baselines(rewards: np.ndarray, groups: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Return each response's baseline of least variance, ``b* = sum w r / sum w`` over its group; float64 [N].

    w = ``||grad log pi(y)||^2`` (``squares``): b* minimises ``sum w (r - b)^2``, and the mean reward does if all w are
    equal. All arguments [N]; where all w of a group are 0, its mean. Source: Greensmith et al. (JMLR 2004), theorem 8.
    """
    _, inverse = np.unique(groups, return_inverse=True)
    sums = np.bincount(inverse, weights=squares)
    weights = np.where(sums[inverse] > 0, squares, 1.0)
    return (np.bincount(inverse, weights=weights * rewards) / np.bincount(inverse, weights=weights))[inverse]


def variance_metrics(
    rewards: np.ndarray, groups: np.ndarray, advantages: np.ndarray, squares: np.ndarray, square_of_sum: float
) -> dict[str, Stat]:
    """Return the variance of a response's gradient ``g = A grad log pi(y)``, and what another baseline would give.

    - ``variance/gradient``: ``(sum ||g||^2 - ||sum g||^2 / N) / (N - 1)``, the trace of the covariance.
    - ``variance/signal``: ``||mean g||^2`` without its bias, ``variance / N``; may be negative.
    - ``baseline/mean``, ``baseline/optimal``: the groups' mean rewards and ``optimal_baselines``, over responses.
    - ``baseline/variance_ratio``: ``sum w (r - b*)^2 / sum w (r - mean)^2``, at most 1; 1 without any contrast.

    All [N], N at least 2, of one step; square_of_sum: ``||sum g||^2``.
    """
    count = len(rewards)
    variance = (float(advantages**2 @ squares) - square_of_sum / count) / (count - 1)
    mean, best = (optimal_baselines(rewards, groups, weights) for weights in (np.ones(count), squares))
    around_mean, around_best = (float(squares @ (rewards - baseline) ** 2) for baseline in (mean, best))
    found = {
        "variance/gradient": variance,
        "variance/signal": square_of_sum / count**2 - variance / count,
        "baseline/mean": mean.mean(),
        "baseline/optimal": best.mean(),
        "baseline/variance_ratio": around_best / around_mean if around_mean else 1.0,
    }
    return {name: Stat.mean(torch.tensor([value], dtype=torch.float64)) for name, value in found.items()}
