"""Objectives as slow, obvious loops in float64, and the literal losses of the papers for autograd.

The coefficients are those of the record's parts, token by token; the literal losses are written from the papers and
know nothing of the record. Neither shares code with ``megarl.core.objectives``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megarl.core.choices.parts import Objective

Floats = Sequence[float]
TensorRows = Sequence[Sequence[Tensor]]


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def kind_sum(kind: str, logs: Floats, j: int) -> float:
    """The log-ratio of the j-th kept token, from those of all kept tokens of its sequence."""
    tokens = {
        "token": logs[j : j + 1],
        "prefix": logs[: j + 1],
        "future_product": logs[j:],
        "future_mean": logs[j:],
        "sequence_product": logs,
        "sequence_mean": logs,
    }[kind]
    total = math.fsum(tokens)
    return total / len(tokens) if kind.endswith("mean") else total


def weight_fn(o: Objective, log_rho: float, q: float | None) -> float:
    """f(rho) of the weight, before any cap."""
    rho = math.exp(log_rho)
    if o.weight_fn == "identity":
        return rho
    if o.weight_fn == "power":
        return rho**o.power
    if o.weight_fn == "adaptive_power":
        assert q is not None
        return rho**q
    if o.weight_fn == "upper_clip":
        return min(rho, 1 + o.eps_high)
    assert o.weight_fn == "clip"
    return clamp(rho, 1 - o.eps_low, 1 + o.eps_high)


def trusted(o: Objective, log_rho: float, advantage: float, position: int) -> bool:
    """Whether mask and dual clip let one token train."""
    if o.window == "linear":
        rho = math.exp(clamp(log_rho, -20, 20))
        above, below = rho > 1 + o.eps_high, rho < 1 - o.eps_low
        beyond = o.dual_clip is not None and rho > o.dual_clip
    else:
        width = position**o.window_power
        above, below = log_rho > o.eps_high * width, log_rho < -o.eps_low * width
        beyond = o.dual_clip is not None and log_rho > o.dual_clip * width
    if o.mask == "ppo" and ((advantage > 0 and above) or (advantage < 0 and below)):
        return False
    return not (advantage < 0 and beyond)


def token_scale(o: Objective, response_lengths: Sequence[int], sequence: int) -> float:
    """1/D for a token of the given sequence; response_lengths are the loss tokens of every sequence of the batch."""
    non_empty = sum(1 for length in response_lengths if length > 0)
    if o.aggregation == "token-mean":
        return 1.0 / sum(response_lengths)
    if o.aggregation == "seq-mean-token-sum":
        return 1.0 / non_empty
    if o.aggregation == "seq-mean-token-mean":
        return 1.0 / (non_empty * response_lengths[sequence])
    assert o.norm_length is not None
    return 1.0 / o.norm_length


class _Sequence:
    """The kept tokens of one sequence and their log-ratios."""

    def __init__(self, lps: Floats, olds: Floats, mus: Floats, usable: Sequence[bool]) -> None:
        finite = [t for t in range(len(lps)) if usable[t] and math.isfinite(lps[t]) and math.isfinite(olds[t])]
        self.tokens = finite
        by_policy = {"theta": lps, "old": olds, "mu": mus}
        self.logs = {
            f"{a}_{b}": [clamp(by_policy[a][t] - by_policy[b][t], -20, 20) for t in finite]
            for a, b in (("theta", "mu"), ("theta", "old"), ("old", "mu"))
        }

    def ratio(self, policies: str, kind: str, j: int, cap: float = 20.0) -> float:
        """The bounded log-ratio of the j-th kept token."""
        return clamp(kind_sum(kind, self.logs[policies], j), -20, cap)

    def weight(self, o: Objective, j: int, q: float | None) -> float:
        """Importance weight of the j-th kept token, the gap factor included."""

        def capped(value: float) -> float:
            return value if o.cap is None else min(value, o.cap)

        if o.weight == "none":
            value = 1.0
        elif o.weight == "theta_mu" and o.tis_on == "old_mu":
            mismatch = capped(math.exp(self.ratio("old_mu", o.ratio, j, o.log_ratio_cap)))
            value = mismatch * weight_fn(o, self.ratio("theta_old", o.ratio, j, o.log_ratio_cap), q)
        else:
            value = capped(weight_fn(o, self.ratio(o.weight, o.ratio, j, o.log_ratio_cap), q))
        if o.gap == "none":
            return value
        factor = math.exp(self.ratio(o.gap, o.gap_ratio, j))
        inside = (o.gap_low is None or factor >= o.gap_low) and (o.gap_high is None or factor <= o.gap_high)
        if o.gap_mode == "truncate":
            assert o.gap_high is not None
            return value * min(factor, o.gap_high)
        return (value * factor if o.gap_mode == "mask_weight" else value) if inside else 0.0


def adaptive_power(log_ratios: Floats, target: float) -> float:
    """The largest q in [0, 1] with ESS(rho^q) / N >= target, by bisection."""

    def share(q: float) -> float:
        weights = [math.exp(q * x) for x in log_ratios]
        return math.fsum(weights) ** 2 / math.fsum(w * w for w in weights) / len(weights)

    if not log_ratios or share(1.0) >= target:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) >= target else (low, middle)
    return low


def kl_gradient(kind: str, logprob: float, ref_logprob: float) -> float:
    """The derivative of the KL estimator by log pi_theta."""
    d = clamp(logprob - ref_logprob, -20, 20)
    return {"none": 0.0, "k1": 1.0, "k2": d, "k3": 1 - math.exp(-d)}[kind]


def coefficients(
    o: Objective,
    logprobs: Sequence[Floats],
    old_logprobs: Sequence[Floats],
    rollout_logprobs: Sequence[Floats],
    advantages: Sequence[Floats],
    loss_mask: Sequence[Sequence[bool]],
    ref_logprobs: Sequence[Floats],
) -> list[list[float]]:
    """M * W * A / D less the KL's share, of every token of every sequence."""
    usable = [
        [bool(m) and mu != -math.inf for m, mu in zip(row_mask, row_mu, strict=True)]
        for row_mask, row_mu in zip(loss_mask, rollout_logprobs, strict=True)
    ]
    lengths = [sum(row) for row in usable]
    sequences = [_Sequence(*columns) for columns in zip(logprobs, old_logprobs, rollout_logprobs, usable, strict=True)]
    q = None
    if o.weight_fn == "adaptive_power":
        policies = "theta_old" if o.tis_on == "old_mu" and o.weight == "theta_mu" else o.weight
        logs = [s.ratio(policies, o.ratio, j, o.log_ratio_cap) for s in sequences for j in range(len(s.tokens))]
        q = adaptive_power(logs, o.ess_target)
    result = []
    for n, sequence in enumerate(sequences):
        row = [0.0] * len(logprobs[n])
        terms = []
        for j, t in enumerate(sequence.tokens):
            a = advantages[n][t]
            staleness = kind_sum(o.mask_ratio or o.ratio, sequence.logs["theta_old"], j)
            inside = trusted(o, staleness, a, j + 1)
            terms.append(sequence.weight(o, j, q) * a * token_scale(o, lengths, n) if inside else 0.0)
        for j, t in enumerate(sequence.tokens):
            row[t] = terms[j]
            if o.prefix_grad and o.ratio == "prefix":
                row[t] = math.fsum(terms[j:])
            elif o.prefix_grad:  # token j is in the ratio of every token before it
                shares = [1.0 if o.ratio == "future_product" else 1 / (len(terms) - i) for i in range(j + 1)]
                row[t] = math.fsum(share * term for share, term in zip(shares, terms, strict=False))
            if o.kl != "none":
                penalty = kl_gradient(o.kl, logprobs[n][t], ref_logprobs[n][t])
                row[t] -= o.kl_coef * penalty * token_scale(o, lengths, n)
        result.append(row)
    return result


def aggregate(aggregation: str, terms: TensorRows, norm_length: int | None = None) -> Tensor:
    """The aggregate of the loss tokens' terms, one list per sequence; empty sequences do not count."""
    sequences = [row for row in terms if len(row)]
    if not sequences:
        return torch.zeros((), dtype=torch.float64)
    sums = [torch.stack(list(row)).sum() for row in sequences]
    if aggregation == "token-mean":
        return torch.stack(sums).sum() / sum(len(row) for row in sequences)
    if aggregation == "seq-mean-token-sum":
        return torch.stack(sums).mean()
    if aggregation == "seq-mean-token-mean":
        return torch.stack([total / len(row) for total, row in zip(sums, sequences, strict=True)]).mean()
    assert aggregation == "seq-mean-token-sum-norm"
    assert norm_length is not None
    return torch.stack(sums).sum() / norm_length


def _loss(aggregation: str, rows: Sequence[tuple], sequence_terms: Callable[..., list[Tensor]]) -> Tensor:
    return -aggregate(aggregation, [sequence_terms(*row) for row in rows])


def clipped(ratio: Tensor, advantage: float, low: float, high: float, dual: float | None = None) -> Tensor:
    """PPO's min(ratio A, clip(ratio) A); for A < 0 no less than dual A."""
    term = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    if dual is not None and advantage < 0:
        term = torch.maximum(term, torch.full_like(term, dual * advantage))
    return term


def ppo_loss(
    logprobs: TensorRows,
    old_logprobs: Sequence[Floats],
    advantages: Sequence[Floats],
    eps_low: float,
    eps_high: float,
    aggregation: str,
    dual_clip: float | None = None,
) -> Tensor:
    """The literal PPO/GRPO loss: minus the aggregate of min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)."""

    def terms(lps: Sequence[Tensor], olds: Floats, adv: Floats) -> list[Tensor]:
        return [
            clipped((lp - old).exp(), a, 1 - eps_low, 1 + eps_high, dual_clip)
            for lp, old, a in zip(lps, olds, adv, strict=True)
        ]

    return _loss(aggregation, list(zip(logprobs, old_logprobs, advantages, strict=True)), terms)


def gspo_loss(
    logprobs: TensorRows,
    old_logprobs: Sequence[Floats],
    advantages: Sequence[Floats],
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
    token_variant: bool = False,
) -> Tensor:
    """The literal GSPO loss: s = exp(mean_t log r_t) for the whole sequence, the gradient through every token of it.

    token_variant: GSPO-token, log s_t = sg[log s] + lp_t - sg[lp_t], which takes an advantage per token.
    """

    def terms(lps: Sequence[Tensor], olds: Floats, adv: Floats) -> list[Tensor]:
        if not len(lps):
            return []
        log_s = torch.stack([lp - old for lp, old in zip(lps, olds, strict=True)]).mean()
        logs = [log_s.detach() + lp - lp.detach() if token_variant else log_s for lp in lps]
        return [clipped(log.exp(), a, 1 - eps_low, 1 + eps_high) for log, a in zip(logs, adv, strict=True)]

    return _loss("seq-mean-token-mean", list(zip(logprobs, old_logprobs, advantages, strict=True)), terms)


def ctpo_loss(
    logprobs: TensorRows,
    old_logprobs: Sequence[Floats],
    advantages: Sequence[Floats],
    *,
    prefix_grad: bool,
    aggregation: str = "token-mean",
    dual_clip: float | None = 0.05,
    eps_low: float = 0.025,
    eps_high: float = 0.05,
    power: float = 0.5,
) -> Tensor:
    """The literal CTPO loss: PPO's minimum with the cumulative ratio and a window that widens with the position."""

    def terms(lps: Sequence[Tensor], olds: Floats, adv: Floats) -> list[Tensor]:
        cumulative = torch.zeros((), dtype=torch.float64)
        found = []
        for t, (lp, old, a) in enumerate(zip(lps, olds, adv, strict=True), start=1):
            cumulative = cumulative + (lp - old)
            log_rho = cumulative if prefix_grad else cumulative.detach() + lp - lp.detach()
            width = t**power
            dual = None if dual_clip is None else math.exp(dual_clip * width)
            found.append(clipped(log_rho.exp(), a, math.exp(-eps_low * width), math.exp(eps_high * width), dual))
        return found

    return _loss(aggregation, list(zip(logprobs, old_logprobs, advantages, strict=True)), terms)


def kl_grpo_loss(
    logprobs: TensorRows,
    old_logprobs: Sequence[Floats],
    kl: Sequence[Floats],
    rewards: Floats,
    groups: Sequence[int],
    beta: float,
    *,
    whole_ratio: bool,
    future: bool = True,
    eps: float = 0.2,
) -> Tensor:
    """The literal KL-GRPO loss: -1/N sum_i 1/H_i sum_j min(rho_j A_j, clip(rho_j) A_j), by loss tokens only.

    A_j: r_j = R - beta / H sum_{k >= j} K_k, standardised (population) over the responses of the group with a j-th
    token. rho_j: exp(mean_{k >= j} log r_k), or r_j alone without ``future``; without ``whole_ratio`` only token j's
    own log-probability moves it, log rho_j = sg[log rho_j] + lp_j - sg[lp_j]. kl: K of each loss token, detached.
    """
    returns = [
        [reward - beta / len(row) * math.fsum(row[j:]) for j in range(len(row))]
        for reward, row in zip(rewards, kl, strict=True)
    ]

    def advantage(n: int, j: int) -> float:
        same = [row[j] for row, group in zip(returns, groups, strict=True) if group == groups[n] and len(row) > j]
        mean = math.fsum(same) / len(same)
        spread = math.sqrt(math.fsum((x - mean) ** 2 for x in same) / len(same))
        return (returns[n][j] - mean) / (spread + 1e-6)

    terms = []
    for n, (lps, olds) in enumerate(zip(logprobs, old_logprobs, strict=True)):
        logs = [lp - old for lp, old in zip(lps, olds, strict=True)]
        row = []
        for j, lp in enumerate(lps):
            log_rho = torch.stack(logs[j:] if future else logs[j : j + 1]).mean()
            if not whole_ratio:
                log_rho = log_rho.detach() + lp - lp.detach()
            row.append(clipped(log_rho.exp(), advantage(n, j), 1 - eps, 1 + eps))
        terms.append(row)
    return -aggregate("seq-mean-token-mean", terms)


def kl_loss(logprobs: TensorRows, ref_logprobs: Sequence[Floats], kind: str, aggregation: str) -> Tensor:
    """The aggregate of a KL estimator: k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1 with d = lp - lp_ref."""

    def terms(lps: Sequence[Tensor], refs: Floats) -> list[Tensor]:
        differences = [lp - ref for lp, ref in zip(lps, refs, strict=True)]
        forms = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: (-d).exp() + d - 1}
        return [forms[kind](d) for d in differences]

    return -_loss(aggregation, list(zip(logprobs, ref_logprobs, strict=True)), terms)


def weighted_loss(
    logprobs: TensorRows,
    old_logprobs: Sequence[Floats],
    advantages: Sequence[Floats],
    weight: Callable[[float], float],
    aggregation: str,
) -> Tensor:
    """Minus the aggregate of sg[weight(r)] A log pi_theta: RAFT, CISPO and every weight form."""

    def terms(lps: Sequence[Tensor], olds: Floats, adv: Floats) -> list[Tensor]:
        return [weight(math.exp(lp.item() - old)) * a * lp for lp, old, a in zip(lps, olds, adv, strict=True)]

    return _loss(aggregation, list(zip(logprobs, old_logprobs, advantages, strict=True)), terms)


def minirl_loss(
    logprobs: TensorRows,
    old_logprobs: Sequence[Floats],
    rollout_logprobs: Sequence[Floats],
    advantages: Sequence[Floats],
    eps_low: float = 0.2,
    eps_high: float = 0.27,
    cap: float = 5.0,
) -> Tensor:
    """The literal eq. 7 of MiniRL: minus the mean over sequences of sum_t M sg[min(w, C)] A log pi_theta."""

    def terms(lps: Sequence[Tensor], olds: Floats, mus: Floats, adv: Floats) -> list[Tensor]:
        row = []
        for lp, old, mu, a in zip(lps, olds, mus, adv, strict=True):
            r = (lp - old).exp().item()
            w = (lp - mu).exp().detach().clamp(max=cap)
            stopped = (a > 0 and r > 1 + eps_high) or (a < 0 and r < 1 - eps_low)
            row.append((0.0 if stopped else 1.0) * w * a * lp)
        return row

    rows = list(zip(logprobs, old_logprobs, rollout_logprobs, advantages, strict=True))
    return _loss("seq-mean-token-sum", rows, terms)
