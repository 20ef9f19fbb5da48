"""Coefficients of a record as slow, obvious loops in float64; no code is shared with ``megarl.core.objectives``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.core.choices.parts import Factor, Gate, Mask, Objective, Penalty

Floats = Sequence[float]


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def over_scope(scope: str, values: Floats, j: int) -> float:
    """What a scope makes of one value for each kept token of a sequence, for the j-th of them."""
    tokens = values
    if scope == "token":
        tokens = values[j : j + 1]
    elif scope == "prefix":
        tokens = values[: j + 1]
    elif scope.startswith("future"):
        tokens = values[j:]
    if scope == "sequence_max":
        return max(tokens)
    total = math.fsum(tokens)
    return total / len(tokens) if scope.endswith("mean") else total


@dataclass(frozen=True)
class Token:
    """One kept token: ln pi of the three policies and the reference, its advantage and its place."""

    theta: float
    old: float
    mu: float
    ref: float
    advantage: float
    place: int
    """In its sequence, all tokens counted, from 0."""
    topk: tuple[Floats, Floats, bool] | None = None
    """ln mu and ln pi_theta of the sampler's top K tokens, and whether this token is one of them."""
    router_shift: float = 0.0
    """ln max(e^-D, floor)."""

    def log_ratio(self, policies: str) -> float:
        above, below = policies.split("_")
        plain = clamp(getattr(self, above) - getattr(self, below), -20, 20)
        return plain + self.router_shift if policies == "theta_old" else plain

    def probabilities(self, policies: str) -> tuple[float, float]:
        above, below = policies.split("_")
        return math.exp(getattr(self, above)), math.exp(getattr(self, below))


def rest(probability: float) -> float:
    """The probability of all other tokens, at least 1e-8."""
    return max(1 - probability, 1e-8)


def binary_kl(p: float, q: float, log_ratio: float) -> float:
    return p * log_ratio + rest(p) * math.log(rest(p) / rest(q))


def top_k(kind: str, token: Token) -> float:
    assert token.topk is not None
    mu, theta = ([math.exp(x) for x in logs] for logs in token.topk[:2])
    if not token.topk[2]:
        mu.append(math.exp(token.mu))
        theta.append(math.exp(token.theta))
    mu.append(rest(math.fsum(mu)))
    theta.append(rest(math.fsum(theta)))
    if kind == "topk_tv":
        return math.fsum(abs(a - b) for a, b in zip(mu, theta, strict=True)) / 2
    return math.fsum(a * math.log(a / b) for a, b in zip(mu, theta, strict=True))


def statistic(m: Mask, token: Token) -> float:
    """A mask's statistic of a single token; that of the ratios is the log-ratio."""
    log_ratio, (p, q) = token.log_ratio(m.policies), token.probabilities(m.policies)
    if m.statistic in ("topk_tv", "topk_kl"):
        return top_k(m.statistic, token)
    return {
        "ratio": log_ratio,
        "log_ratio": log_ratio,
        "difference": p - q,
        "tv": abs(p - q),
        "kl": binary_kl(q, p, -log_ratio),
        "kl_rev": binary_kl(p, q, log_ratio),
        "kl_sym": max(binary_kl(q, p, -log_ratio), binary_kl(p, q, log_ratio)),
        "k2": log_ratio**2 / 2,
        "k3": math.exp(log_ratio) - 1 - log_ratio,
    }[m.statistic]


def leads_away(m: Mask, tokens: Sequence[Token], j: int, scope: str = "token") -> bool:
    """Whether a divergence mask may drop the j-th kept token: its sign, and for "outward" the ratio over a scope."""
    advantage = tokens[j].advantage
    if m.sign == "outward":
        return over_scope(scope, [t.log_ratio(m.policies) for t in tokens], j) * advantage > 0
    return m.sign == "both" or advantage < 0


def least_dropped(m: Mask, sequences: Sequence[Sequence[Token]]) -> float:
    """M2PO: the largest values go, equal ones together, until the mean of the rest is at most the bound."""
    left = [statistic(m, t[j]) for t in sequences for j in range(len(t)) if leads_away(m, t, j)]
    least = math.inf
    assert m.high is not None
    while left and math.fsum(left) / len(left) > m.high:
        least = max(left)
        left = [value for value in left if value < least]
    return least


def over_budget(m: Mask, tokens: Sequence[Token], j: int) -> bool:
    """CPPO: not (v_t D_t <= delta and S_t <= delta + budget W_{t-1}), with running sums."""
    held = allowed = value = 0.0
    for k in range(j + 1):
        weight = 1 - (1 - m.last_weight) * k / max(len(tokens) - 1, 1)
        value = weight * statistic(m, tokens[k])
        held += value
        allowed += weight if k < j else 0.0
    assert m.high is not None
    return value > m.high or held > m.high + m.budget * allowed


def drops(m: Mask, tokens: Sequence[Token], j: int, sequences: Sequence[Sequence[Token]]) -> bool:
    """Whether a mask drops the j-th kept token of one of the sequences of a batch."""
    if m.scope == "batch_mean":
        return leads_away(m, tokens, j) and statistic(m, tokens[j]) >= least_dropped(m, sequences)
    if m.scope == "prefix_budget":
        return leads_away(m, tokens, j) and over_budget(m, tokens, j)
    value, advantage = over_scope(m.scope, [statistic(m, t) for t in tokens], j), tokens[j].advantage
    low = -math.inf if m.low is None else m.low * (j + 1) ** m.growth
    high = math.inf if m.high is None else m.high * (j + 1) ** m.growth
    if m.statistic == "ratio":
        value = math.exp(min(value, 700))
    below = value <= low if m.strict else value < low
    above = value >= high if m.strict else value > high
    if m.sign == "both":
        return below or above
    if m.sign == "negative":
        return advantage < 0 and (below or above)
    if m.statistic in ("ratio", "log_ratio", "difference"):
        return (advantage > 0 and above) or (advantage < 0 and below)
    return (below or above) and leads_away(m, tokens, j, "sequence_sum" if m.scope == "sequence_max" else m.scope)


def factor_log_ratio(f: Factor, tokens: Sequence[Token], j: int) -> float:
    """ln rho of a factor."""
    logs = []
    for token in tokens:
        log = token.log_ratio(f.policies)
        if f.token_clip is not None and token.advantage > 0:
            log = min(log, f.token_clip)
        if f.token_clip is not None and token.advantage < 0:
            log = max(log, -f.token_clip)
        logs.append(log)
    value = over_scope(f.scope, logs, j)
    return value if f.scope == "token" else clamp(value, -20, f.log_ratio_cap)


def clamped_factor(f: Factor, tokens: Sequence[Token], j: int, q: float) -> float:
    log_rho = factor_log_ratio(f, tokens, j)
    if f.fn == "vespo":
        k, decay = f.vespo_positive if tokens[j].advantage >= 0 else f.vespo_negative
        value = math.exp(k * log_rho) * math.exp(decay * (1 - math.exp(log_rho)))
    else:
        power = {"identity": 1.0, "power": f.power, "adaptive_power": q}[f.fn]  # type: ignore[index]
        value = math.exp(log_rho) ** power
    return clamp(value, 0.0 if f.low is None else f.low, math.inf if f.high is None else f.high)


def factor_in_batch(f: Factor, sequences: Sequence[Sequence[Token]]) -> list[list[float]]:
    """A factor of every kept token of the whole batch."""
    q = adaptive_power([factor_log_ratio(f, ts, j) for ts in sequences for j in range(len(ts))], f.ess_target)
    values = [[clamped_factor(f, tokens, j, q) for j in range(len(tokens))] for tokens in sequences]
    if f.batch_normalize:
        single = f.scope == "token"
        counted = [x for row in values for x in row] if single else [row[0] for row in values if row]
        mean = math.fsum(counted) / len(counted) if counted else 1.0
        values = [[x / mean for x in row] for row in values]
    signs = {"both": (1, 0, -1), "positive": (1,), "negative": (-1,)}[f.sign]

    def sign(token: Token) -> int:
        return (token.advantage > 0) - (token.advantage < 0)

    return [
        [x if sign(token) in signs else 1.0 for x, token in zip(row, tokens, strict=True)]
        for row, tokens in zip(values, sequences, strict=True)
    ]


def gate(g: Gate, token: Token) -> float:
    """S of one token."""
    a, r = token.advantage, math.exp(token.log_ratio("theta_old"))
    parameter = g.positive if a > 0 else g.negative
    if g.kind == "drpo":
        theta, mu = token.probabilities("theta_mu")
        return 1 - (0 if a == 0 else math.copysign(1, a)) * (theta - mu) / parameter
    if g.kind == "sapo":
        p = 1 / (1 + math.exp(-parameter * (r - 1)))
        return 4 * p * (1 - p)
    if a > 0 and r > 1 + g.eps:
        return parameter * (1 + g.eps) / r
    if a < 0 and r < 1 - g.eps:
        return parameter * (1 - g.eps) / r
    return 1.0


def penalty_gradient(p: Penalty, token: Token) -> float:
    """beta times the derivative of a KL estimator by log pi_theta."""
    d = clamp(token.theta - getattr(token, p.to), -20, 20)
    u = math.exp(token.log_ratio(f"theta_{p.behaviour}"))
    k3 = math.exp(-d) + d - 1
    value, derivative = {
        "k1": (d, 1.0),
        "k2": (d * d / 2, d),
        "k3": (k3, 1 - math.exp(-d)),
        "unbiased": (u * k3, u * d),
    }[p.estimator]
    return 0.0 if p.max is not None and abs(value) > p.max else p.coef * derivative


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


class Sizes:
    """What aggregations divide by: tokens that count, by sequence, and sequences that count."""

    def __init__(self, o: Objective, usable: Sequence[int], sequences: Sequence[Sequence[Token]]) -> None:
        """usable: loss tokens of each sequence, kept or not."""
        self.lengths = list(usable)
        members = list(usable)
        for n, tokens in enumerate(sequences):
            for j in range(len(tokens)):
                dropping = [m for m in o.masks if isinstance(m, Mask) and drops(m, tokens, j, sequences)]
                self.lengths[n] -= any(m.denominator in ("leave", "leave_tokens") for m in dropping)
                members[n] -= any(m.denominator == "leave" for m in dropping)
        self.num_sequences = sum(1 for count in members if count > 0)

    def scale(self, o: Objective, n: int) -> float:
        """1/D of a token of sequence n."""
        if o.aggregation == "token-mean":
            return 1.0 / max(sum(self.lengths), 1)
        per_sequence = 1.0 / max(self.num_sequences, 1)
        if o.aggregation == "seq-mean-token-sum":
            return per_sequence
        if o.aggregation == "seq-mean-token-mean":
            return per_sequence / max(self.lengths[n], 1)
        assert o.norm_length is not None
        return per_sequence / o.norm_length


def coefficients(
    o: Objective,
    logprobs: Sequence[Floats],
    old_logprobs: Sequence[Floats],
    rollout_logprobs: Sequence[Floats],
    advantages: Sequence[Floats],
    loss_mask: Sequence[Sequence[bool]],
    ref_logprobs: Sequence[Floats],
    topk: Sequence[Sequence[tuple[Floats, Floats, bool]]] | None = None,
    router_drift: Sequence[Floats] | None = None,
) -> list[list[float]]:
    """[M F S A - P] / D of every token of every sequence."""
    usable, sequences = [], []
    for n, mask in enumerate(loss_mask):
        loss_tokens = [t for t in range(len(mask)) if mask[t] and rollout_logprobs[n][t] != -math.inf]
        usable.append(len(loss_tokens))
        sequences.append(
            [
                Token(
                    logprobs[n][t], old_logprobs[n][t], rollout_logprobs[n][t], ref_logprobs[n][t], advantages[n][t],
                    t, None if topk is None else topk[n][t],
                    0.0 if o.router_shift_floor is None or router_drift is None
                    else math.log(max(math.exp(-router_drift[n][t]), o.router_shift_floor)),
                )
                for t in loss_tokens
                if logprobs[n][t] != -math.inf and old_logprobs[n][t] != -math.inf
            ]
        )  # fmt: skip
    factors = [factor_in_batch(f, sequences) for f in o.factors]
    sizes = Sizes(o, usable, sequences)
    result = []
    for n, tokens in enumerate(sequences):
        terms = []
        for j, token in enumerate(tokens):
            value = token.advantage * sizes.scale(o, n)
            for rows in factors:
                value *= rows[n][j]
            if o.gate is not None:
                value *= gate(o.gate, token)
            if any(isinstance(m, Mask) and drops(m, tokens, j, sequences) for m in o.masks):
                value = 0.0
            terms.append(value)
        if o.prefix_grad:
            terms = through_the_ratio(o.factors[0].scope, terms)
        row = [0.0] * len(logprobs[n])
        for token, term in zip(tokens, terms, strict=True):
            penalties = math.fsum(penalty_gradient(p, token) for p in o.penalties)
            row[token.place] = term - penalties * sizes.scale(o, n)
        result.append(row)
    return result


def through_the_ratio(scope: str, terms: Floats) -> list[float]:
    """What each token gets if the derivative goes through the whole ratio, not only through the token itself."""
    if scope == "prefix":
        return [math.fsum(terms[j:]) for j in range(len(terms))]
    # Token j is in the ratio of every token before it.
    shares = [1.0 if scope == "future_sum" else 1 / (len(terms) - i) for i in range(len(terms))]
    return [math.fsum(share * x for share, x in zip(shares[: j + 1], terms, strict=False)) for j in range(len(terms))]
