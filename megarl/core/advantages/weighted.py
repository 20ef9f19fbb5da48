"""Advantages with statistics over tokens: a response weighs with its length (OPO, REINFORCE++, GDPO). Also the mean of
a batch, in which all responses with loss tokens weigh alike.

``lengths`` are integers [N], the loss tokens of each response. A response without loss tokens is in no statistics and
gets 0.
"""

import torch
from torch import Tensor

from megarl.core.advantages.groups import Values, as_tensor, center, fill, group_mean, grpo, prepare
from megarl.errors import refusal

WHITENING_EPS = 1e-8
"""Added to the variance."""


def opo(rewards: Values, groups: Values, lengths: Values) -> Tensor:
    """Return ``R - b`` with ``b = sum |y| R / sum |y|`` over the group: the mean reward of its tokens.

    rewards: [N]; groups: integer [N]; lengths: [N]; result: [N], 0 in a group without contrast. The baseline has the
    least variance if the squared gradient norm of a response grows as its length. NumericsError if a reward is not
    finite, ValueError for negative or missing lengths. Source: OPO (arXiv 2505.23585).
    """
    rewards, inverse = prepare(rewards, groups)
    tokens = _token_counts(lengths, rewards)
    live = tokens > 0
    return fill(center(rewards[live].double(), inverse[live], tokens[live]), live).to(rewards.dtype)


def batch_mean(rewards: Values, groups: Values, lengths: Values) -> Tensor:
    """Return ``R - mean(R)`` over all responses of the batch, whatever their prompts.

    rewards: [N]; groups: integer [N], not used; lengths: [N]; result: [N], 0 if all rewards are equal. Take the whole
    batch of a step, of all ranks. NumericsError if a reward is not finite, ValueError for negative or missing lengths.
    Source: FlashREINFORCE, as its authors released it.
    """
    rewards, inverse = prepare(rewards, groups)
    live = _token_counts(lengths, rewards) > 0
    return fill(center(rewards[live].double(), torch.zeros_like(inverse[live])), live).to(rewards.dtype)


def whiten(values: Tensor, lengths: Values) -> Tensor:
    """Return ``(x - mean) / sqrt(var + 1e-8)``: mean and variance (ddof 1) over the tokens of the batch, with the value
    x of the response at all its tokens.

    values: [N]; lengths: [N]; result: [N], 0 where all values are equal. Take the whole batch of a step, of all ranks.
    ValueError for negative or missing lengths.
    """
    tokens = _token_counts(lengths, values)
    live = tokens > 0
    tokens = tokens[live]
    centered = center(values[live].double(), torch.zeros_like(tokens, dtype=torch.int64), tokens)
    variance = (tokens * centered.square()).sum() / (tokens.sum() - 1).clamp(min=1)
    return fill(centered / (variance + WHITENING_EPS).sqrt(), live).to(values.dtype)


def reinforce_pp(rewards: Values, groups: Values, lengths: Values) -> Tensor:
    """Return ``R``, whitened over the tokens of the batch (``whiten``): one baseline for all prompts.

    rewards: [N]; groups: integer [N], not used; lengths: [N]; result: [N]. Raises NumericsError if a reward is not
    finite. Source: REINFORCE++ (arXiv 2501.03262), with gamma 1 and without a KL in the reward.
    """
    return whiten(prepare(rewards, groups)[0], lengths)


def reinforce_pp_baseline(rewards: Values, groups: Values, lengths: Values) -> Tensor:
    """Return ``R - mean_group(R)``, whitened over the tokens of the batch; arguments as in ``reinforce_pp``.

    Source: REINFORCE++-baseline (arXiv 2501.03262). A group without contrast gets minus the mean of the batch, which is
    not exactly 0 if lengths and rewards correlate. Result: [N].
    """
    return whiten(group_mean(rewards, groups), lengths)


def gdpo(
    components: Values, weights: Values, groups: Values, lengths: Values, ddof: int = 1, eps: float = 1e-6
) -> Tensor:
    """Return ``grpo_sum``, whitened over the tokens of the batch (``whiten``): arguments of ``grpo_sum``, lengths [N]
    -> [N]. Errors as in ``grpo_sum``.

    Source: GDPO (arXiv 2601.05242).
    """
    return whiten(grpo_sum(components, weights, groups, ddof, eps), lengths)


def grpo_sum(components: Values, weights: Values, groups: Values, ddof: int = 1, eps: float = 1e-6) -> Tensor:
    """Return ``sum_k w_k grpo(reward_k)``: rewards of different scale have equal influence.

    components: [N, M], M rewards of each response; weights: [M]; groups: integer [N]; ddof, eps: of ``grpo``; result:
    float64 [N]. Raises ValueError for other shapes, NumericsError if a reward is not finite.
    """
    rewards = as_tensor(components).double()
    factors = as_tensor(weights).double().to(rewards.device)
    if rewards.dim() != 2 or factors.shape != rewards.shape[1:] or not factors.numel():
        raise ValueError(refusal("component_shapes", components=list(rewards.shape), weights=list(factors.shape)))
    return torch.stack([grpo(column, groups, ddof, eps) for column in rewards.unbind(1)], 1) @ factors


def _token_counts(lengths: Values, values: Tensor) -> Tensor:
    """Return lengths as float64 [N]; ValueError unless all values have a length of 0 or more."""
    counts = as_tensor(lengths).to(values.device).double()
    if counts.shape != values.shape or not bool((counts >= 0).all()):
        raise ValueError(f"lengths {counts.tolist()}, expected {len(values)} numbers of loss tokens, 0 or more")
    return counts
