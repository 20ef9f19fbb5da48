"""What tells a healthy run from one that is about to collapse: entropy, mismatch, staleness, dead groups.

Every number is a ``Stat``, so that it merges exactly over micro-batches and ranks. Here rho = pi_old / mu is the
mismatch between the training engine and the engine that sampled.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.core.advantages import Values, uniform_groups
from megarl.core.metrics import Stat
from megarl.core.ratios import LOG_RATIO_BOUND, log_ratio, segment_sum, usable_mask, widen


def entropy(logits: Tensor) -> Tensor:
    """Return ``-sum_v p_v log p_v`` with p = softmax(logits): natural logarithm, full vocabulary.

    logits: [..., V], where -inf is a token of probability 0; result: [...] in fp32 (fp64 stays). Keeps gradients.
    """
    logprobs = widen(logits).log_softmax(dim=-1)
    # 0 * -inf is NaN, while p log p tends to 0.
    return -(logprobs.exp() * torch.where(torch.isneginf(logprobs), 0.0, logprobs)).sum(dim=-1)


def entropy_stat(token_entropy: Tensor, loss_mask: Tensor) -> Stat:
    """Return the mean of the entropies [T] over loss_mask, bool [T]."""
    return Stat.mean(token_entropy, loss_mask)


def mismatch_metrics(
    old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, cu_seqlens: Tensor
) -> dict[str, Stat]:
    """Compare the training engine with the rollout engine on the sampled tokens, rho = pi_old / mu.

    old_logprobs, rollout_logprobs: [T]; loss_mask: bool [T]; cu_seqlens: int64 [N+1]. Tokens at -inf in either
    column are left out. Returns, by name:

    - ``rollout/k1``: mean(log mu - log pi_old), unbiased for KL[mu || pi_old], may be negative
    - ``rollout/k3``: mean(rho - 1 - log rho), never negative
    - ``rollout/ratio``: summary and quantiles of rho
    - ``rollout/ppl_ratio``: exp(-mean log rho)
    - ``rollout/chi2_token``, ``rollout/chi2_sequence``: mean rho^2 - 1, of tokens, and of non-empty sequences
      (product of rho)
    - ``rollout/extreme_2``: mean 1[max(rho, 1/rho) > 2], F(2) of R3 (arXiv 2510.11370)
    - ``rollout/ess``: effective sample size of rho
    """
    keep = usable_mask(loss_mask, rollout_logprobs) & ~torch.isneginf(old_logprobs)
    log_rho = log_ratio(old_logprobs, rollout_logprobs, keep).detach().double()
    rho = log_rho.exp()
    sequence_log_rho = segment_sum(log_rho, cu_seqlens).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return {
        "rollout/k1": Stat.mean(-log_rho, keep),
        "rollout/k3": Stat.mean(torch.expm1(log_rho) - log_rho, keep),
        "rollout/ratio": Stat.ratio(log_rho, keep),
        "rollout/ppl_ratio": Stat.exp_mean(-log_rho, keep),
        "rollout/chi2_token": Stat.mean(rho.square() - 1, keep),
        "rollout/chi2_sequence": Stat.mean((2 * sequence_log_rho).exp() - 1, segment_sum(keep, cu_seqlens) > 0),
        "rollout/extreme_2": Stat.mean(log_rho.abs() > math.log(2), keep),
        "rollout/ess": Stat.ess(rho, keep),
    }


def effective_prompt_ratio(rewards: Values, groups: Values) -> Stat:
    """Return the share of groups with non-uniform rewards, the only ones that train.

    rewards: [N]; groups: integer [N]. Its expectation is E[1 - p^n - (1-p)^n] for pass rates p and n responses.
    Merges exactly if no group is split between the parts.
    """
    return Stat.mean(~uniform_groups(rewards, groups))


def prefix_variance_rate(log_prefix: Tensor, positions: Tensor, mask: Tensor) -> Stat:
    """Return the mean of ``(log rho_t)^2 / t``: sigma^2 of the law sd(log rho_t) = sigma sqrt(t) of prefix ratios.

    log_prefix: [T]; positions: int [T], t from 1; mask: bool [T]. A window of CTPO with eps_high = c sigma and
    window_power = 1/2 then lies c standard deviations out at every position.
    """
    return Stat.mean(log_prefix.double().square() / positions.clamp(min=1), mask)
