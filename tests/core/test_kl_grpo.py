"""kl_grpo against autograd of the published formula, from rewards and log-probabilities to the gradient."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from core_batches import random_columns
from torch import Tensor

from megarl.core.metrics import finalize
from megarl.core.objectives import (
    OBJECTIVES,
    Objective,
    TokenColumns,
    policy_loss,
    token_advantages,
)

LENGTHS = [7, 4, 9, 5, 1, 8, 6, 3]
GROUPS = [4, 4, 4, 4, 2, 2, 2, 9]
"""The last one is alone: its advantages are 0."""
REWARDS = [1.0, 0.0, 1.0, 0.25, 0.0, 1.0, 1.0, 1.0]
BETA = 0.4

ROWS: dict[str, dict[str, Any]] = {
    "kl_grpo": {},
    "kl_grpo_token": {"future": False},
    "kl_grpo literal": {"whole_ratio": True},
}


def clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    """PPO's min(ratio A, clip(ratio) A)."""
    return torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)


def kl_grpo_loss(
    logprobs: Sequence[Sequence[Tensor]],
    old_logprobs: Sequence[Sequence[float]],
    kl: Sequence[Sequence[float]],
    rewards: Sequence[float],
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
    return -torch.stack([torch.stack(row).mean() for row in terms if row]).mean()


def row_of(name: str) -> Objective:
    row = dataclasses.replace(OBJECTIVES[name.split()[0]], kl_coef=BETA)
    return dataclasses.replace(row, prefix_grad="literal" in name)


def batch(seed: int) -> TokenColumns:
    """Responses with environment tokens between their turns, ratios on both sides of the window."""
    columns = random_columns(seed, LENGTHS, masked=0.35)
    columns.loss_mask[:7] = torch.tensor([False, True, True, False, False, True, True])  # prompt, turn, tool, turn
    return columns


def with_advantages(row: Objective, columns: TokenColumns, policy: torch.Tensor) -> TokenColumns:
    advantages = token_advantages(
        row,
        REWARDS,
        GROUPS,
        logprobs=policy,
        ref_logprobs=columns.ref_logprobs,
        loss_mask=columns.loss_mask,
        cu_seqlens=columns.cu_seqlens,
    )
    return dataclasses.replace(columns, advantages=advantages)


def by_autograd(name: str, columns: TokenColumns, policy: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Loss and gradient [T] of the published formula."""
    logprobs = columns.logprobs.clone().requires_grad_()
    assert columns.ref_logprobs is not None
    k = policy - columns.ref_logprobs
    own = [[t for t in range(a, b) if columns.loss_mask[t]] for a, b in pairwise(columns.cu_seqlens.tolist())]
    loss = kl_grpo_loss(
        [[logprobs[t] for t in tokens] for tokens in own],
        [[float(columns.old_logprobs[t]) for t in tokens] for tokens in own],
        [[float(k[t]) for t in tokens] for tokens in own],
        REWARDS,
        GROUPS,
        BETA,
        **{"whole_ratio": False, **ROWS[name]},
    )
    loss.backward()
    assert logprobs.grad is not None
    return float(loss.detach()), logprobs.grad


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("at", ["old", "theta"])
@pytest.mark.parametrize("name", ROWS)
def test_the_gradient_is_that_of_the_published_formula(name: str, at: str, seed: int) -> None:
    columns = batch(seed)
    policy = columns.old_logprobs if at == "old" else columns.logprobs
    _, expected = by_autograd(name, columns, policy)
    logprobs = columns.logprobs.clone().requires_grad_()
    loss, metrics = policy_loss(
        row_of(name), dataclasses.replace(with_advantages(row_of(name), columns, policy), logprobs=logprobs)
    )
    loss.backward()
    assert torch.allclose(logprobs.grad, expected, rtol=1e-9, atol=1e-12)
    assert not logprobs.grad[~columns.loss_mask].any()
    found = finalize(metrics)
    assert found["clip/high"] + found["clip/low"] > 0.02


def test_the_three_differ_where_theta_has_moved_and_only_the_literal_one_where_it_has_not() -> None:
    columns = batch(0)
    moved = [by_autograd(name, columns, columns.old_logprobs)[1] for name in ROWS]
    assert not torch.allclose(moved[0], moved[1], rtol=1e-2)
    still = dataclasses.replace(columns, logprobs=columns.old_logprobs)
    own, token, whole = (by_autograd(name, still, columns.old_logprobs)[1] for name in ROWS)
    assert torch.allclose(own, token)
    assert not torch.allclose(own, whole, rtol=1e-2)
