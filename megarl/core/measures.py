"""Entropy, mismatch, staleness, dead groups, and the variance of the gradient.

Here rho = pi_old / mu is the mismatch between the training engine and the engine that sampled.
"""

import math

import torch
from torch import Tensor

from megarl.core.advantages.groups import Values, uniform_groups
from megarl.core.metrics import Stat
from megarl.core.ratios import LOG_RATIO_BOUND, log_ratio, segment_sum, usable_mask, widen


def entropy(logits: Tensor) -> Tensor:
    """Return ``-sum_v p_v log p_v`` with p = softmax(logits): natural logarithm, full vocabulary.

    logits: [..., V], where -inf is a token of probability 0; result: [...] in fp32 (fp64 stays). Keeps gradients.
    """
    logprobs = widen(logits).log_softmax(dim=-1)
    # 0 * -inf is NaN, while p log p tends to 0.
    return -(logprobs.exp() * torch.where(torch.isneginf(logprobs), 0.0, logprobs)).sum(dim=-1)


def mismatch_metrics(
    old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, cu_seqlens: Tensor
) -> dict[str, Stat]:
    """Compare the training engine with the rollout engine on the sampled tokens, rho = pi_old / mu.

    old_logprobs, rollout_logprobs: [T]; loss_mask: bool [T]; cu_seqlens: int64 [N+1]. Tokens at -inf in either
    column are left out. Returns, by name:

    - ``rollout/k1``: mean(log mu - log pi_old), unbiased for KL[mu || pi_old], may be negative
    - ``rollout/k3``: mean(rho - 1 - log rho), never negative
    - ``rollout/ratio``: summary and quantiles of rho
    - ``rollout/chi2_sequence``: mean rho^2 - 1 of non-empty sequences, rho their product
    - ``rollout/extreme_2``: mean 1[max(rho, 1/rho) > 2], F(2) of R3 (arXiv 2510.11370)
    - ``rollout/ess``: effective sample size of rho
    """
    keep = usable_mask(loss_mask, rollout_logprobs) & ~torch.isneginf(old_logprobs)
    log_rho = log_ratio(old_logprobs, rollout_logprobs, keep).detach().double()
    ratio = Stat.ratio(log_rho, keep)
    columns = {"rollout/k1": -log_rho, "rollout/k3": torch.expm1(log_rho) - log_rho}
    means = Stat.means(columns | {"rollout/extreme_2": log_rho.abs() > math.log(2)}, ratio.sums[0])
    sequence_log_rho, tokens = segment_sum(torch.stack([log_rho, keep.double()]), cu_seqlens)
    chi2 = (2 * sequence_log_rho.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).exp() - 1
    means |= Stat.means({"rollout/chi2_sequence": chi2}, torch.count_nonzero(tokens))
    return means | {"rollout/ratio": ratio, "rollout/ess": Stat.ess_of(ratio)}


def surrogate_metrics(
    logprobs: Tensor, old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, cu_seqlens: Tensor
) -> dict[str, Stat]:
    """Measure how well tokens stand for sequences, and split their weights ``w_t = pi_theta / mu`` into two factors.

    The objective of tokens is the first-order expansion of that of sequences at w_t = 1, with w_t = 1 + d_t
    (Zheng et al., arXiv 2512.01374, section 2). All columns: [T]; loss_mask: bool [T]; cu_seqlens: int64 [N+1]. Tokens
    at -inf in a column are left out, and the logarithm of each factor is clamped to +-20. Returns, by name:

    - ``first_order/error``: summary over responses of ``|prod_t (1 + d_t) - (1 + sum_t d_t)|``
    - ``first_order/product``: summary and quantiles of ``prod_t (1 + d_t)``, whose expectation is 1
    - ``first_order/overflow``: responses with a product beyond fp32, excluded from error and product
    - ``gap/ratio``: summary and quantiles of pi_old / mu, the gap between the engines. The other factor,
      pi_theta / pi_old, is the metric ``ratio`` of ``coefficients``
    - ``gap/extreme_2``, ``ratio/extreme_2``: share of tokens at which a factor is above 2 or below 1/2
    """
    theta, old, mu = (column.detach().double() for column in (logprobs, old_logprobs, rollout_logprobs))
    keep = usable_mask(loss_mask, mu) & ~(torch.isneginf(theta) | torch.isneginf(old))
    factors = log_ratio(torch.stack([theta, old, theta]), torch.stack([old, mu, mu]), keep)
    log_weight = factors[2]
    of_tokens = torch.stack([log_weight, log_weight.expm1(), keep.double()])
    log_product, first_order, tokens = segment_sum(of_tokens, cu_seqlens)
    overflows = log_product > math.log(torch.finfo(torch.float32).max)
    counted = (tokens > 0) & ~overflows
    log_product = torch.where(counted, log_product, 0.0)
    # prod (1 + d) - 1 and each d by expm1: nothing is lost where ratios are near 1.
    error = (torch.expm1(log_product) - first_order).abs()
    gap = Stat.ratio(factors[1], keep)
    staleness_is_extreme, gap_is_extreme, _ = factors.abs() > math.log(2)
    return {
        "first_order/error": Stat.summary(error, counted),
        "first_order/product": Stat.ratio(log_product, counted),
        "first_order/overflow": Stat.total(overflows.sum()),
        "gap/ratio": gap,
        **Stat.means({"gap/extreme_2": gap_is_extreme, "ratio/extreme_2": staleness_is_extreme}, gap.sums[0]),
    }


def effective_prompt_ratio(rewards: Values, groups: Values) -> Stat:
    """Return the share of groups with non-uniform rewards, which alone train.

    rewards: [N]; groups: integer [N]. Its expectation is E[1 - p^n - (1-p)^n] for pass rates p and n responses.
    Merges exactly if no group is split between the parts.
    """
    return Stat.mean(~uniform_groups(rewards, groups))
