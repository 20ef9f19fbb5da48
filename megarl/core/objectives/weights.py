"""The importance weight of a coefficient, the gate, and the derivative of a KL penalty, all without gradient."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megarl.core.choices.parts import Factor, Gate, Objective, Penalty
from megarl.core.metrics import Stat
from megarl.core.objectives.columns import PolicyRatios, TokenState, call_part
from megarl.core.ratios import LOG_RATIO_BOUND, aggregate, log_ratio

Total = Callable[[Tensor], Tensor]
"""Adds a vector of sums over ranks."""


def importance_weight(
    objective: Objective,
    state: TokenState,
    ratios: PolicyRatios,
    exponents: tuple[float | None, ...],
    means: tuple[float | None, ...],
) -> tuple[Tensor, dict[str, Stat]]:
    """Return the product of the factors [T], finite; and metrics.

    exponents, means: by factor, q of "adaptive_power" and the divisor of ``batch_normalize``. ConfigError or
    NumericsError for a function of the user as in ``check_returned``.
    """
    weight = torch.ones_like(state.logprobs)
    truncated = torch.zeros_like(state.keep)
    metrics: dict[str, Stat] = {}
    for factor, exponent, mean in zip(objective.factors, exponents, means, strict=True):
        raw = factor_values(factor, state, ratios, exponent)
        clamped = _clamp(raw, factor)
        if clamped is not raw:
            truncated = truncated | (state.keep & _where_applied(factor, clamped != raw, state, False))
        if exponent is not None:
            metrics["tis/power"] = Stat.mean(torch.full_like(raw, exponent), state.keep)
        if len(objective.factors) > 1:
            metrics[f"tis/{factor.policies}"] = Stat.summary(clamped, state.keep)
        if mean is not None:
            clamped = clamped / mean
        weight = weight * _where_applied(factor, clamped, state, 1.0)
    metrics |= Stat.means({"tis/truncated": truncated}, ratios.count)
    metrics["tis/weight"] = Stat.summary(weight, state.keep)
    metrics["tis/ess"] = Stat.ess_of(metrics["tis/weight"])
    return weight, metrics


def factor_values(factor: Factor, state: TokenState, ratios: PolicyRatios, exponent: float | None = None) -> Tensor:
    """Return f(rho) [T] before the clamps; exponent: q of "adaptive_power". Errors as in ``check_returned``."""
    if callable(factor.fn):
        rho = factor_log_ratio(factor, state, ratios).exp()
        return call_part("fn", factor.fn, rho, expected=rho, trains=state.keep).to(rho.dtype)
    if factor.fn == "identity":
        if factor.scope == "token" and factor.token_clip is None:
            return ratios.ratio(factor.policies)
        return factor_log_ratio(factor, state, ratios).exp()
    log_rho = factor_log_ratio(factor, state, ratios)
    if factor.fn == "vespo":
        negative = state.advantages < 0
        pairs = zip(factor.vespo_positive, factor.vespo_negative, strict=True)
        k, decay = (_choose(negative, number, other, log_rho) for other, number in pairs)
        return _exp(k * log_rho + decay * (1 - log_rho.exp()))
    if factor.fn == "adaptive_power":
        assert exponent is not None, "gather_facts computes q"
        return (exponent * log_rho).exp()
    return _exp(factor.power * log_rho)


def factor_log_ratio(factor: Factor, state: TokenState, ratios: PolicyRatios) -> Tensor:
    """Return log rho [T] of a factor, bounded so that exp stays finite."""
    if factor.token_clip is not None:
        single, bound = ratios.log(factor.policies), factor.token_clip
        # min(l, bound) where A > 0, max(l, -bound) where A < 0: outward clipping does not touch the inner side.
        outward = torch.where(state.advantages > 0, single.clamp(max=bound), single)
        outward = torch.where(state.advantages < 0, single.clamp(min=-bound), outward)
        log_rho = aggregate(factor.scope, outward, state.keep, state.cu_seqlens)
    else:
        log_rho = ratios.log(factor.policies, factor.scope)
    return log_rho if factor.scope == "token" else log_rho.clamp(-LOG_RATIO_BOUND, factor.log_ratio_cap)


def gate_values(gate: Gate, state: TokenState, ratios: PolicyRatios) -> Tensor:
    """Return S [T] of ``Gate``, the multiplier of the weighted advantage."""
    positive = state.advantages > 0
    parameter = _choose(positive, gate.positive, gate.negative, state.advantages)
    if gate.kind == "drpo":
        moved = state.logprobs.exp() - state.rollout_logprobs.exp()
        return 1 - state.advantages.sign() * moved / parameter
    rho = ratios.ratio("theta_old")
    if gate.kind == "sapo":
        inside = torch.sigmoid(parameter * (rho - 1))
        return 4 * inside * (1 - inside)
    bounds = _choose(positive, 1 + gate.eps, 1 - gate.eps, state.advantages)
    outside = torch.where(positive, rho > bounds, (state.advantages < 0) & (rho < bounds))
    return torch.where(outside, parameter * bounds / rho, 1.0)


def kl_penalty(penalty: Penalty, state: TokenState, ratios: PolicyRatios) -> tuple[Tensor, dict[str, Stat]]:
    """Return the derivative of the estimator of KL[theta || other] by log pi_theta, [T], and its metrics.

    With d = log pi_theta - log pi_other, clamped to +-20: k1 = d, derivative 1; k2 = d^2 / 2, derivative d;
    k3 = exp(-d) + d - 1, derivative 1 - exp(-d); unbiased = u k3 with u = theta/behaviour, derivative u d. The
    derivative of k1 has expectation 0 under theta, so k1 regularises nothing. Sources: Schulman, "Approximating KL
    divergence" (2020); DeepSeek-V3.2 (arXiv 2512.02556), eq. 7.
    """
    target = {"ref": state.ref_logprobs, "mu": state.rollout_logprobs, "old": state.old_logprobs}[penalty.to]
    assert target is not None, "check_columns requires the column"
    d = log_ratio(state.logprobs, target, state.keep)
    if penalty.estimator == "k1":
        values, gradient = d, torch.ones_like(d)
    elif penalty.estimator == "k2":
        values, gradient = d.square() / 2, d
    else:
        values, gradient = torch.expm1(-d) + d, -torch.expm1(-d)
        if penalty.estimator == "unbiased":
            u = ratios.ratio("theta_old" if penalty.behaviour == "old" else "theta_mu")
            values, gradient = u * values, u * d
    clamped = d.abs() >= LOG_RATIO_BOUND
    if penalty.max is not None:
        is_large = values.abs() > penalty.max
        gradient, clamped = torch.where(is_large, 0.0, gradient), clamped | is_large
    name = "kl/penalty" if penalty.to == "ref" else f"kl/penalty_{penalty.to}"
    return gradient, {name: Stat.mean(values, state.keep), f"{name}_clamped": Stat.mean(clamped, state.keep)}


def sum_factor(factor: Factor, state: TokenState, ratios: PolicyRatios, exponent: float | None) -> Tensor:
    """Return float64 [2]: sum and count of a clamped factor over tokens, or over responses (weight 1 each) by scope."""
    values = _clamp(factor_values(factor, state, ratios, exponent), factor).double()
    shares = state.keep.double()
    if factor.scope != "token":
        shares = shares / aggregate("sequence_sum", shares, state.keep, state.cu_seqlens).clamp(min=1)
    return torch.stack([(values * shares).sum(), shares.sum()])


def factor_at_one(factor: Factor, device: torch.device | int | str) -> float:
    """Return the clamped factor of the ratio 1. Errors as in ``check_returned``."""
    unit = torch.ones(1, dtype=torch.float64, device=device)
    if callable(factor.fn):
        unit = call_part("fn", factor.fn, unit, expected=unit, trains=unit > 0)
    return float(_clamp(unit, factor))


def adaptive_power(log_ratios: Tensor, shares: Tensor, target: float, total: Total = lambda sums: sums) -> float:
    """Return the largest q in [0, 1] with ``ESS(rho^q) / N >= target``, where ESS(w) = (sum w)^2 / sum w^2.

    log_ratios: [T]; shares: [T], a bool mask, or the weight of each entry; total: adds the sums of ranks with other
    tokens, float64 [S] -> [S]; result: a number, 1 for an empty batch. The share falls as q grows: the root is unique,
    and bisected to 1e-12. For log rho ~ N(m, s^2) the root is min(1, sqrt(ln(1 / target)) / s). The host waits for the
    device 41 times.
    """
    shares = shares.double()
    logs = torch.where(shares > 0, log_ratios.double(), 0.0)
    count = float(total(shares.sum().reshape(1)))

    def surplus(q: float) -> float:
        weights = (q * logs).exp()
        weighted = shares * weights
        first, second = total(torch.stack([weighted.sum(), torch.dot(weighted, weights)])).tolist()
        return math.log(first * first / (second * count)) - math.log(target)

    if not count or surplus(1.0) >= 0:
        return 1.0
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if surplus(middle) >= 0 else (low, middle)
    return low


def _exp(logs: Tensor) -> Tensor:
    """exp, at most e^40, so that a product of two factors is finite in fp32."""
    return logs.clamp(max=2 * LOG_RATIO_BOUND).exp()


def _choose(condition: Tensor, yes: float, no: float, template: Tensor) -> Tensor:
    """One of two numbers per token, in the dtype of ``template``: torch would make fp32."""
    return torch.where(condition, template.new_full((), yes), no)


def _clamp(values: Tensor, factor: Factor) -> Tensor:
    """Return the clamped values; the argument itself if the factor has no clamp."""
    return values if factor.low is None and factor.high is None else values.clamp(factor.low, factor.high)


def _where_applied(factor: Factor, values: Tensor, state: TokenState, default: float | bool) -> Tensor:
    """Return the values, ``default`` where the sign of the factor excludes the advantage."""
    if factor.sign == "both":
        return values
    applies = state.advantages > 0 if factor.sign == "positive" else state.advantages < 0
    return torch.where(applies, values, default)
