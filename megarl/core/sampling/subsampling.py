"""Which of a prompt's samples train, when more were drawn than are to be trained on."""

import math
from collections.abc import Sequence

import numpy as np

from megarl.core.choices.stopping import POSITIVE, Keep
from megarl.errors import ConfigError, NumericsError, refusal


def subsample(
    rewards: Sequence[float] | np.ndarray, n: int, rule: Keep, *,
    threshold: float = POSITIVE, seed: int | Sequence[int] | None = None,
) -> np.ndarray:  # fmt: skip
    """Return the ascending indices of the ``n`` samples of a prompt that train; all indices if ``n`` is larger.

    rewards: [P] in the order in which the samples were asked for; positive is above ``threshold``. rule:

    - "balance": ``min(n // 2, positives)`` positives, and negatives for the rest;
    - "pos": as many positives as is their share of all, ``ceil(n * positives / P)``, but at least one of either class;
      for a pool that ended without enough positives;
    - "any": whatever the class.

    If a class is short, the other class fills up. Within a class the first samples are kept, or with ``seed`` a random
    choice. "First" is the order of requests; the order of finishing would prefer short responses. result: int64 [min(n,
    P)]. Raises NumericsError for a NaN, ValueError for ``n`` below 1, ConfigError for an unknown rule. Source:
    Reinforce-Ada (arXiv 2510.04996), its released code; the choice by seed is ours.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or n < 1:
        raise ValueError(f"subsample needs rewards [P] and n of at least 1, got {list(values.shape)} and {n}")
    if np.isnan(values).any():
        raise NumericsError(refusal("reward_is_nan", index=int(np.isnan(values).argmax())))
    order = np.arange(values.size) if seed is None else np.random.default_rng(seed).permutation(values.size)
    positive = values[order] > threshold
    take = min(n, values.size)
    if rule == "any":
        return np.sort(order[:take])
    num_positive = positives_to_keep(int(positive.sum()), int((~positive).sum()), n, rule)
    return np.sort(np.concatenate([order[positive][:num_positive], order[~positive][: take - num_positive]]))


def positives_to_keep(positives: int, negatives: int, n: int, rule: Keep) -> int:
    """Return how many positives are among the ``min(n, positives + negatives)`` samples that ``subsample`` keeps.
    ConfigError for a rule that counts no classes.
    """
    take = min(n, positives + negatives)
    if rule == "balance":
        target = n // 2
    elif rule == "pos":
        share = math.ceil(n * positives / max(positives + negatives, 1))
        target = max(min(share, take - 1), 1)
    else:
        raise ConfigError(f'rule {rule!r} does not count classes; expected "balance" or "pos"')
    target = min(target, positives)
    return max(target, take - negatives)
