"""Policy gradients on an MDP small enough to visit every response: expectations, not samples.

The policy is a table of logits, one row per prefix; token 0 ends a response, and so does the third token. Every
response is a sequence of the packed batch, with its probability in its advantage, so that the coefficients' sum over
the batch is the expected gradient.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megarl.core.advantages.tokens import token_level_returns
from megarl.core.objectives import OBJECTIVES, Factor, TokenColumns, policy_loss

VOCABULARY, HORIZON, BETA = 3, 3, 0.7
END = 0


def responses() -> list[tuple[int, ...]]:
    """Every response: it ends with END, or is as long as the horizon."""
    found, open_prefixes = [], [()]
    while open_prefixes:
        prefix = open_prefixes.pop()
        for token in range(VOCABULARY):
            longer = (*prefix, token)
            done = token == END or len(longer) == HORIZON
            (found if done else open_prefixes).append(longer)
    return sorted(found)


RESPONSES = responses()
PREFIXES = sorted({response[:j] for response in RESPONSES for j in range(len(response))})
CU_SEQLENS = torch.tensor([0, *(len(response) for response in RESPONSES)]).cumsum(0)


def table(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(PREFIXES), VOCABULARY, generator=generator, dtype=torch.float64)


def packed_logprobs(logits: Tensor) -> Tensor:
    """[T], log-probabilities of the tokens of all responses, back to back."""
    row = {prefix: n for n, prefix in enumerate(PREFIXES)}
    rows = [row[response[:j]] for response in RESPONSES for j in range(len(response))]
    tokens = [token for response in RESPONSES for token in response]
    return logits.log_softmax(-1)[rows, tokens]


def per_response(values: Tensor) -> list[Tensor]:
    return [values[a:b] for a, b in pairwise(CU_SEQLENS.tolist())]


REWARDS = torch.rand(len(RESPONSES), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
REFERENCE = packed_logprobs(table(1))


def true_gradient(horizon: int) -> Tensor:
    """Autograd of E[R - beta / H sum_t log(pi_theta / pi_ref)], the expectation spelled out."""
    logits = table(0).requires_grad_()
    logprobs = packed_logprobs(logits)
    objective = torch.zeros((), dtype=torch.float64)
    for reward, lp, ref in zip(REWARDS, per_response(logprobs), per_response(REFERENCE), strict=True):
        objective = objective + lp.sum().exp() * (reward - BETA / horizon * (lp - ref).sum())
    objective.backward()
    assert logits.grad is not None
    return logits.grad


def estimated_gradient(returns: Tensor) -> Tensor:
    """The gradient of the trainer's loss, with returns [T] times the probability of their response as advantages."""
    logits = table(0).requires_grad_()
    logprobs = packed_logprobs(logits)
    probabilities = torch.cat([lp.detach().sum().exp().expand(len(lp)) for lp in per_response(logprobs)])
    columns = TokenColumns(
        logprobs,
        logprobs.detach(),
        logprobs.detach(),
        returns * probabilities,
        torch.ones(len(logprobs), dtype=torch.bool),
        CU_SEQLENS,
    )
    # seq-mean-token-sum divides by the number of sequences, which an expectation does not.
    objective = OBJECTIVES["reinforce"]
    (-len(RESPONSES) * policy_loss(objective, columns)[0]).backward()
    assert logits.grad is not None
    return logits.grad


def returns_to_go(horizon: int) -> Tensor:
    logprobs = packed_logprobs(table(0))
    mask = torch.ones(len(logprobs), dtype=torch.bool)
    return token_level_returns(REWARDS, logprobs, REFERENCE, mask, CU_SEQLENS, BETA, horizon)


@pytest.mark.parametrize("horizon", [HORIZON, 10])
def test_constant_horizon_is_exact(horizon):
    """E[grad K] = 0, and past terms drop out: no explicit gradient of the KL is missing."""
    assert float((estimated_gradient(returns_to_go(horizon)) - true_gradient(horizon)).abs().max()) < 1e-12


def test_prefix_weights_are_exact_off_policy():
    """Samples of pi_old weighted by the ratio of their past give the gradient at theta; single-token ratios do not."""
    old = packed_logprobs(table(2))
    errors = {}
    for scope in ("prefix", "token"):
        logits = table(0).requires_grad_()
        logprobs = packed_logprobs(logits)
        probabilities = torch.cat([lp.sum().exp().expand(len(lp)) for lp in per_response(old)])
        # The future of a prefix follows theta in the true gradient: its expected reward there stands for the reward.
        advantages = expected_rewards(logprobs.detach()) * probabilities
        mask = torch.ones(len(old), dtype=torch.bool)
        columns = TokenColumns(logprobs, old, old, advantages, mask, CU_SEQLENS)
        objective = dataclasses.replace(
            OBJECTIVES["reinforce"],
            factors=(Factor("theta_old", scope=scope),),
        )
        (-len(RESPONSES) * policy_loss(objective, columns)[0]).backward()
        assert logits.grad is not None
        truth = table(0).requires_grad_()
        lps = per_response(packed_logprobs(truth))
        sum(lp.sum().exp() * reward for lp, reward in zip(lps, REWARDS, strict=True)).backward()  # type: ignore[union-attr]
        assert truth.grad is not None
        errors[scope] = float((logits.grad - truth.grad).abs().max())
    assert errors["prefix"] < 1e-12
    assert errors["token"] > 1e-2


def expected_rewards(logprobs: Tensor) -> Tensor:
    """[T], the mean reward under logprobs of all responses that begin with the tokens up to and with this one."""
    by_response = dict(zip(RESPONSES, per_response(logprobs), strict=True))
    rewards = dict(zip(RESPONSES, REWARDS.tolist(), strict=True))
    found = []
    for response in RESPONSES:
        for j in range(1, len(response) + 1):
            same = [other for other in RESPONSES if other[:j] == response[:j]]
            weights = [math.exp(float(by_response[other][j:].sum())) for other in same]
            found.append(sum(w * rewards[other] for w, other in zip(weights, same, strict=True)))
    return torch.tensor(found, dtype=torch.float64)
