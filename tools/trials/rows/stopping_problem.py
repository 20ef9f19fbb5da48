"""Policy gradients with a token-level KL on problems whose responses can all be visited.

The policy is a table of logits, one row per prefix. Token 0 ends a response, and so does the fourth token. Each
response is in the packed batch once, with its chance as a factor of its advantages: sums over the batch are
expectations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.core.advantages.tokens import token_level_returns
from megarl.core.objectives import OBJECTIVES, TokenColumns, coefficients

MAX_TOKENS, NUM_TOKENS = 4, 3
FORMS = ("printed", "explicit", "complete", "constant")
"""Returns as the source prints them, less beta / H, less the KL of past tokens as well, and as printed with one H."""


@dataclass(frozen=True, slots=True, eq=False)
class StoppingProblem:
    """A policy table, and all responses packed back to back with their rewards: T tokens of N responses."""

    logits: Tensor
    """float64 [prefixes, tokens]."""
    places: tuple[list[int], list[int]]
    """Row and column of ``logits`` for each of the T tokens."""
    bounds: Tensor
    """int64 [N+1]."""
    rewards: Tensor
    """float64 [N]."""
    ref_logprobs: Tensor
    """float64 [T]."""

    @property
    def lengths(self) -> Tensor:
        """int64 [N]."""
        return self.bounds.diff()

    def logprobs(self, logits: Tensor) -> Tensor:
        """Return float64 [T], with gradient."""
        return logits.log_softmax(-1)[self.places]

    def by_response(self, values: Tensor) -> Tensor:
        """Return the sums [N] of values [T]."""
        return torch.stack([part.sum() for part in values.split(self.lengths.tolist())])


def make_problem(seed: int) -> StoppingProblem:
    """Return a random problem: policy, reference and rewards are drawn anew for each seed."""
    responses, prefixes = list[tuple[int, ...]](), [()]
    for prefix in prefixes:  # grows in the loop: all prefixes, short ones first
        for token in range(NUM_TOKENS):
            longer = (*prefix, token)
            (responses if token == 0 or len(longer) == MAX_TOKENS else prefixes).append(longer)
    rows = [prefixes.index(response[:j]) for response in responses for j in range(len(response))]
    tokens = [token for response in responses for token in response]
    generator = torch.Generator().manual_seed(seed)
    policy, reference = torch.randn(2, len(prefixes), NUM_TOKENS, dtype=torch.float64, generator=generator)
    rewards = torch.rand(len(responses), dtype=torch.float64, generator=generator)
    bounds = torch.tensor([0, *map(len, responses)]).cumsum(0)
    return StoppingProblem(policy, (rows, tokens), bounds, rewards, reference.log_softmax(-1)[rows, tokens])


def true_gradient(problem: StoppingProblem, beta: float, horizon: int | None) -> Tensor:
    """Return the gradient of ``E[R - beta / H ln(pi / pi_ref)]`` by automatic differentiation of the whole sum."""
    logits = problem.logits.clone().requires_grad_()
    logprobs = problem.logprobs(logits)
    lengths = (problem.lengths if horizon is None else torch.full_like(problem.lengths, horizon)).double()
    returns = problem.rewards - beta / lengths * problem.by_response(logprobs - problem.ref_logprobs)
    (problem.by_response(logprobs).exp() * returns).sum().backward()
    assert logits.grad is not None, "of backward()"
    return logits.grad


def estimated_gradient(problem: StoppingProblem, form: str, beta: float) -> Tensor:
    """Return the expectation of megarl's gradient with returns to go, in one of ``FORMS``.

    Each response is in the batch once, and its chance is a factor of its advantages.
    """
    logits = problem.logits.clone().requires_grad_()
    logprobs = problem.logprobs(logits)
    values, mask = logprobs.detach(), torch.ones(len(logprobs), dtype=torch.bool)
    horizon = MAX_TOKENS if form == "constant" else None
    returns = token_level_returns(
        problem.rewards, values, problem.ref_logprobs, mask, problem.bounds, beta, horizon=horizon
    )
    if form == "complete":  # the return at the first token has the KL of the whole response
        returns = returns[problem.bounds[:-1]].repeat_interleave(problem.lengths)
    if form in ("explicit", "complete"):
        returns = returns - (beta / problem.lengths.double()).repeat_interleave(problem.lengths)
    chances = problem.by_response(values).exp().repeat_interleave(problem.lengths)
    columns = TokenColumns(values, values, values, returns * chances, mask, problem.bounds)
    weights = len(problem.rewards) * coefficients(OBJECTIVES["reinforce"], columns).values
    (weights * logprobs).sum().backward()
    assert logits.grad is not None, "of backward()"
    return logits.grad


def bias_of_gradient(seed: int, form: str, beta: float) -> tuple[float, float]:
    """Return the largest entry of the bias, and the norm of the bias over the norm of the gradient."""
    problem = make_problem(seed)
    truth = true_gradient(problem, beta, MAX_TOKENS if form == "constant" else None)
    bias = estimated_gradient(problem, form, beta) - truth
    return float(bias.abs().max()), float(bias.norm() / truth.norm())
