"""The importance weight of a coefficient, its gate, and the derivative of a KL penalty.

Nothing here carries a gradient.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megarl.core.choices.parts import Factor, Gate, Objective, Penalty
from megarl.core.metrics import Stat
from megarl.core.objectives.columns import TokenState, call_part
from megarl.core.objectives.policy_ratios import PolicyRatios
from megarl.core.ratios import LOG_RATIO_BOUND, aggregate, log_ratio

Total = Callable[[Tensor], Tensor]
"""Adds a vector of sums over ranks."""


def importance_weight(
    objective: Objective,
    state: TokenState,
    ratios: PolicyRatios,
    exponents: tuple[float | None, ...],
    means: tuple[float | None, ...],
    detailed: bool = True,
) -> tuple[Tensor | None, dict[str, Stat]]:
    """Return the product of the factors [T], finite, None for 1; and its metrics, without ``detailed`` none.

    exponents, means: by factor, q of "adaptive_power" and what ``batch_normalize`` divides by.
    """
    values: Tensor | None = None
    truncated: Tensor | None = None
    metrics: dict[str, Stat] = {}
    for factor, exponent, mean in zip(objective.factors, exponents, means, strict=True):
        found = factor_values(factor, state, ratios, exponent)
        clamped = _clamp(found, factor)
        if detailed and clamped is not found:
            cut = state.keep & _where_applied(factor, clamped != found, state, False)
            truncated = cut if truncated is None else truncated | cut
        if detailed and exponent is not None:
            metrics["tis/power"] = Stat.mean(torch.full_like(found, exponent), state.keep)
        if detailed and len(objective.factors) > 1:
            metrics[f"tis/{factor.policies}"] = Stat.summary(clamped, state.keep)
        if mean is not None:
            clamped = clamped / mean
        clamped = _where_applied(factor, clamped, state, 1.0)
        values = clamped if values is None else values * clamped
    if detailed:
        weight = torch.ones_like(state.logprobs) if values is None else values
        nowhere = torch.zeros_like(state.keep) if truncated is None else truncated
        metrics |= Stat.means({"tis/truncated": nowhere}, ratios.count)
        metrics["tis/weight"] = Stat.summary(weight, state.keep)
        metrics["tis/ess"] = Stat.ess_of(metrics["tis/weight"])
    return values, metrics


def factor_values(factor: Factor, state: TokenState, ratios: PolicyRatios, exponent: float | None = None) -> Tensor:
    """Return f(rho) [T] before the clamps. exponent: q of "adaptive_power"."""
    if callable(factor.fn):
        rho = factor_log_ratio(factor, state, ratios).exp()
        return call_part("fn", factor.fn, rho, like=rho, where=state.keep).to(rho.dtype)
    if factor.fn == "identity":
        if factor.scope == "token" and factor.token_clip is None:
            return ratios.ratio(factor.policies)
        return factor_log_ratio(factor, state, ratios).exp()
    log_rho = factor_log_ratio(factor, state, ratios)
    if factor.fn == "vespo":
        negative = state.advantages < 0
        pairs = zip(factor.vespo_positive, factor.vespo_negative, strict=True)
        k, decay = (_choose(negative, below, above, log_rho) for above, below in pairs)
        return _exp(k * log_rho + decay * (1 - log_rho.exp()))
    if factor.fn == "adaptive_power":
        assert exponent is not None, "found before"
        return (exponent * log_rho).exp()
    return _exp(factor.power * log_rho)


def factor_log_ratio(factor: Factor, state: TokenState, ratios: PolicyRatios) -> Tensor:
    """Return log rho [T] of a factor, bounded so that exp stays finite."""
    if factor.token_clip is not None:
        single, bound = ratios.log(factor.policies), factor.token_clip
        # min(l, bound) where A > 0, max(l, -bound) where A < 0: clipping outward leaves the other side as it is.
        outward = torch.where(state.advantages > 0, single.clamp(max=bound), single)
        outward = torch.where(state.advantages < 0, single.clamp(min=-bound), outward)
        found = aggregate(factor.scope, outward, state.keep, state.cu_seqlens)
    else:
        found = ratios.log(factor.policies, factor.scope)
    return found if factor.scope == "token" else found.clamp(-LOG_RATIO_BOUND, factor.log_ratio_cap)


def gate_values(gate: Gate, state: TokenState, ratios: PolicyRatios) -> Tensor:
    """Return S [T] of ``Gate``: what the weighted advantage is multiplied by."""
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
    derivative of k1 has expectation 0 under theta: it regularises nothing. Sources: Schulman, "Approximating KL
    divergence" (2020); DeepSeek-V3.2 (arXiv 2512.02556), eq. 7.
    """
    other = {"ref": state.ref_logprobs, "mu": state.rollout_logprobs, "old": state.old_logprobs}[penalty.to]
    assert other is not None, "checked before"
    d = log_ratio(state.logprobs, other, state.keep)
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
        beyond = values.abs() > penalty.max
        gradient, clamped = torch.where(beyond, 0.0, gradient), clamped | beyond
    name = "kl/penalty" if penalty.to == "ref" else f"kl/penalty_{penalty.to}"
    return gradient, {name: Stat.mean(values, state.keep), f"{name}_clamped": Stat.mean(clamped, state.keep)}


def sum_factor(factor: Factor, state: TokenState, ratios: PolicyRatios, exponent: float | None) -> Tensor:
    """Return float64 [2]: sum and count of a clamped factor over tokens, or over responses if that is its scope."""
    values = _clamp(factor_values(factor, state, ratios, exponent), factor).double()
    shares = state.keep.double()
    if factor.scope != "token":
        # Each response counts once, whatever its length.
        lengths = aggregate("sequence_sum", shares, state.keep, state.cu_seqlens)
        shares = shares / lengths.clamp(min=1)
    return torch.stack([(values * shares).sum(), shares.sum()])


def factor_at_one(factor: Factor, device: torch.device | int | str) -> float:
    """Return the clamped factor of a ratio that is 1."""
    one = torch.ones(1, dtype=torch.float64, device=device)
    if callable(factor.fn):
        one = call_part("fn", factor.fn, one, like=one, where=one > 0)
    return float(_clamp(one, factor))


def adaptive_power(log_ratios: Tensor, shares: Tensor, target: float, total: Total = lambda sums: sums) -> float:
    """Return the largest q in [0, 1] with ``ESS(rho^q) / N >= target``, where ESS(w) = (sum w)^2 / sum w^2.

    log_ratios: [T]; shares: [T], a bool mask, or how often each entry counts; total: adds the sums of ranks that hold
    other tokens, float64 [S] -> [S]; result: a number, 1 if nothing counts. The share falls as q grows, so the root is
    unique; it is bracketed to 1e-12. For log rho ~ N(m, s^2) it is
    min(1, sqrt(ln(1 / target)) / s). Waits for the device a dozen times.
    """
    shares = shares.double()
    logs = torch.where(shares > 0, log_ratios.double(), 0.0)
    count = float(total(shares.sum().reshape(1)))

    def surplus(q: float) -> float:
        weights = (q * logs).exp()
        weighted = shares * weights
        first, second = total(torch.stack([weighted.sum(), torch.dot(weighted, weights)])).tolist()
        return math.log(first * first / (second * count)) - math.log(target)

    if not count or (at_high := surplus(1.0)) >= 0:
        return 1.0
    # The Illinois variant of false position: as safe as bisection, and smooth functions need about 8 steps of it.
    low, high, at_low = 0.0, 1.0, -math.log(target)
    side = 0
    for _ in range(100):
        if high - low < 1e-12 or at_low == 0:
            break
        middle = min(max((low * at_high - high * at_low) / (at_high - at_low), low + 5e-13), high - 5e-13)
        value = surplus(middle)
        if value >= 0:
            low, at_low = middle, value
            at_high = at_high / 2 if side == 1 else at_high
            side = 1
        else:
            high, at_high = middle, value
            at_low = at_low / 2 if side == -1 else at_low
            side = -1
    return low


def _exp(logs: Tensor) -> Tensor:
    """exp, bounded so that the product with another factor's stays finite in fp32."""
    return logs.clamp(max=2 * LOG_RATIO_BOUND).exp()


def _choose(where: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """One of two numbers per token, in the dtype of ``like``: of two numbers alone, torch makes fp32."""
    return torch.where(where, like.new_full((), yes), no)


def _clamp(values: Tensor, factor: Factor) -> Tensor:
    """The same tensor if the factor has no clamp."""
    if factor.low is None and factor.high is None:
        return values
    return values.clamp(factor.low, factor.high)


def _where_applied(factor: Factor, values: Tensor, state: TokenState, other: float | bool) -> Tensor:
    """``other`` where the factor's sign excludes the advantage."""
    if factor.sign == "both":
        return values
    applies = state.advantages > 0 if factor.sign == "positive" else state.advantages < 0
    return torch.where(applies, values, other)
