"""The mathematics of ``megarl.core`` as slow, obvious loops in float64: the oracle of the tests.

Written from the formulas, not from the fast code, and sharing none of it. Sequences are lists of lists, tokens are
visited one at a time, and every sum is spelled out. Objectives are in ``oracles.reference_objectives``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def rloo(rewards: Floats, groups: Sequence[int]) -> list[float]:
    """R minus the mean of the other rewards of the group."""
    advantages = []
    for i, group in enumerate(groups):
        others = [r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and j != i]
        advantages.append(rewards[i] - math.fsum(others) / len(others) if others else 0.0)
    return advantages


def raw_mixed(rewards: Floats, groups: Sequence[int]) -> list[float]:
    """R, but 0 in a group of several responses that all have the same reward."""
    advantages = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        advantages.append(0.0 if len(members) > 1 and len(set(members)) == 1 else reward)
    return advantages


def opo(rewards: Floats, groups: Sequence[int], lengths: Sequence[int]) -> list[float]:
    """R minus the mean over all tokens of the group, each of which has the reward of its response."""
    advantages = []
    for reward, group, length in zip(rewards, groups, lengths, strict=True):
        tokens = [r for r, g, n in zip(rewards, groups, lengths, strict=True) if g == group for _ in range(n)]
        advantages.append(reward - math.fsum(tokens) / len(tokens) if length and len(set(tokens)) > 1 else 0.0)
    return advantages


def whiten(values: Floats, lengths: Sequence[int]) -> list[float]:
    """Each value at each token of its response; less the mean of all tokens, over their standard deviation."""
    tokens = [value for value, length in zip(values, lengths, strict=True) for _ in range(length)]
    if len(set(tokens)) < 2:
        return [0.0] * len(values)
    mean = math.fsum(tokens) / len(tokens)
    variance = math.fsum((x - mean) ** 2 for x in tokens) / (len(tokens) - 1)
    return [
        (value - mean) / math.sqrt(variance + 1e-8) if length else 0.0
        for value, length in zip(values, lengths, strict=True)
    ]


def grpo_sum(
    components: Sequence[Floats], weights: Floats, groups: Sequence[int], ddof: int = 1, eps: float = 1e-6
) -> list[float]:
    """The weighted sum of GRPO's advantages of each reward; components by response."""
    alone = [grpo(column, groups, ddof, eps) for column in zip(*components, strict=True)]
    return [math.fsum(w * column[i] for w, column in zip(weights, alone, strict=True)) for i in range(len(groups))]


def token_level_kl(
    rewards: Floats,
    groups: Sequence[int],
    kl: Sequence[Floats],
    beta: float,
    ddof: int,
    eps: float,
    horizon: int | None,
) -> list[list[float]]:
    """Returns to go of each response's loss tokens, standardised per position; kl holds loss tokens only."""
    returns = []
    for reward, row in zip(rewards, kl, strict=True):
        length = len(row) if horizon is None else horizon
        returns.append([reward - beta / length * math.fsum(row[j:]) for j in range(len(row))])
    advantages = []
    for row, group in zip(returns, groups, strict=True):
        same = [other for other, g in zip(returns, groups, strict=True) if g == group]
        values = []
        for j, value in enumerate(row):
            valid = [other[j] for other in same if len(other) > j]
            mean = math.fsum(valid) / len(valid)
            spread = math.fsum((x - mean) ** 2 for x in valid) / max(len(valid) - ddof, 1)
            values.append((value - mean) / (math.sqrt(spread) + eps))
        advantages.append(values)
    return advantages


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
        "rollout/ess": sum(rho) ** 2 / sum(x * x for x in rho),
        f"rollout/extreme_{tau:g}": sum(1 for x in rho if max(x, 1 / x) > tau) / n,
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
