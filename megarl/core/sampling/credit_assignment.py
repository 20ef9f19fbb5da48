"""Advantages and weights of what adaptive sampling selected."""

import numpy as np

from megarl.core.advantages import normalize_by_pool
from megarl.core.choices.credit import Credit
from megarl.core.choices.stopping import SamplingRule
from megarl.core.sampling.allocation import clamp_rates, objective_slope
from megarl.core.sampling.collector import Pool, PoolRows, Selection
from megarl.core.sampling.stopping_law import unbiased_rates
from megarl.errors import ConfigError


def assign(credit: Credit, selection: Selection, trains: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return (advantages, weights), float64 [N] each, of the selected samples; the gradient has their product.

    trains: as in ``weigh``. ConfigError if "unbiased" needs both classes of a pool, but the rule trains on a single
    class.
    """
    if credit.combination != "unbiased":
        return _plain(credit, selection), weigh(credit, selection, trains)
    advantages, order = np.zeros(len(selection.prompts)), np.argsort(selection.prompts, kind="stable")
    ascending, numbers = selection.prompts[order], [pool.prompt for pool in selection.pools]
    begins, ends = (np.searchsorted(ascending, numbers, side).tolist() for side in ("left", "right"))
    for pool, begin, end in zip(selection.pools, begins, ends, strict=True):
        rows = order[begin:end]
        advantages[rows] = _unbiased(pool, selection.rewards[rows], selection.rule)
    return advantages, weigh(credit, selection, trains)


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


def _plain(credit: Credit, selection: Selection) -> np.ndarray:
    rewards, prompts = selection.rewards, selection.prompts
    if not len(rewards):
        return np.zeros(0)
    if credit.statistics == "trained":
        pool_rewards, pool_prompts = rewards, prompts
    else:
        pooled = PoolRows.of(selection.pools)
        pool_rewards, pool_prompts = pooled.value, np.array([pool.prompt for pool in selection.pools])[pooled.pool]
    scaling = {"scale": credit.scale, "ddof": credit.ddof, "floor": credit.floor, "rate_eps": credit.rate_eps}
    return normalize_by_pool(rewards, prompts, pool_rewards, pool_prompts, **scaling).numpy()


def _slope(pool: Pool, threshold: float, objective: str) -> float:
    positives, negatives = pool.classes(threshold)
    drawn = positives + negatives
    if not drawn:
        return 1.0
    return float(objective_slope(clamp_rates([positives / drawn], drawn), objective)[0])


def _unbiased(pool: Pool, rewards: np.ndarray, rule: SamplingRule) -> np.ndarray:
    """Advantages of one prompt's trained samples: ``n v (mean over positives - mean over negatives)``."""
    positive = rewards > rule.threshold
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    if not all(pool.classes(rule.threshold)):
        return np.zeros(len(rewards))
    if not num_positive or not num_negative:
        raise ConfigError(
            f'credit: combination "unbiased" needs both classes of prompt {pool.prompt}, but the rule chose '
            f'{num_positive} positives and {num_negative} negatives: let it keep "balance" and train on two or more'
        )
    _, product = unbiased_rates(rule, pool.asked, pool.drawn(), pool.classes(rule.threshold)[0], pool.prompt)
    return product * len(rewards) * np.where(positive, 1 / num_positive, -1 / num_negative)
