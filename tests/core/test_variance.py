from __future__ import annotations

import numpy as np

from megarl.core.measures import optimal_baselines, variance_metrics
from megarl.core.metrics import finalize


def test_optimal_baselines_minimise_the_weighted_square() -> None:
    generator = np.random.default_rng(0)
    rewards, squares, groups = generator.random(9), generator.random(9), np.repeat([3, 1, 7], 3)
    found = optimal_baselines(rewards, groups, squares)
    for group in (1, 3, 7):
        rows = groups == group
        grid = np.linspace(0, 1, 10001)
        costs = ((rewards[rows, None] - grid) ** 2 * squares[rows, None]).sum(0)
        np.testing.assert_allclose(found[rows], grid[costs.argmin()], atol=1e-4)
    assert optimal_baselines(np.array([1.0, 0.0]), np.zeros(2), np.zeros(2)).tolist() == [0.5, 0.5]
    # The one success has three times the weight: 3 / (3 + 1).
    assert optimal_baselines(np.array([1.0, 0.0]), np.zeros(2), np.array([3.0, 1.0])).tolist() == [0.75, 0.75]


def test_variance_is_the_trace_of_the_covariance() -> None:
    generator = np.random.default_rng(1)
    scores, advantages = generator.normal(size=(12, 5)), generator.normal(size=12)
    rewards, groups = (generator.random(12) > 0.5).astype(float), np.arange(12) // 4
    gradients = advantages[:, None] * scores
    squares = (scores**2).sum(1)
    found = finalize(variance_metrics(rewards, groups, advantages, squares, float((gradients.sum(0) ** 2).sum())))
    variance = float(np.trace(np.cov(gradients.T)))
    np.testing.assert_allclose(found["variance/gradient"], variance)
    np.testing.assert_allclose(found["variance/signal"], float((gradients.mean(0) ** 2).sum()) - variance / 12)
    assert 0 < found["baseline/variance_ratio"] < 1
    alike = finalize(variance_metrics(rewards, groups, advantages, np.ones(12), 0.0))
    np.testing.assert_allclose(alike["baseline/optimal"], alike["baseline/mean"])
    assert alike["baseline/variance_ratio"] == 1
