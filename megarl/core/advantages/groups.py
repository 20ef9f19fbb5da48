"""From the rewards of a group to one advantage per response, with equal weights of responses."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megarl.core.choices.parts import PoolScale
from megarl.core.choices.stopping import POSITIVE
from megarl.errors import ConfigError, NumericsError, refusal

Values = Tensor | np.ndarray | Sequence[float]


def group_mean(rewards: Values, groups: Values) -> Tensor:
    """Return ``R - mean_group(R)``, without a division by the standard deviation.

    rewards: [N]; groups: integer [N], any ids, equal for responses to the same prompt; result: [N]. Raises
    NumericsError if a reward is not finite. Source: MiniRL (Zheng et al., arXiv 2512.01374), the "group-normalized"
    advantage (mean only).
    """
    rewards, inverse = prepare(rewards, groups)
    return center(rewards.double(), inverse).to(rewards.dtype)


def grpo(rewards: Values, groups: Values, ddof: int = 1, eps: float = 1e-6) -> Tensor:
    """Return ``(R - mean_group(R)) / (std_group(R) + eps)``.

    rewards: [N]; groups: integer [N]; ddof: 1 for the unbiased standard deviation (as verl), 0 for the population's;
    result: [N]. Raises NumericsError if a reward is not finite. Source: DeepSeekMath (arXiv 2402.03300). ValueError for
    another ddof or a negative eps.
    """
    if ddof not in (0, 1) or not eps >= 0:
        raise ValueError(f"grpo needs ddof 0 or 1 and eps >= 0, got ddof={ddof}, eps={eps}")
    rewards, inverse = prepare(rewards, groups)
    return standardize(rewards.double(), inverse, ddof, eps).to(rewards.dtype)


def rloo(rewards: Values, groups: Values) -> Tensor:
    """Return ``(R - mean_group(R)) * G / (G - 1)``: R minus the mean over the remaining group.

    rewards: [N]; groups: integer [N]; result: [N], 0 for a group of one. Leave responses without an outcome out. Raises
    NumericsError if a reward is not finite. Source: RLOO (Ahmadian et al., arXiv 2402.14740).
    """
    rewards, inverse = prepare(rewards, groups)
    counts = torch.bincount(inverse)
    factors = counts.double() / (counts - 1).clamp(min=1)
    return (center(rewards.double(), inverse) * factors[inverse]).to(rewards.dtype)


def raw(rewards: Values, groups: Values) -> Tensor:
    """Return ``R``, without a baseline: rewards [N], groups integer [N] (not used) -> [N].

    Raises NumericsError if a reward is not finite.
    """
    return prepare(rewards, groups)[0].clone()


def raw_mixed(rewards: Values, groups: Values) -> Tensor:
    """Return ``R`` in groups with different rewards and in groups of one response; else 0.

    rewards: [N]; groups: integer [N]; result: [N]. Raises NumericsError if a reward is not finite. Source:
    Reinforce-Rej (arXiv 2504.11343) as released. The paper's rewards are +-1, for which see ``signed``. Uniform groups
    still count in denominators, unless the objective's ``selection`` removes uniform groups.
    """
    rewards, inverse = prepare(rewards, groups)
    rejected = uniform_groups(rewards, inverse) & (torch.bincount(inverse) > 1)
    return torch.where(rejected[inverse], 0.0, rewards)


def signed(rewards: Values, groups: Values, threshold: float = POSITIVE) -> Tensor:
    """Return +1 where ``R > threshold``, else -1: correct responses are reinforced, all others suppressed.

    rewards: [N]; groups: integer [N], not used; result: [N]. Raises NumericsError if a reward is not finite. Source:
    Reinforce-Rej (arXiv 2504.11343) as printed, whose rewards are +-1; with ``selection`` "mixed_groups".
    """
    return 2 * raft(rewards, groups, threshold) - 1


def raft(rewards: Values, groups: Values, threshold: float = POSITIVE) -> Tensor:
    """Return ``1[R > threshold]``: correct responses are accepted, wrong responses rejected, without regard to groups.

    rewards: [N]; groups: integer [N], not used; result: [N]. Raises NumericsError if a reward is not finite. Source:
    RAFT (arXiv 2304.06767), whose rewards are 0 and 1. (Accepting the best responses of a group would train on all
    responses of an all-wrong group.) A reward equal to the threshold is rejected.
    """
    rewards, _ = prepare(rewards, groups)
    return (rewards > threshold).to(rewards.dtype)


def positive_part(rewards: Values, groups: Values) -> Tensor:
    """Return ``max(R, 0)``: a response is accepted in proportion to its reward.

    rewards: [N]; groups: integer [N], not used; result: [N]. Raises NumericsError if a reward is not finite. Source:
    RAFT as released (RLHFlow, Minimal-RL).
    """
    return prepare(rewards, groups)[0].clamp(min=0)


def normalize_by_pool(
    rewards: Values, groups: Values, pool_rewards: Values, pool_groups: Values, scale: PoolScale = "none",
    ddof: int = 1, floor: float = 1e-6, rate_eps: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return ``(R - mean_pool(R)) / s`` for trained responses, with statistics of all sampled responses.

    s by ``scale``: 1 | ``max(std_pool, floor)`` | ``mean_pool + rate_eps`` | ``sqrt(mean_pool + rate_eps)``, these two
    for rewards of 0 and 1; 0 / 0 is 0. rewards: [N], groups: integer [N], of the responses that train; pool_rewards,
    pool_groups: [P], all responses of the prompts, trained or not; result: [N]. A pool of one or of equal rewards gives
    exactly 0. Raises ValueError if a group has no pool, NumericsError if a reward is not finite, ConfigError if one is
    negative and divided by rates.
    Source: Reinforce-Ada (arXiv 2510.04996), global statistics.
    """
    rewards, _ = prepare(rewards, groups)
    pool, inverse = prepare(pool_rewards, pool_groups)
    ids = torch.unique(as_tensor(pool_groups))
    trained = as_tensor(groups).to(ids.device)
    row = torch.searchsorted(ids, trained).clamp(max=max(ids.numel() - 1, 0))
    if trained.numel() and (not ids.numel() or bool((ids[row] != trained).any())):
        raise ValueError(f"groups {trained.tolist()} train, expected all of them in the pool, {ids.tolist()}")
    pool = pool.double()
    counts, uniform = torch.bincount(inverse), uniform_groups(pool, inverse)
    mean = pool.new_zeros(counts.numel()).index_add(0, inverse, pool) / counts
    if scale == "none":
        divisor = torch.ones_like(mean)
    elif scale == "std":
        squares = torch.zeros_like(mean).index_add(0, inverse, center(pool, inverse).square())
        divisor = (squares / (counts - ddof).clamp(min=1)).sqrt().clamp(min=floor)
    elif bool((pool < 0).any()):
        raise ConfigError(refusal("negative_reward", scale=scale, lowest=float(pool.min())))
    else:
        divisor = mean + rate_eps if scale == "rate" else (mean + rate_eps).sqrt()
    flat = uniform | (divisor == 0)
    values = (rewards.double() - mean[row]) / torch.where(flat, 1.0, divisor)[row]
    return torch.where(flat[row], 0.0, values).to(rewards.dtype)


def uniform_groups(rewards: Values, groups: Values) -> Tensor:
    """Return bool [number of groups], in the order of their ids: True where all rewards of a group are equal."""
    rewards, inverse = prepare(rewards, groups)
    lowest, highest = extremes(rewards.double(), inverse)
    return lowest == highest


def prepare(rewards: Values, groups: Values) -> tuple[Tensor, Tensor]:
    """Return the rewards as a floating tensor [N], and the index 0..B-1 of the group of each reward, int64 [N].
    ValueError unless rewards and groups are [N], NumericsError if a reward is not finite."""
    rewards = rewards if isinstance(rewards, Tensor) else torch.as_tensor(np.asarray(rewards, dtype=np.float64))
    if not rewards.is_floating_point():
        rewards = rewards.double()
    elif rewards.dtype != torch.float64:
        rewards = rewards.float()
    groups = as_tensor(groups)
    if rewards.dim() != 1 or rewards.shape != groups.shape:
        raise ValueError(f"rewards {list(rewards.shape)} and groups {list(groups.shape)} must both be [N]")
    finite = torch.isfinite(rewards)
    if not bool(finite.all()):
        first = int((~finite).nonzero()[0])
        raise NumericsError(refusal("infinite_reward", response=first, group=groups[first], reward=rewards[first]))
    _, inverse = torch.unique(groups.to(rewards.device), return_inverse=True)
    return rewards, inverse


def as_tensor(values: Values) -> Tensor:
    """Return a tensor unchanged, any other values as a CPU tensor with NumPy's dtype. [N] stays [N]."""
    return values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))


def fill(values: Tensor, keep: Tensor) -> Tensor:
    """Return [N]: ``values`` where keep, bool [N], is True; 0 elsewhere."""
    return values.new_zeros(keep.shape).masked_scatter(keep, values)


def standardize(values: Tensor, inverse: Tensor, ddof: int, eps: float) -> Tensor:
    """Return float64 [N], ``(value - mean) / (std + eps)`` over the group; 0 without contrast."""
    centered = center(values, inverse)
    counts = torch.bincount(inverse)
    squares = centered.new_zeros(counts.numel()).index_add(0, inverse, centered.square())
    deviation = (squares / (counts - ddof).clamp(min=1)).sqrt()[inverse]
    return torch.where(centered == 0, 0.0, centered / (deviation + eps))


def center(values: Tensor, inverse: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return values minus the mean of their group, exactly 0 where all values of the group are equal.

    weights: [N], positive, of each value in the mean; None for equal ones.
    """
    weights = torch.ones_like(values) if weights is None else weights
    lowest, highest = extremes(values, inverse)
    totals = torch.zeros_like(lowest).index_add(0, inverse, weights)
    means = torch.zeros_like(lowest).index_add(0, inverse, weights * values) / totals
    return torch.where((lowest == highest)[inverse], 0.0, values - means[inverse])


def extremes(rewards: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest reward of each group, [B] each."""
    empty = rewards.new_zeros(int(inverse.max()) + 1 if inverse.numel() else 0)
    lowest = empty.scatter_reduce(0, inverse, rewards, reduce="amin", include_self=False)
    return lowest, empty.scatter_reduce(0, inverse, rewards, reduce="amax", include_self=False)
