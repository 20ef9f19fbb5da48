"""The factors of a coefficient: importance weight W, trust mask M, and the derivative of a KL penalty.

Nothing here carries a gradient. What is a ratio of several tokens comes from ``megarl.core.ratios``.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megarl.core.choices.parts import KlPenalty, Objective, RatioKind
from megarl.core.diagnostics.measures import prefix_variance_rate
from megarl.core.metrics import Stat
from megarl.core.objectives.columns import TokenState, call_part, copy_columns
from megarl.core.ratios import LOG_RATIO_BOUND, aggregate_log_ratio, log_ratio, positions

Total = Callable[[Tensor], Tensor]
"""Adds a vector of sums over ranks."""


def importance_weight(
    objective: Objective, state: TokenState, power: float | None = None
) -> tuple[Tensor, dict[str, Stat]]:
    """Return ``min(f(rho), cap)``, times the truncated gap factor where there is one: [T], finite; and its metrics.

    power: q of "adaptive_power"; None chooses it from this state.
    """
    extra: dict[str, Stat] = {}
    if objective.weight == "none":
        values, truncated = torch.ones_like(state.logprobs), torch.zeros_like(state.keep)
    else:
        # In the decoupled form the cap is on old/mu, and f on theta/old.
        log_rho = weight_log_ratio(objective, state)
        values, truncated, extra = _apply(objective, log_rho, state.keep, power)
        if objective.decoupled:
            gap = _log_ratio_of("old_mu", objective.ratio, objective.log_ratio_cap, state).exp()
            capped, cut = _cap(gap, objective.cap, state.keep)
            values, truncated = capped * values, truncated | cut
        else:
            values, cut = _cap(values, objective.cap, state.keep)
            truncated = truncated | cut
    if objective.gap != "none" and objective.gap_mode != "mask":
        factor = _gap_factor(objective, state)
        extra["gap/weight"] = Stat.summary(factor, state.keep)
        values = values * (factor.clamp(max=objective.gap_high) if objective.gap_mode == "truncate" else factor)
    metrics = {
        "tis/weight": Stat.summary(values, state.keep),
        "tis/ess": Stat.ess(values, state.keep),
        "tis/truncated": Stat.mean(truncated, state.keep),
    }
    return values, metrics | extra


def find_trusted(objective: Objective, state: TokenState, log_staleness: Tensor) -> tuple[Tensor, dict[str, Stat]]:
    """Return which tokens pass the masks, bool [T], and metrics; log_staleness: [T], log theta/old of single tokens."""
    keep, advantages = state.keep, state.advantages
    nowhere = torch.zeros_like(keep)
    high = low = dual = gap = own = nowhere
    extra: dict[str, Stat] = {}
    if callable(objective.mask):
        own = keep & ~call_part("mask", objective.mask, copy_columns(state, keep), like=keep, where=keep)
        extra["clip/own"] = Stat.mean(own, keep)
    if objective.mask == "ppo" or objective.dual_clip is not None:
        log_rho = aggregate_log_ratio(objective.trust_ratio, log_staleness, keep, state.cu_seqlens)
        if objective.trust_ratio != "token":
            extra["clip/ratio"] = Stat.ratio(log_rho.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND), keep)
        if objective.trust_ratio == "prefix":
            extra["clip/prefix_variance_rate"] = prefix_variance_rate(log_rho, positions(keep, state.cu_seqlens), keep)
        above, below, beyond = _leaves_window(objective, log_rho, state)
        if objective.mask == "ppo":
            high, low = keep & (advantages > 0) & above, keep & (advantages < 0) & below
        if objective.dual_clip is not None:
            dual = keep & (advantages < 0) & beyond
            extra["clip/dual"] = Stat.mean(dual, keep)
    if objective.gap != "none" and objective.gap_mode != "truncate":
        factor = _gap_factor(objective, state)
        if objective.gap_low is not None:
            gap = gap | (factor < objective.gap_low)
        if objective.gap_high is not None:
            gap = gap | (factor > objective.gap_high)
        extra["gap/dropped"] = Stat.mean(gap & keep, keep)
    inside = keep & ~(high | low | dual | gap | own)
    return inside, {"clip/high": Stat.mean(high, keep), "clip/low": Stat.mean(low, keep)} | extra


def kl_penalty(kind: KlPenalty, logprobs: Tensor, ref_logprobs: Tensor, keep: Tensor) -> tuple[Tensor, dict[str, Stat]]:
    """Return the derivative of the estimator of KL[theta || ref] by log pi_theta, [T], and its metrics.

    With d = log pi_theta - log pi_ref, clamped to +-20: k1 = d, derivative 1; k2 = d^2 / 2, derivative d;
    k3 = exp(-d) + d - 1, derivative 1 - exp(-d). The derivative of k1 has expectation 0 under theta: it regularises
    nothing. Source: Schulman, "Approximating KL divergence" (2020).
    """
    d = log_ratio(logprobs, ref_logprobs, keep)
    if kind == "k1":
        values, gradient = d, torch.ones_like(d)
    elif kind == "k2":
        values, gradient = d.square() / 2, d
    else:
        assert kind == "k3", "checked when the objective was made"
        values, gradient = torch.expm1(-d) + d, -torch.expm1(-d)
    clamped = d.abs() >= LOG_RATIO_BOUND
    return gradient, {"kl/penalty": Stat.mean(values, keep), "kl/clamped": Stat.mean(clamped, keep)}


def weight_log_ratio(objective: Objective, state: TokenState) -> Tensor:
    """Return log rho [T], rho being the ratio that ``weight_fn`` is applied to."""
    return _log_ratio_of(objective.corrected, objective.ratio, objective.log_ratio_cap, state)


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


def _log_ratio_of(policies: str, kind: RatioKind, cap: float, state: TokenState) -> Tensor:
    """Return the log-ratio [T] of two policies over the tokens of ``kind``, bounded so that exp stays finite."""
    columns = {"theta": state.logprobs, "old": state.old_logprobs, "mu": state.rollout_logprobs}
    numerator, denominator = policies.split("_")
    single = log_ratio(columns[numerator], columns[denominator], state.keep)
    if kind == "token":
        return single
    return aggregate_log_ratio(kind, single, state.keep, state.cu_seqlens).clamp(-LOG_RATIO_BOUND, cap)


def _apply(
    objective: Objective, log_rho: Tensor, keep: Tensor, power: float | None
) -> tuple[Tensor, Tensor, dict[str, Stat]]:
    """Return f(rho) [T], bool [T] where f has cut the ratio, and metrics of f."""
    uncut = torch.zeros_like(keep)
    if callable(f := objective.weight_fn):
        return call_part("weight_fn", f, log_rho.exp(), like=log_rho, where=keep).to(log_rho.dtype), uncut, {}
    match objective.weight_fn:
        case "identity":
            return log_rho.exp(), uncut, {}
        case "power":
            return (objective.power * log_rho).exp(), uncut, {}
        case "adaptive_power":
            q = adaptive_power(log_rho, keep, objective.ess_target) if power is None else power
            return (q * log_rho).exp(), uncut, {"tis/power": Stat.mean(torch.full_like(log_rho, q), keep)}
        case "upper_clip" | "clip":
            values, cut = _cap(log_rho.exp(), 1 + objective.eps_high, keep)
            return values.clamp(min=1 - objective.eps_low) if objective.weight_fn == "clip" else values, cut, {}


def _cap(values: Tensor, cap: float | None, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Return min(values, cap), and where the cap has cut."""
    if cap is None:
        return values, torch.zeros_like(keep)
    return values.clamp(max=cap), keep & (values > cap)


def _gap_factor(objective: Objective, state: TokenState) -> Tensor:
    return _log_ratio_of(objective.gap, objective.gap_ratio, LOG_RATIO_BOUND, state).exp()


def _leaves_window(objective: Objective, log_rho: Tensor, state: TokenState) -> tuple[Tensor, Tensor, Tensor]:
    """Return where the ratio is above the window, below it, and above the dual clip; bool [T] each."""
    dual = math.inf if objective.dual_clip is None else objective.dual_clip
    if objective.window == "linear":
        rho = log_rho.exp()  # may overflow to inf, which compares as it should
        return rho > 1 + objective.eps_high, rho < 1 - objective.eps_low, rho > dual
    widths = positions(state.keep, state.cu_seqlens).to(log_rho.dtype).pow(objective.window_power)
    return (
        log_rho > objective.eps_high * widths,
        log_rho < -objective.eps_low * widths,
        log_rho > dual * widths,
    )
