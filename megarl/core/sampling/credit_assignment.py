"""Advantages and weights of what adaptive sampling selected."""

import numpy as np

from megarl.core.advantages.groups import normalize_by_pool
from megarl.core.choices.credit import Credit
from megarl.core.sampling.allocation import clamp_rates, objective_slope
from megarl.core.sampling.collector import Pool, PoolRows, Selection


def assign(credit: Credit, selection: Selection, trains: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return (advantages, weights), float64 [N] each, of the selected samples; the gradient has their product.

    trains: as in ``weigh``.
    """
    weights, rewards, prompts = weigh(credit, selection, trains), selection.rewards, selection.prompts
    if not len(rewards):
        return np.zeros(0), weights
    pool_rewards, pool_prompts = rewards, prompts
    if credit.statistics == "pool":
        pooled = PoolRows.of(selection.pools)
        pool_rewards, pool_prompts = pooled.value, np.array([pool.prompt for pool in selection.pools])[pooled.pool]
    scaling = {"scale": credit.scale, "ddof": credit.ddof, "floor": credit.floor, "rate_eps": credit.rate_eps}
    return normalize_by_pool(rewards, prompts, pool_rewards, pool_prompts, **scaling).numpy(), weights


def weigh(credit: Credit, selection: Selection, trains: np.ndarray | None = None) -> np.ndarray:
    """Return only the weights, float64 [N], without a fixed mean, for advantages of an objective.

    trains: bool [N], samples selected by the objective (RAFT: positives); weights per prompt count the selected
    samples. None for all.
    """
    weights = np.ones(len(selection.prompts))
    if credit.weigh == "prompt":
        is_trained = np.ones_like(weights, dtype=bool) if trains is None else trains
        numbers, place, counts = np.unique(selection.prompts[is_trained], return_inverse=True, return_counts=True)
        weights[is_trained] = is_trained.sum() / max(len(numbers), 1) / counts[place]
    if credit.objective is not None:
        slopes = {pool.prompt: _slope(pool, selection.rule.threshold, credit.objective) for pool in selection.pools}
        weights *= [slopes[prompt] for prompt in selection.prompts.tolist()]
    return weights


def _slope(pool: Pool, threshold: float, objective: str) -> float:
    positives, negatives = pool.classes(threshold)
    drawn = positives + negatives
    return 1.0 if not drawn else float(objective_slope(clamp_rates([positives / drawn], drawn), objective)[0])
