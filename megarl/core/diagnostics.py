"""What tells a healthy run from one that is about to collapse: entropy, mismatch, staleness, dead groups.

Every number is a ``Stat``, so that it merges exactly over micro-batches and ranks. Here rho = pi_old / mu is the
mismatch between the training engine and the engine that sampled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, tau: float = 2.0
) -> dict[str, Stat]:
    """Compare the training engine with the rollout engine on the sampled tokens, rho = pi_old / mu.

    old_logprobs, rollout_logprobs: [T]; loss_mask: bool [T]; cu_seqlens: int64 [N+1]; tau: bound of "extreme".
    Tokens at -inf in either column are left out. Returns, by name:

    - ``rollout/k1``: mean(log mu - log pi_old), unbiased for KL[mu || pi_old], may be negative
    - ``rollout/k3``: mean(rho - 1 - log rho), never negative
    - ``rollout/ratio``: summary and quantiles of rho
    - ``rollout/ppl_ratio``: exp(-mean log rho)
    - ``rollout/chi2_token``, ``rollout/chi2_sequence``: mean rho^2 - 1, of tokens, and of non-empty sequences
      (product of rho)
    - ``rollout/extreme_2`` (named after tau): mean 1[max(rho, 1/rho) > tau]; with tau = 2 this is
      F(2) of R3 (arXiv 2510.11370)
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
        "rollout/chi2_token": chi2(rho, keep),
        "rollout/chi2_sequence": chi2(sequence_log_rho.exp(), segment_sum(keep, cu_seqlens) > 0),
        f"rollout/extreme_{tau:g}": extreme_share(log_rho, keep, tau),
        "rollout/ess": Stat.ess(rho, keep),
    }


def chi2(ratio: Tensor, mask: Tensor) -> Stat:
    """Return ``mean(ratio^2) - 1`` over the mask: the chi-squared divergence if the mean ratio is 1."""
    return Stat.mean(ratio.double().square() - 1, mask)


def extreme_share(log_ratios: Tensor, mask: Tensor, tau: float = 2.0) -> Stat:
    """Return the share of masked tokens with ``max(ratio, 1/ratio) > tau``; log_ratios [T], mask bool [T]."""
    if not tau >= 1:
        raise ValueError(f"tau is {tau}, expected at least 1: every token differs by a factor of 1 or more")
    return Stat.mean(log_ratios.abs() > math.log(tau), mask)


def effective_prompt_ratio(rewards: Values, groups: Values) -> Stat:
    """Return the share of groups with non-uniform rewards, the only ones that train.

    rewards: [N]; groups: integer [N]. Its expectation is E[1 - p^n - (1-p)^n] for pass rates p and n responses.
    Merges exactly if no group is split between the parts.
    """
    return Stat.mean(~uniform_groups(rewards, groups))


@dataclass(frozen=True, slots=True)
class RatioSpread:
    """How widely the product of H independent token ratios scatters."""

    variance: float
    """Var of the product, in units of its mean 1."""
    ess_fraction: float
    """Effective sample size per sample."""


def variance_law(sigma: float, length: int) -> RatioSpread:
    """Return ``Var prod rho = exp(H sigma^2) - 1`` and ``ESS / N = exp(-H sigma^2)``: sequence weights explode.

    For log rho ~ N(-sigma^2 / 2, sigma^2) per token, so that E[rho] = 1. sigma: standard deviation of a token's
    log-ratio; length: H tokens. The variance is inf where float64 ends (H sigma^2 above 709).
    """
    exponent = length * sigma**2
    try:
        return RatioSpread(math.expm1(exponent), math.exp(-exponent))
    except OverflowError:
        return RatioSpread(math.inf, math.exp(-exponent))


def simulate_variance(sigma: float, length: int, samples: int, generator: torch.Generator) -> RatioSpread:
    """Return the same from random draws: samples products of length token ratios each.

    The estimate of the variance is useless once exp(H sigma^2) nears the number of samples: the few draws that make
    up the mean are then not among them, which is just what happens to a policy gradient.
    """
    log_products = torch.zeros(samples, dtype=torch.float64)
    for _ in range(length):
        log_products += sigma * torch.randn(samples, dtype=torch.float64, generator=generator) - sigma**2 / 2
    products = log_products.exp()
    # The mean is known to be 1; an estimated one would hide what is missing.
    variance = float((products - 1).square().mean())
    return RatioSpread(variance, float(products.sum().square() / products.square().sum()) / samples)


def prefix_variance_rate(log_prefix: Tensor, positions: Tensor, mask: Tensor) -> Stat:
    """Return the mean of ``(log rho_t)^2 / t``: sigma^2 of the law sd(log rho_t) = sigma sqrt(t) of prefix ratios.

    log_prefix: [T]; positions: int [T], t from 1; mask: bool [T]. A window of CTPO with eps_high = c sigma and
    window_power = 1/2 then lies c standard deviations out at every position.
    """
    return Stat.mean(log_prefix.double().square() / positions.clamp(min=1), mask)
