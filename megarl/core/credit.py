"""Advantages and weights of what adaptive sampling selected.

A rule that looks at rewards trains on samples that are no fair draw from the policy. What that does to the gradient is
decided here: whose statistics the baseline is from, and whether the bias of the choice is taken out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from megarl.core.advantages import PoolScale, pooled
from megarl.core.allocation import clamp_rates, objective_slope
from megarl.core.collector import Selection
from megarl.core.pools import Pool
from megarl.core.stopping import SamplingRule
from megarl.core.stopping_law import unbiased_rates
from megarl.errors import ConfigError

Statistics = Literal["pool", "trained"]
Combination = Literal["plain", "unbiased"]
Weigh = Literal["sample", "prompt"]

_CHOICES = {"statistics": Statistics, "scale": PoolScale, "combination": Combination, "weigh": Weigh}


@dataclass(frozen=True, slots=True)
class Credit:
    """How selected samples are credited; the defaults are the released Reinforce-Ada's. ConfigError for other names."""

    statistics: Statistics = "pool"
    """Whose mean and standard deviation: of all that was drawn of the prompt, whole rounds included, or of what trains.
    The latter makes a prompt with 2 of 32 correct look like one with 2 of 4. Rewards need not be 0 and 1, for which the
    released code does not work: it rebuilds the pool from counts. Nor has a pool of one the mean 0 that it has there;
    its advantage is 0."""
    scale: PoolScale = "none"
    """The divisor: 1, the standard deviation, the pass rate or its root. The sources disagree: the code divides by
    nothing, the paper's third version by the pass rate in one place and by nothing in another; a post praises 1 / p,
    which the same paper found to deteriorate, and its figure and text differ. A pool of equal rewards gives 0, for a
    solved prompt too: 0 / (1 + eps), not 0 / 0."""
    ddof: int = 1
    """Of the standard deviation: 1 unbiased, 0 population."""
    floor: float = 1e-6
    """Least standard deviation to divide by."""
    rate_eps: float = 0.0
    """Added to the pass rate before it divides; Ada-Est: scale "root_rate" with 1e-3."""
    combination: Combination = "plain"
    """"unbiased": the advantage is + v n / n+ for each of the n+ positives of n samples that train, - v n / n- for each
    negative, with v an unbiased estimate of p (1 - p) from the pool (``unbiased_rates``). The prompt's mean then has
    the expectation grad p, p being the rate of rewards above the rule's threshold, whatever was selected by the classes
    of the samples; statistics and scale are not used.
    "plain" with a balanced batch has c(p) grad p instead (``balanced_slope``)."""
    objective: str | None = None
    """Maximise f(p) by the weight f'(p), with the pool's pass rate (``objective_slope``); None for no weight. Not where
    counts were allotted for f, advantages are divided by the standard deviation and samples count alike: a sum over
    ``n ~ f' std`` samples with ``1 / std`` is ``f'`` already."""
    weigh: Weigh = "sample"
    """What counts alike: each sample, so that prompts count by how many of theirs train, or each prompt."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in get_args(choices):
                raise ConfigError(f"credit: {name} is {getattr(self, name)!r}, expected one of {get_args(choices)}")
        if self.combination == "unbiased" and (self.scale != "none" or self.statistics != "pool"):
            raise ConfigError(
                'credit: combination "unbiased" uses neither scale nor other statistics; leave these at their defaults'
            )
        if self.objective is not None:
            objective_slope([0.5], self.objective)


def assign(credit: Credit, selection: Selection) -> tuple[np.ndarray, np.ndarray]:
    """Return (advantages, weights), float64 [N] each, of the selected samples; the gradient has their product.

    They are apart so that a weight also goes with other advantages of the same samples, such as those of an objective
    that has one per token. Weights have no fixed mean. Raises ConfigError where "unbiased" meets a rule that trains on
    one class only of a pool that has both.
    """
    weights = np.ones(len(selection.prompts))
    rows = {pool.prompt: selection.prompts == pool.prompt for pool in selection.pools} if _by_prompt(credit) else {}
    if credit.weigh == "prompt":
        groups = [row for row in rows.values() if row.any()]
        for row in groups:
            weights[row] = len(weights) / len(groups) / row.sum()
    if credit.objective is not None:
        for pool in selection.pools:
            weights[rows[pool.prompt]] *= _slope(pool, selection.rule.threshold, credit.objective)
    if credit.combination == "unbiased":
        advantages = np.zeros(len(weights))
        for pool in selection.pools:
            row = rows[pool.prompt]
            advantages[row] = _unbiased(pool, selection.rewards[row], selection.rule)
        return advantages, weights
    return _plain(credit, selection), weights


def _by_prompt(credit: Credit) -> bool:
    return credit.weigh == "prompt" or credit.objective is not None or credit.combination == "unbiased"


def _plain(credit: Credit, selection: Selection) -> np.ndarray:
    rewards, prompts = selection.rewards, selection.prompts
    if not len(rewards):
        return np.zeros(0)
    if credit.statistics == "trained":
        pool_rewards, pool_prompts = rewards, prompts
    else:
        pool_rewards = np.concatenate([pool.values() for pool in selection.pools])
        pool_prompts = np.repeat([p.prompt for p in selection.pools], [len(p.samples()) for p in selection.pools])
    scaling = {"scale": credit.scale, "ddof": credit.ddof, "floor": credit.floor, "rate_eps": credit.rate_eps}
    return pooled(rewards, prompts, pool_rewards, pool_prompts, **scaling).numpy()


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
    product = unbiased_rates(rule, pool.asked, pool.drawn(), pool.classes(rule.threshold)[0], pool.prompt).product
    return product * len(rewards) * np.where(positive, 1 / num_positive, -1 / num_negative)
