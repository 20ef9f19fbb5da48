"""The masks of a coefficient: which tokens train, and which count in denominators. Nothing here carries a gradient."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.core.choices.parts import RATIOS, Mask, Objective
from megarl.core.measures import prefix_variance_rate
from megarl.core.metrics import Stat
from megarl.core.objectives.columns import TokenState, call_part, copy_columns
from megarl.core.objectives.policy_ratios import PolicyRatios
from megarl.core.ratios import LOG_RATIO_BOUND, aggregate

FLOOR = 1e-8
"""Least probability of all other tokens, so that a KL against a certain token stays finite."""


@dataclass(frozen=True, slots=True, eq=False)
class Trusted:
    """What the masks decide."""

    inside: Tensor
    """bool [T], tokens that pass all masks."""
    counted: Tensor
    """bool [T], tokens that count in the number of tokens and in lengths."""
    in_responses: Tensor
    """bool [T], tokens that make their response count in the number of responses."""


def find_trusted(
    objective: Objective, state: TokenState, ratios: PolicyRatios, detailed: bool = True
) -> tuple[Trusted, dict[str, Stat]]:
    """Return which tokens pass the masks, and the share that each kind of mask has dropped; without ``detailed``
    none."""
    keep, inside, metrics = state.keep, state.keep, {}
    counted = in_responses = state.usable
    dropped: dict[str, Tensor] = {}
    for mask in objective.masks:
        if isinstance(mask, Mask):
            bad = find_dropped(mask, state, ratios)
            names, left = [mask.sign], mask.denominator
            if mask.sign == "outward":
                names = ["high", "low"]
            if detailed and "clip/ratio" not in metrics:
                metrics |= _scope_metrics(mask, state, ratios)
        else:
            given = copy_columns(state, keep)
            bad = keep & ~call_part("mask", mask, given, like=keep, where=keep)
            names, left = ["own"], "keep"
        inside = inside & ~bad
        counted = counted if left == "keep" else counted & ~bad
        in_responses = in_responses & ~bad if left == "leave" else in_responses
        for name in names:
            # The sign of A tells on which side of its window an outward mask has dropped.
            part = bad & (state.advantages > 0) if name == "high" else bad
            part = bad & (state.advantages < 0) if name == "low" else part
            dropped[name] = dropped[name] | part if name in dropped else part
    if detailed and dropped:
        metrics |= Stat.means({f"clip/{name}": bad for name, bad in dropped.items()}, ratios.count)
    return Trusted(inside, counted, in_responses), metrics


def find_dropped(mask: Mask, state: TokenState, ratios: PolicyRatios) -> Tensor:
    """Return the tokens that a mask drops, bool [T]; those that do not train anyway are not among them."""
    values = measure(mask, state, ratios)
    above, below = _violations(mask, values, ratios)
    bad = above if below is None else below if above is None else above | below
    assert bad is not None, "a mask has a bound"
    positive, negative = state.advantages > 0, state.advantages < 0
    if mask.sign == "negative":
        bad = bad & negative
    elif mask.sign == "outward" and mask.statistic in (*RATIOS, "difference"):
        sides = [side & sign for side, sign in ((above, positive), (below, negative)) if side is not None]
        bad = sides[0] if len(sides) == 1 else sides[0] | sides[1]
    elif mask.sign == "outward":
        scope = "sequence_sum" if mask.scope == "sequence_max" else mask.scope
        log_ratio = ratios.log(mask.policies, scope)
        bad = bad & ((positive & (log_ratio > 0)) | (negative & (log_ratio < 0)))
    return bad & state.keep


def measure(mask: Mask, state: TokenState, ratios: PolicyRatios) -> Tensor:
    """Return a mask's statistic over its scope for every token [T]; see ``Mask.statistic``."""
    if mask.statistic in RATIOS:
        # exp may overflow to inf, which compares as it should.
        return (ratios.ratio if mask.statistic == "ratio" else ratios.log)(mask.policies, mask.scope)
    single = torch.where(state.keep, _of_token(mask, state, ratios), 0.0)
    return aggregate(mask.scope, single, state.keep, state.cu_seqlens)


def _of_token(mask: Mask, state: TokenState, ratios: PolicyRatios) -> Tensor:
    first, second = state.pair(mask.policies)
    log_ratio = ratios.log(mask.policies)
    match mask.statistic:
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            return torch.expm1(log_ratio) - log_ratio
        case "difference":
            return first.exp() - second.exp()
        case "tv":
            return (first.exp() - second.exp()).abs()
        case "kl":
            return binary_kl(second, first, -log_ratio)
        case "kl_rev":
            return binary_kl(first, second, log_ratio)
        case "kl_sym":
            return torch.maximum(binary_kl(second, first, -log_ratio), binary_kl(first, second, log_ratio))
        case kind:
            return top_k_divergence(kind == "topk_kl", state)


def binary_kl(p: Tensor, q: Tensor, log_ratio: Tensor) -> Tensor:
    """Return ``KL(p || q) = p ln(p/q) + (1-p) ln((1-p)/(1-q))``: a token against all others.

    p, q: log-probabilities [T]; log_ratio: [T], ln(p/q), clamped. 1 - p is at least ``FLOOR``. Source: DPPO
    (arXiv 2602.04879), eq. 13.
    """
    others, others_of_q = ((-torch.expm1(column)).clamp(min=FLOOR) for column in (p, q))
    return p.exp() * log_ratio + others * (others / others_of_q).log()


def top_k_divergence(is_kl: bool, state: TokenState) -> Tensor:
    """Return TV, or KL(mu || theta), over the classes {the sampler's top K tokens, the sampled token, all others}.

    Source: DPPO (arXiv 2602.04879), eq. 15 and 16.
    """
    topk = state.topk
    assert topk is not None, "checked before"
    mu, theta = topk.rollout_logprobs.exp(), topk.logprobs.exp()
    own = torch.where(topk.has_token, 0.0, torch.stack([state.rollout_logprobs.exp(), state.logprobs.exp()]))
    mu, theta = (torch.cat([top, extra[:, None]], 1) for top, extra in zip((mu, theta), own, strict=True))
    rest_mu, rest_theta = ((1 - part.sum(1)).clamp(min=FLOOR) for part in (mu, theta))
    if not is_kl:
        return ((mu - theta).abs().sum(1) + (rest_mu - rest_theta).abs()) / 2
    logs = torch.where(mu > 0, (mu / theta.clamp(min=FLOOR)).log(), 0.0)
    return (mu * logs).sum(1) + rest_mu * (rest_mu / rest_theta).log()


def _violations(mask: Mask, values: Tensor, ratios: PolicyRatios) -> tuple[Tensor | None, Tensor | None]:
    """Return where the values are above and below the bounds; None where there is no bound."""
    low, high = mask.low, mask.high
    if mask.growth:
        widths = ratios.positions.to(values.dtype).pow(mask.growth)
        low, high = (None if bound is None else bound * widths for bound in (low, high))
    above = None if high is None else values >= high if mask.strict else values > high
    below = None if low is None else values <= low if mask.strict else values < low
    return above, below


def _scope_metrics(mask: Mask, state: TokenState, ratios: PolicyRatios) -> dict[str, Stat]:
    """The ratio of several tokens that a mask looks at."""
    if mask.statistic not in RATIOS or mask.scope == "token" or mask.policies != "theta_old":
        return {}
    log_ratio = ratios.log(mask.policies, mask.scope)
    metrics = {"clip/ratio": Stat.ratio(log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND), state.keep)}
    if mask.scope == "prefix":
        metrics["clip/prefix_variance_rate"] = prefix_variance_rate(log_ratio, ratios.positions, state.keep)
    return metrics
