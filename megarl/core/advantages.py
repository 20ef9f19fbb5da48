"""From the rewards of a group of responses to one advantage per response.

A group is all responses to one prompt. Statistics include the response itself, and must be taken before a step is
split into mini-batches. A group without contrast (uniform rewards, or a single response) gives exactly 0: nothing can
be learned from it, and rounding must not pretend otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megarl.errors import NumericsError

AdvantageName = Literal["group_mean", "grpo"]
Values = Tensor | np.ndarray | Sequence[float]


def group_mean(rewards: Values, groups: Values) -> Tensor:
    """Return ``R - mean_group(R)``, without a division by the standard deviation.

    rewards: [N]; groups: integer [N], any ids, equal for responses to the same prompt; result: [N].
    Raises NumericsError if a reward is not finite. Source: MiniRL (Zheng et al., arXiv 2512.01374), its "group-
    normalized" advantage, which subtracts the mean only.
    """
    rewards, inverse = _prepare(rewards, groups)
    return _centered(rewards.double(), inverse).to(rewards.dtype)


def grpo(rewards: Values, groups: Values, ddof: int = 1, eps: float = 1e-6) -> Tensor:
    """Return ``(R - mean_group(R)) / (std_group(R) + eps)``.

    rewards: [N]; groups: integer [N]; ddof: 1 for the unbiased standard deviation (as verl), 0 for the population's;
    result: [N]. Raises NumericsError if a reward is not finite. Source: DeepSeekMath (arXiv 2402.03300).
    """
    if ddof not in (0, 1) or not eps >= 0:
        raise ValueError(f"grpo needs ddof 0 or 1 and eps >= 0, got ddof={ddof}, eps={eps}")
    rewards, inverse = _prepare(rewards, groups)
    centered = _centered(rewards.double(), inverse)
    counts = torch.bincount(inverse)
    squares = centered.new_zeros(counts.numel()).index_add(0, inverse, centered.square())
    deviation = (squares / (counts - ddof).clamp(min=1)).sqrt()[inverse]
    scaled = torch.where(centered == 0, 0.0, centered / (deviation + eps))
    return scaled.to(rewards.dtype)


ADVANTAGES: Mapping[AdvantageName, Callable[..., Tensor]] = MappingProxyType({"group_mean": group_mean, "grpo": grpo})
"""Advantage by name; each is called with (rewards, groups) and gives one number per response."""


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
    groups = groups if isinstance(groups, Tensor) else torch.as_tensor(np.asarray(groups))
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


def _centered(rewards: Tensor, inverse: Tensor) -> Tensor:
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
