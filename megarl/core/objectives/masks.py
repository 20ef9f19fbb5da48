"""The masks of a coefficient: the tokens that train, and the tokens counted in denominators. No gradient."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.core.choices.parts import RATIOS, Mask, Objective, Scope
from megarl.core.metrics import Stat
from megarl.core.objectives.columns import PolicyRatios, TokenState, call_part, copy_columns
from megarl.core.objectives.weights import Total
from megarl.core.ratios import aggregate

FLOOR = 1e-8
"""Least probability of all other tokens, so that the KL against a certain token is finite."""
_OUTWARD_BY: dict[Scope, Scope] = {"sequence_max": "sequence_sum", "prefix_budget": "token", "batch_mean": "token"}
"""Scope of a divergence -> scope of the log-ratio that tells which updates lead further from 1; else the same scope."""
_DIGIT = 16
"""Bits of a float64 on which ``batch_bound`` decides with one sum over ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class Trusted:
    """The decision of all masks, bool [T] each."""

    inside: Tensor
    """Tokens that pass all masks."""
    counted: Tensor
    """Tokens that count in the number of tokens and in lengths."""
    in_responses: Tensor
    """Tokens that make their response count in the number of responses."""


def find_trusted(
    objective: Objective, state: TokenState, ratios: PolicyRatios, bounds: Sequence[float | None]
) -> tuple[Trusted, dict[str, Stat]]:
    """Return the decision of the masks, and the share of tokens dropped by each kind of mask.

    bounds: by mask, of ``batch_bound``, None for other scopes. ConfigError or NumericsError for a mask of the user as
    in ``check_returned``.
    """
    keep, inside, metrics = state.keep, state.keep, {}
    counted = in_responses = state.usable
    dropped: dict[str, Tensor] = {}
    for mask, bound in zip(objective.masks, bounds, strict=True):
        if isinstance(mask, Mask):
            bad, in_denominator = find_dropped(mask, state, ratios, bound), mask.denominator
            kinds = {mask.sign: bad}
            if mask.sign == "outward":  # the sign of A tells the side of the window
                kinds = {"high": bad & (state.advantages > 0), "low": bad & (state.advantages < 0)}
        else:
            bad = keep & ~call_part("mask", mask, copy_columns(state, keep), expected=keep, trains=keep)
            kinds, in_denominator = {"own": bad}, "keep"
        inside = inside & ~bad
        counted = counted if in_denominator == "keep" else counted & ~bad
        in_responses = in_responses & ~bad if in_denominator == "leave" else in_responses
        for kind, tokens in kinds.items():
            dropped[kind] = dropped[kind] | tokens if kind in dropped else tokens
    if dropped:
        metrics |= Stat.means({f"clip/{kind}": tokens for kind, tokens in dropped.items()}, ratios.count)
    return Trusted(inside, counted, in_responses), metrics


def find_dropped(mask: Mask, state: TokenState, ratios: PolicyRatios, bound: float | None = None) -> Tensor:
    """Return the tokens dropped by a mask, bool [T], without tokens that do not train anyway.

    bound: of ``batch_bound``, for the scope "batch_mean".
    """
    values = measure(mask, state, ratios)
    if bound is not None:
        return (values >= bound) & _may_drop(mask, state, ratios)
    above, below = _violations(mask, values, ratios)
    if mask.sign == "outward" and mask.statistic in (*RATIOS, "difference"):
        return ((above & (state.advantages > 0)) | (below & (state.advantages < 0))) & state.keep
    return (above | below) & _may_drop(mask, state, ratios)


def _may_drop(mask: Mask, state: TokenState, ratios: PolicyRatios) -> Tensor:
    """Return the tokens that the sign of a mask of divergences names, bool [T]."""
    positive, negative = state.advantages > 0, state.advantages < 0
    if mask.sign == "outward":
        log_ratio = ratios.log(mask.policies, _OUTWARD_BY.get(mask.scope, mask.scope))
        return state.keep & ((positive & (log_ratio > 0)) | (negative & (log_ratio < 0)))
    return state.keep & negative if mask.sign == "negative" else state.keep


def measure(mask: Mask, state: TokenState, ratios: PolicyRatios) -> Tensor:
    """Return the statistic of a mask over the scope of the mask, [T]; see ``Mask.statistic`` and ``Mask.scope``."""
    if mask.statistic in RATIOS:  # exp may overflow to inf, and inf compares correctly
        return (ratios.ratio if mask.statistic == "ratio" else ratios.log)(mask.policies, mask.scope)
    single = torch.where(state.keep, _of_token(mask, state, ratios), 0.0)
    if mask.scope == "prefix_budget":
        return _over_budget(mask, single, state, ratios)
    return single if mask.scope == "batch_mean" else aggregate(mask.scope, single, state.keep, state.cu_seqlens)


def _over_budget(mask: Mask, single: Tensor, state: TokenState, ratios: PolicyRatios) -> Tensor:
    """Return the larger of a token's weighted value and what its prefix holds beyond the budget, [T].

    Source: CPPO (arXiv 2606.10968), eq. 8 to 10: both are compared with delta.
    """
    ones = state.keep.to(single.dtype)
    last = aggregate("sequence_sum", ones, state.keep, state.cu_seqlens) - 1
    weights = ones * (1 - (1 - mask.last_weight) * (ratios.positions - 1) / last.clamp(min=1))
    weighted, allowed = weights * single, weights * mask.budget
    held = aggregate("prefix", weighted - allowed, state.keep, state.cu_seqlens) + allowed
    return torch.maximum(weighted, held)


def batch_bound(mask: Mask, batches: Sequence[tuple[TokenState, PolicyRatios]], total: Total) -> float:
    """Return the least value that a mask of scope "batch_mean" drops in a mini-batch, inf if none.

    batches: all of this rank; total: adds sums over ranks, float64 [S] -> [S]. In ascending order, values stay until
    their mean is above ``high``. The bits of a float64 from 0 up order like the number: each of four rounds sums the
    excess over ``high`` by the next digit, so that the value is exact. The host waits for the device in each.
    Source: M2PO (arXiv 2510.01161), algorithm 1.
    """
    values = torch.cat([measure(mask, *batch)[_may_drop(mask, *batch)] for batch in batches]).double()
    assert mask.high is not None, "checked when the mask was made"
    keys, excess, prefix, below = (values.clamp(min=0) + 0.0).view(torch.int64), values - mask.high, 0, 0.0  # no -0.0
    for shift in range(64 - _DIGIT, -1, -_DIGIT):
        inside = (keys >> shift >> _DIGIT) == prefix
        digits = (keys[inside] >> shift) - (prefix << _DIGIT)
        sums = below + total(excess.new_zeros(2**_DIGIT).index_add(0, digits, excess[inside])).cumsum(0)
        first = int((sums <= 0).sum())  # they fall below 0 and rise again
        if first == 2**_DIGIT and not prefix:
            return math.inf
        below = float(sums[first - 1]) if first else below
        prefix = (prefix << _DIGIT) + first
    return float(torch.tensor(prefix).view(torch.float64))


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
    """Return ``KL(p || q) = p ln(p/q) + (1-p) ln((1-p)/(1-q))`` [T]: the token against the rest of the vocabulary.

    p, q: log-probabilities [T]; log_ratio: [T], ln(p/q), clamped. 1 - p is at least ``FLOOR``. Source: DPPO
    (arXiv 2602.04879), eq. 13.
    """
    p_rest, q_rest = ((-torch.expm1(column)).clamp(min=FLOOR) for column in (p, q))
    return p.exp() * log_ratio + p_rest * (p_rest / q_rest).log()


def top_k_divergence(is_kl: bool, state: TokenState) -> Tensor:
    """Return TV, or KL(mu || theta), [T] over the classes {the sampler's top K tokens, the sampled token, the rest}.

    Source: DPPO (arXiv 2602.04879), eq. 15 and 16.
    """
    topk = state.topk
    assert topk is not None, "checked before"
    mu, theta = topk.rollout_logprobs.exp(), topk.logprobs.exp()
    sampled = torch.where(topk.has_token, 0.0, torch.stack([state.rollout_logprobs.exp(), state.logprobs.exp()]))
    mu, theta = (torch.cat([top, extra[:, None]], 1) for top, extra in zip((mu, theta), sampled, strict=True))
    mu_rest, theta_rest = ((1 - classes.sum(1)).clamp(min=FLOOR) for classes in (mu, theta))
    if not is_kl:
        return ((mu - theta).abs().sum(1) + (mu_rest - theta_rest).abs()) / 2
    logs = torch.where(mu > 0, (mu / theta.clamp(min=FLOOR)).log(), 0.0)
    return (mu * logs).sum(1) + mu_rest * (mu_rest / theta_rest).log()


def _violations(mask: Mask, values: Tensor, ratios: PolicyRatios) -> tuple[Tensor, Tensor]:
    """Return where the values [T] are above the upper and below the lower bound."""
    low, high = (math.nan if bound is None else bound for bound in (mask.low, mask.high))  # nothing is beyond NaN
    widths = ratios.positions.to(values.dtype).pow(mask.growth) if mask.growth else 1
    if mask.strict:
        return values >= high * widths, values <= low * widths
    return values > high * widths, values < low * widths
