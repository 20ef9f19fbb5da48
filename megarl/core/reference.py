"""The mathematics of ``megarl.core`` as slow, obvious loops in float64: the oracle of the tests.

Written from the formulas, not from the fast code, and sharing none of it. Sequences are lists of lists, tokens are
visited one at a time, and every sum is spelled out. The literal losses of the papers are here too, for autograd.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Floats = Sequence[float]


def group_mean(rewards: Floats, groups: Sequence[int]) -> list[float]:
    """R minus the mean reward of all responses to the same prompt."""
    advantages = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        uniform = all(r == members[0] for r in members)
        advantages.append(0.0 if uniform else reward - math.fsum(members) / len(members))
    return advantages


def grpo(rewards: Floats, groups: Sequence[int], ddof: int = 1, eps: float = 1e-6) -> list[float]:
    """R minus the group's mean, divided by the group's standard deviation plus eps."""
    advantages = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if all(r == members[0] for r in members):
            advantages.append(0.0)
            continue
        mean = math.fsum(members) / len(members)
        variance = math.fsum((r - mean) ** 2 for r in members) / (len(members) - ddof)
        advantages.append((reward - mean) / (math.sqrt(variance) + eps))
    return advantages


def ratio(numerator: float, denominator: float) -> float:
    """exp of the log-ratio, which is clamped to plus/minus 20."""
    return math.exp(min(max(numerator - denominator, -20.0), 20.0))


def token_weight(
    weight: str, cap: float | None, tis_on: str, logprob: float, old_logprob: float, rollout_logprob: float
) -> float:
    """Importance weight of one token: which policies, and what the cap is on."""

    def capped(value: float) -> float:
        return value if cap is None else min(value, cap)

    if weight == "none":
        return 1.0
    if weight == "theta_old":
        return capped(ratio(logprob, old_logprob))
    if weight == "old_mu":
        return capped(ratio(old_logprob, rollout_logprob))
    if tis_on == "old_mu":
        return capped(ratio(old_logprob, rollout_logprob)) * ratio(logprob, old_logprob)
    return capped(ratio(logprob, rollout_logprob))


def trusted(mask: str, eps_low: float, eps_high: float, staleness: float, advantage: float) -> bool:
    """Whether the trust mask lets one token train."""
    if mask == "none":
        return True
    if advantage > 0 and staleness > 1 + eps_high:
        return False
    return not (advantage < 0 and staleness < 1 - eps_low)


def token_scale(aggregation: str, response_lengths: Sequence[int], sequence: int, norm_length: int | None) -> float:
    """1/D for a token of the given sequence; response_lengths are the loss tokens of every sequence of the batch."""
    non_empty = sum(1 for length in response_lengths if length > 0)
    if aggregation == "token-mean":
        return 1.0 / sum(response_lengths)
    if aggregation == "seq-mean-token-sum":
        return 1.0 / non_empty
    if aggregation == "seq-mean-token-mean":
        return 1.0 / (non_empty * response_lengths[sequence])
    assert aggregation == "seq-mean-token-sum-norm"
    assert norm_length is not None
    return 1.0 / norm_length


def coefficients(
    *,
    weight: str,
    mask: str,
    aggregation: str,
    cap: float | None,
    tis_on: str,
    eps_low: float,
    eps_high: float,
    norm_length: int | None,
    logprobs: Sequence[Floats],
    old_logprobs: Sequence[Floats],
    rollout_logprobs: Sequence[Floats],
    advantages: Sequence[Floats],
    loss_mask: Sequence[Sequence[bool]],
) -> list[list[float]]:
    """M * W * A / D of every token of every sequence."""
    usable = [
        [bool(m) and mu != -math.inf for m, mu in zip(row_mask, row_mu, strict=True)]
        for row_mask, row_mu in zip(loss_mask, rollout_logprobs, strict=True)
    ]
    lengths = [sum(row) for row in usable]
    result = []
    for n in range(len(logprobs)):
        row = []
        for t in range(len(logprobs[n])):
            lp, old, mu, a = logprobs[n][t], old_logprobs[n][t], rollout_logprobs[n][t], advantages[n][t]
            trains = usable[n][t] and lp != -math.inf and old != -math.inf
            if trains and trusted(mask, eps_low, eps_high, ratio(lp, old), a):
                scale = token_scale(aggregation, lengths, n, norm_length)
                row.append(token_weight(weight, cap, tis_on, lp, old, mu) * a * scale)
            else:
                row.append(0.0)
        result.append(row)
    return result


def aggregate(aggregation: str, terms: Sequence[Sequence[Tensor]], norm_length: int | None = None) -> Tensor:
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


def ppo_loss(
    logprobs: Sequence[Sequence[Tensor]],
    old_logprobs: Sequence[Floats],
    advantages: Sequence[Floats],
    eps_low: float,
    eps_high: float,
    aggregation: str,
) -> Tensor:
    """The literal PPO/GRPO loss: minus the aggregate of min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)."""
    terms = []
    for lps, olds, adv in zip(logprobs, old_logprobs, advantages, strict=True):
        row = []
        for lp, old, a in zip(lps, olds, adv, strict=True):
            r = (lp - old).exp()
            row.append(torch.minimum(r * a, r.clamp(1 - eps_low, 1 + eps_high) * a))
        terms.append(row)
    return -aggregate(aggregation, terms)


def minirl_loss(
    logprobs: Sequence[Sequence[Tensor]],
    old_logprobs: Sequence[Floats],
    rollout_logprobs: Sequence[Floats],
    advantages: Sequence[Floats],
    eps_low: float = 0.2,
    eps_high: float = 0.27,
    cap: float = 5.0,
) -> Tensor:
    """The literal eq. 7 of MiniRL: minus the mean over sequences of sum_t M sg[min(w, C)] A log pi_theta."""
    terms = []
    for lps, olds, mus, adv in zip(logprobs, old_logprobs, rollout_logprobs, advantages, strict=True):
        row = []
        for lp, old, mu, a in zip(lps, olds, mus, adv, strict=True):
            r = (lp - old).exp().item()
            w = (lp - mu).exp().detach().clamp(max=cap)
            stopped = (a > 0 and r > 1 + eps_high) or (a < 0 and r < 1 - eps_low)
            row.append((0.0 if stopped else 1.0) * w * a * lp)
        terms.append(row)
    return -aggregate("seq-mean-token-sum", terms)


def entropy(logits: Floats) -> float:
    """-sum p log p of softmax(logits)."""
    largest = max(logits)
    weights = [math.exp(x - largest) for x in logits]
    total = math.fsum(weights)
    return -math.fsum(w / total * math.log(w / total) for w in weights if w > 0)


def mismatch(old_logprobs: Floats, rollout_logprobs: Floats, tau: float = 2.0) -> dict[str, float]:
    """KL, chi-squared, effective sample size and extreme tokens of rho = pi_old / mu, over loss tokens."""
    rho = [math.exp(old - mu) for old, mu in zip(old_logprobs, rollout_logprobs, strict=True)]
    n = len(rho)
    return {
        "rollout/k1": sum(mu - old for old, mu in zip(old_logprobs, rollout_logprobs, strict=True)) / n,
        "rollout/k3": sum(x - 1 - math.log(x) for x in rho) / n,
        "rollout/chi2_token": sum(x * x for x in rho) / n - 1,
        "rollout/ess": sum(rho) ** 2 / sum(x * x for x in rho),
        f"rollout/extreme_{tau:g}": sum(1 for x in rho if max(x, 1 / x) > tau) / n,
        "rollout/ppl_ratio": math.exp(-sum(math.log(x) for x in rho) / n),
    }


def disagreement(
    a: Sequence[Sequence[Sequence[int]]], b: Sequence[Sequence[Sequence[int]]]
) -> dict[str, float | list[float]]:
    """Compare routes [T][L][K] as sets, token by token and layer by layer."""
    num_tokens, num_layers, top_k = len(a), len(a[0]), len(a[0][0])
    by_layer = [0] * num_layers
    shared = differing_tokens = 0
    for row_a, row_b in zip(a, b, strict=True):
        differing = 0
        for layer in range(num_layers):
            experts_a, experts_b = set(row_a[layer]), set(row_b[layer])
            shared += len(experts_a & experts_b)
            if experts_a != experts_b:
                differing += 1
                by_layer[layer] += 1
        differing_tokens += differing > 0
    return {
        "flip": sum(by_layer) / (num_tokens * num_layers),
        "overlap": shared / (num_tokens * num_layers * top_k),
        "token_any": differing_tokens / num_tokens,
        "layers_per_token": sum(by_layer) / num_tokens,
        "per_layer_flip": [count / num_tokens for count in by_layer],
    }


def zigzag(lengths: Sequence[int], cp_size: int, cp_rank: int) -> list[int]:
    """The packed tokens of a context-parallel rank: chunks cp_rank and 2 cp - 1 - cp_rank of every sequence."""
    held = []
    start = 0
    for length in lengths:
        chunk = length // (2 * cp_size)
        for number in (cp_rank, 2 * cp_size - 1 - cp_rank):
            for token in range(number * chunk, (number + 1) * chunk):
                held.append(start + token)
        start += length
    return held


def fewest_bins(lengths: Sequence[int], max_tokens: int) -> int:
    """The smallest number of bins of max_tokens that hold all sequences, by trying every placement."""

    def place(index: int, loads: list[int], best: int) -> int:
        if len(loads) >= best:
            return best
        if index == len(lengths):
            return len(loads)
        for i in range(len(loads)):
            if loads[i] + lengths[index] <= max_tokens:
                best = place(index + 1, [*loads[:i], loads[i] + lengths[index], *loads[i + 1 :]], best)
        return place(index + 1, [*loads, lengths[index]], best)

    return place(0, [], len(lengths) + 1)
