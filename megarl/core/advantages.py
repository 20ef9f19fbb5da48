"""From the rewards of a group of responses to one advantage per response, or per token.

A group is all responses to one prompt. Statistics include the response itself, and must be taken before a step is
split into mini-batches. A group without contrast (uniform rewards, or a single response) gives exactly 0: nothing can
be learned from it, and rounding must not pretend otherwise. Only RAFT, which has no baseline, trains on such groups.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megarl.core.choices.parts import PoolScale
from megarl.core.choices.stopping import POSITIVE
from megarl.core.ratios import (
    check_cu_seqlens,
    is_logprob,
    log_ratio,
    logprob_error,
    positions,
    segment_cumsum,
    segment_expand,
    segment_sum,
)
from megarl.errors import NumericsError

Values = Tensor | np.ndarray | Sequence[float]


def group_mean(rewards: Values, groups: Values) -> Tensor:
    """Return ``R - mean_group(R)``, without a division by the standard deviation.

    rewards: [N]; groups: integer [N], any ids, equal for responses to the same prompt; result: [N].
    Raises NumericsError if a reward is not finite. Source: MiniRL (Zheng et al., arXiv 2512.01374), its "group-
    normalized" advantage, which subtracts the mean only.
    """
    rewards, inverse = _prepare(rewards, groups)
    return _center(rewards.double(), inverse).to(rewards.dtype)


def grpo(rewards: Values, groups: Values, ddof: int = 1, eps: float = 1e-6) -> Tensor:
    """Return ``(R - mean_group(R)) / (std_group(R) + eps)``.

    rewards: [N]; groups: integer [N]; ddof: 1 for the unbiased standard deviation (as verl), 0 for the population's;
    result: [N]. Raises NumericsError if a reward is not finite. Source: DeepSeekMath (arXiv 2402.03300).
    """
    if ddof not in (0, 1) or not eps >= 0:
        raise ValueError(f"grpo needs ddof 0 or 1 and eps >= 0, got ddof={ddof}, eps={eps}")
    rewards, inverse = _prepare(rewards, groups)
    return _standardize(rewards.double(), inverse, ddof, eps).to(rewards.dtype)


def rloo(rewards: Values, groups: Values) -> Tensor:
    """Return ``R`` minus the mean of the other rewards of the group, which is ``(R - mean_group(R)) * G / (G - 1)``.

    rewards: [N]; groups: integer [N]; result: [N], 0 for a group of one. Raises NumericsError if a reward is not
    finite. Source: RLOO (Ahmadian et al., arXiv 2402.14740).
    """
    rewards, inverse = _prepare(rewards, groups)
    counts = torch.bincount(inverse)
    factors = counts.double() / (counts - 1).clamp(min=1)
    return (_center(rewards.double(), inverse) * factors[inverse]).to(rewards.dtype)


def raft(rewards: Values, groups: Values, threshold: float = POSITIVE) -> Tensor:
    """Return ``1[R > threshold]``: correct responses are accepted, all others rejected, whatever their group.

    rewards: [N]; groups: integer [N], not used; result: [N]. Raises NumericsError if a reward is not finite. Source:
    RAFT (arXiv 2304.06767), whose rewards are 0 and 1. Accepting the best of a group instead would train on every
    response of an all-wrong one.
    """
    rewards, _ = _prepare(rewards, groups)
    return (rewards > threshold).to(rewards.dtype)


def normalize_by_pool(
    rewards: Values,
    groups: Values,
    pool_rewards: Values,
    pool_groups: Values,
    scale: PoolScale = "none",
    ddof: int = 1,
    floor: float = 1e-6,
    rate_eps: float = 0.0,
) -> Tensor:
    """Return ``(R - mean_pool(R)) / s`` for the responses that train, with statistics of all that were sampled.

    s by ``scale``: 1 | ``max(std_pool, floor)`` | ``mean_pool + rate_eps`` | ``sqrt(mean_pool + rate_eps)``, these two
    for rewards of 0 and 1; 0 / 0 is 0. rewards: [N], groups: integer [N], of the responses that train; pool_rewards,
    pool_groups: [P], of all responses of the same prompts, those that train among them; result: [N]. A pool of one or
    of equal rewards gives exactly 0. Raises ValueError if a group has no pool or a rate is negative, NumericsError if a
    reward is not finite. Source: Reinforce-Ada (arXiv 2510.04996), global statistics.
    """
    if scale not in ("none", "std", "rate", "root_rate") or ddof not in (0, 1) or not floor > 0 or not rate_eps >= 0:
        raise ValueError(
            f"scale {scale!r}, ddof {ddof}, floor {floor}, rate_eps {rate_eps}; expected a {PoolScale}, 0 or 1, above "
            "0, and 0 or more"
        )
    rewards, _ = _prepare(rewards, groups)
    pool, inverse = _prepare(pool_rewards, pool_groups)
    ids = torch.unique(_integers(pool_groups))
    wanted = _integers(groups).to(ids.device)
    row = torch.searchsorted(ids, wanted).clamp(max=max(ids.numel() - 1, 0))
    if wanted.numel() and (not ids.numel() or bool((ids[row] != wanted).any())):
        raise ValueError(f"groups {wanted.tolist()} train, but the pool holds {ids.tolist()}: pool all that is sampled")
    pool = pool.double()
    counts, uniform = torch.bincount(inverse), uniform_groups(pool, inverse)
    mean = pool.new_zeros(counts.numel()).index_add(0, inverse, pool) / counts
    if scale == "none":
        divisor = torch.ones_like(mean)
    elif scale == "std":
        squares = torch.zeros_like(mean).index_add(0, inverse, _center(pool, inverse).square())
        divisor = (squares / (counts - ddof).clamp(min=1)).sqrt().clamp(min=floor)
    elif bool((mean < 0).any()):
        raise ValueError(f"scale {scale!r} needs pass rates, but the mean of a pool is {float(mean.min())}")
    else:
        divisor = mean + rate_eps if scale == "rate" else (mean + rate_eps).sqrt()
    flat = uniform | (divisor == 0)
    values = (rewards.double() - mean[row]) / torch.where(flat, 1.0, divisor)[row]
    return torch.where(flat[row], 0.0, values).to(rewards.dtype)


def token_level_returns(
    rewards: Values,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    beta: float,
    horizon: int | None = None,
) -> Tensor:
    """Return ``r_j = R - beta / H * sum_{i>=j} K_i`` with ``K_i = log pi_theta(y_i) - log pi_ref(y_i)``, detached.

    H is ``horizon`` if given, else the number of loss tokens of the response. The policy gradient of
    ``E[R - beta / H * ln(pi_theta / pi_ref)]`` is ``E[sum_j r_j grad log pi(y_j)]`` exactly for a constant H; with each
    response's own length it is biased, for then H depends on what is sampled.

    rewards: [N]; logprobs, ref_logprobs: [T]; loss_mask: bool [T]; cu_seqlens: int64 [N+1]; result: [T] in fp32 (fp64
    if a column is), 0 where not loss_mask. Per-token log-ratios are clamped to +-20; a token with logprobs -inf counts
    as if it were no loss token. Raises NumericsError if a reward is not finite, or a log-probability of a loss token is
    NaN or above 0.
    """
    _check_columns(logprobs, ref_logprobs, loss_mask, cu_seqlens)
    if not beta >= 0 or (horizon is not None and horizon < 1):
        raise ValueError(f"beta is {beta}, horizon {horizon}; expected 0 or more, and at least 1 token or None")
    rewards, _ = _prepare(rewards, np.zeros(len(rewards), dtype=np.int64))
    if rewards.numel() != cu_seqlens.numel() - 1:
        raise ValueError(f"{rewards.numel()} rewards for {cu_seqlens.numel() - 1} sequences, expected one per sequence")
    keep = loss_mask & ~torch.isneginf(logprobs)
    kl = log_ratio(logprobs.detach(), ref_logprobs.detach(), keep)
    lengths = segment_sum(keep, cu_seqlens).clamp(min=1) if horizon is None else torch.tensor(horizon)
    share = (beta / lengths.double()).to(kl.device).expand(rewards.numel())
    future = segment_cumsum(kl, cu_seqlens, reverse=True) * segment_expand(share, cu_seqlens)
    returns = segment_expand(rewards.to(kl.device).double(), cu_seqlens) - future
    return torch.where(keep, returns, 0.0).to(kl.dtype)


def token_level_kl(
    rewards: Values,
    groups: Values,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    beta: float,
    ddof: int = 0,
    eps: float = 1e-6,
    horizon: int | None = None,
) -> Tensor:
    """Return ``(r_j - mean_j) / (std_j + eps)``: returns to go, standardised per position over the group.

    r_j is that of ``token_level_returns``. The statistics at j are over the responses of the group that have a j-th
    loss token; where only one has, or all are equal, the advantage is exactly 0. Positions count loss tokens, not
    columns, so environment tokens shift nothing.

    rewards, groups: [N]; logprobs, ref_logprobs: [T]; loss_mask: bool [T]; cu_seqlens: int64 [N+1]; result: [T].
    Errors as in ``token_level_returns``.
    """
    if ddof not in (0, 1) or not eps >= 0:
        raise ValueError(f"token_level_kl needs ddof 0 or 1 and eps >= 0, got ddof={ddof}, eps={eps}")
    returns = token_level_returns(rewards, logprobs, ref_logprobs, loss_mask, cu_seqlens, beta, horizon)
    _, inverse = _prepare(rewards, groups)
    keep = loss_mask & ~torch.isneginf(logprobs)
    # One cell per (group, position): groups lie back to back, each as long as its longest response.
    lengths = segment_sum(keep, cu_seqlens)
    inverse = inverse.to(lengths.device)
    num_groups = int(inverse.max()) + 1 if inverse.numel() else 0
    longest = lengths.new_zeros(num_groups).scatter_reduce(0, inverse, lengths, reduce="amax")
    first_cell = longest.cumsum(0) - longest
    cells = segment_expand(first_cell[inverse], cu_seqlens) + positions(keep, cu_seqlens) - 1
    values = returns.new_zeros(returns.shape).double()
    values[keep] = _standardize(returns[keep].double(), cells[keep], ddof, eps)
    return values.to(returns.dtype)


def uniform_groups(rewards: Values, groups: Values) -> Tensor:
    """Return bool [number of groups], in the order of their ids: True where all rewards of a group are equal."""
    rewards, inverse = _prepare(rewards, groups)
    lowest, highest = _extremes(rewards.double(), inverse)
    return lowest == highest


def _prepare(rewards: Values, groups: Values) -> tuple[Tensor, Tensor]:
    """Return the rewards as a floating tensor and, for each, the index of its group 0..B-1."""
    rewards = rewards if isinstance(rewards, Tensor) else torch.as_tensor(np.asarray(rewards, dtype=np.float64))
    if not rewards.is_floating_point():
        rewards = rewards.double()
    elif rewards.dtype != torch.float64:
        rewards = rewards.float()
    groups = _integers(groups)
    if rewards.dim() != 1 or rewards.shape != groups.shape:
        raise ValueError(f"rewards {list(rewards.shape)} and groups {list(groups.shape)} must both be [N]")
    finite = torch.isfinite(rewards)
    if not bool(finite.all()):
        first = int((~finite).nonzero()[0])
        raise NumericsError(
            f"the reward of response {first} (group {groups[first].item()}) is {rewards[first].item()}, "
            f"expected a finite number: the reward function must not return NaN or infinity"
        )
    _, inverse = torch.unique(groups.to(rewards.device), return_inverse=True)
    return rewards, inverse


def _integers(groups: Values) -> Tensor:
    return groups if isinstance(groups, Tensor) else torch.as_tensor(np.asarray(groups))


def _check_columns(logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> None:
    """Refuse columns of different shapes, and what is no log-probability on a loss token."""
    if not logprobs.shape == ref_logprobs.shape == loss_mask.shape or logprobs.dim() != 1:
        raise ValueError(
            f"logprobs {list(logprobs.shape)}, ref_logprobs {list(ref_logprobs.shape)} and loss_mask "
            f"{list(loss_mask.shape)} must all be [T]"
        )
    check_cu_seqlens(cu_seqlens, logprobs.numel())
    for name, column in (("logprobs", logprobs), ("ref_logprobs", ref_logprobs)):
        bad = loss_mask & ~is_logprob(column)
        if bool(bad.any()):
            raise logprob_error(name, column, bad)


def _standardize(values: Tensor, inverse: Tensor, ddof: int, eps: float) -> Tensor:
    """Return float64 values less the mean of their group, over its standard deviation plus eps; 0 without contrast."""
    centered = _center(values, inverse)
    counts = torch.bincount(inverse)
    squares = centered.new_zeros(counts.numel()).index_add(0, inverse, centered.square())
    deviation = (squares / (counts - ddof).clamp(min=1)).sqrt()[inverse]
    return torch.where(centered == 0, 0.0, centered / (deviation + eps))


def _center(rewards: Tensor, inverse: Tensor) -> Tensor:
    """Return rewards minus the mean of their group, exactly 0 where all rewards of the group are equal."""
    counts = torch.bincount(inverse)
    means = rewards.new_zeros(counts.numel()).index_add(0, inverse, rewards) / counts
    lowest, highest = _extremes(rewards, inverse)
    return torch.where((lowest == highest)[inverse], 0.0, rewards - means[inverse])


def _extremes(rewards: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    num_groups = int(inverse.max()) + 1 if inverse.numel() else 0
    empty = rewards.new_zeros(num_groups)
    lowest = empty.scatter_reduce(0, inverse, rewards, reduce="amin", include_self=False)
    highest = empty.scatter_reduce(0, inverse, rewards, reduce="amax", include_self=False)
    return lowest, highest
