"""GVM: more samples where the gradient of rejection sampling has more variance (Yao et al., arXiv 2505.02391).

A first stage estimates the acceptance rate p and the gradient norm G of each prompt from a few samples (8, or 32) that
do not train. ``gvm_allocate`` then gives the counts of the second stage; the paper renews them every 10 steps. GVM-RAFT
trains on accepted samples, GVM-GRPO on all, with advantages within groups of unequal size.
"""

import numpy as np

from megarl.core.sampling.allocation import Numbers, bounded_shares, check_rates, check_weights
from megarl.errors import refusal


def gvm_allocate(
    pass_rates: Numbers, grad_norms: Numbers, total: int, alpha: float = 1e-3, beta: float = 2.0, *,
    high: int | None = None,
) -> np.ndarray:  # fmt: skip
    """Return ``n = total * w / sum(w)`` in whole numbers, with ``w = G / sqrt(p + alpha / p^(beta - 1))``.

    This minimises ``sum G^2 / (p n) / (1 + alpha / p^beta)``. The weight grows as p falls, down to ``p = (alpha (beta -
    1))^(1 / beta)``, 0.032 by default, and falls to 0 below: a prompt without accepted samples gives no gradient, and
    gets none. If no prompt has a weight, for instance because nothing was accepted, all prompts get the same number.

    high: most samples of a prompt. Counts are ``n = min(high, s w)`` with s solved for: the minimum under the bound.
    Prompts of weight 0 get samples only if all others have ``high``, in equal shares.

    Counts are rounded half to even. If the sum is too small or too large, prompts with the largest or smallest
    residuals are corrected by 1. (The released code corrects every prompt at most once: not enough for unnormalised
    shares, and counts can become negative.) pass_rates, grad_norms: [B]; result: int64 [B], adding up to ``total``.
    Raises ValueError for other input.
    """
    rates, norms = check_rates(pass_rates), check_weights(grad_norms, "norm")
    if rates.shape != norms.shape or not alpha >= 0 or not beta >= 2:
        facts = {"rates": list(rates.shape), "norms": list(norms.shape), "alpha": alpha, "beta": beta}
        raise ValueError(refusal("arguments_of_gvm", **facts))
    if total < 0 or (total and not rates.size):
        raise ValueError(f"{total} samples for {rates.size} prompts: expected 0 or more, and prompts to draw them for")
    safe = np.where(rates > 0, rates, 1.0)
    weights = np.where(rates > 0, norms / np.sqrt(safe + alpha / safe ** (beta - 1)), 0.0)
    if not weights.any():
        weights = np.ones_like(weights)
    shares = weights / max(weights.sum(), np.finfo(np.float64).tiny) * total
    top = total if high is None else high
    if shares.max(initial=0.0) > top:
        shares = bounded_shares(weights, total, 0, top)
    return _round_to_total(shares, total, shares > 0, top)


def gvm_estimates(
    prompts: np.ndarray, accepted: np.ndarray, grad_norms: np.ndarray, num_prompts: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (acceptance rates, gradient norms), float64 [B] each, from the samples of the first stage.

    A prompt's norm is the mean over its accepted samples of ``||grad log pi(y)||_2``, of the whole response and not per
    token, on one block of parameters (the released code takes the embedding); 0 if none was accepted. (The theory has
    the root mean square instead.) prompts: integer [N], 0..B-1, each of them at least once; accepted: bool [N];
    grad_norms: [N], read where accepted.
    """
    num_accepted = np.bincount(prompts[accepted], minlength=num_prompts)
    sums = np.bincount(prompts[accepted], weights=grad_norms[accepted], minlength=num_prompts)
    return num_accepted / np.bincount(prompts, minlength=num_prompts), sums / np.maximum(num_accepted, 1)


def _round_to_total(shares: np.ndarray, total: int, has_share: np.ndarray, top: int) -> np.ndarray:
    """Whole numbers near the shares that add up to ``total``, from 0 to ``top``; 0 stays 0."""
    counts = np.round(shares).astype(np.int64)
    while (error := total - int(counts.sum())) != 0:
        step = 1 if error > 0 else -1
        order = np.argsort(-step * np.round(shares - counts, 9), kind="stable")
        usable = order[has_share[order] & (counts[order] + step >= 0) & (counts[order] + step <= top)]
        counts[usable[: abs(error)]] += step
    return counts
