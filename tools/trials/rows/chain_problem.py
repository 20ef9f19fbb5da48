"""A token problem with an exact pass rate, on which many seeds train side by side by megarl's coefficients.

A response has 16 tokens out of 4. The policy is a table of logits by position and previous token. After each previous
token, one of the four is forbidden, at random by position and seed; a response is right if none of its tokens is. One
batch is sampled from the old policy and serves ``staleness`` updates, each on responses of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.core.objectives import Objective, TokenColumns, advantages_of, coefficients

LENGTH, VOCABULARY, NUM_SEEDS, RESPONSES_PER_UPDATE, NUM_UPDATES = 16, 4, 16, 16, 64
_POSITIONS = torch.arange(LENGTH)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Responses of all seeds, S seeds with n responses of 16 tokens each."""

    tokens: Tensor
    """int64 [S, n, 16]."""
    previous: Tensor
    """int64 [S, n, 16], the token before each token; 0 before the first."""
    old_logprobs: Tensor
    """float64 [S, n, 16]."""
    rewards: Tensor
    """float64 [S, n], 0 or 1."""

    def split(self, size: int) -> Iterator[Batch]:
        """Yield parts with ``size`` responses of each seed."""
        columns = (self.tokens, self.previous, self.old_logprobs, self.rewards)
        yield from (Batch(*parts) for parts in zip(*(column.split(size, 1) for column in columns), strict=True))


def train(objective: Objective, staleness: int, lr: float) -> Tensor:
    """Return the exact pass rate of each seed after 64 updates by gradient ascent, float64 [S].

    staleness: updates per batch; 1 is on-policy. Updates and samples are equally many for each staleness.
    """
    generator = torch.Generator().manual_seed(0)
    allowed = make_allowed(generator)
    logits = torch.zeros(allowed.shape, dtype=torch.float64)
    for _ in range(NUM_UPDATES // staleness):
        batch = sample(logits, allowed, staleness * RESPONSES_PER_UPDATE, generator)
        for part in batch.split(RESPONSES_PER_UPDATE):
            logits = logits + lr * gradient(objective, logits, part)
    return pass_rates(logits, allowed)


def make_allowed(generator: torch.Generator) -> Tensor:
    """Return which token may follow which, bool [S, 16, previous, token]."""
    forbidden = torch.randint(VOCABULARY, (NUM_SEEDS, LENGTH, VOCABULARY), generator=generator)
    return torch.nn.functional.one_hot(forbidden, VOCABULARY) == 0


def sample(logits: Tensor, allowed: Tensor, size: int, generator: torch.Generator) -> Batch:
    """Return ``size`` responses of each seed's policy [S, 16, previous, token]."""
    rows, probabilities = torch.arange(NUM_SEEDS)[:, None], logits.softmax(-1)
    steps = [torch.zeros(NUM_SEEDS, size, dtype=torch.int64)]
    for position in range(LENGTH):
        chances = probabilities[rows, position, steps[-1]].view(-1, VOCABULARY)
        steps.append(torch.multinomial(chances, 1, generator=generator).view(NUM_SEEDS, size))
    tokens, previous = torch.stack(steps[1:], -1), torch.stack(steps[:-1], -1)
    rewards = pick(allowed, previous, tokens).all(-1).double()
    return Batch(tokens, previous, pick(logits.log_softmax(-1), previous, tokens), rewards)


def pick(table: Tensor, previous: Tensor, tokens: Tensor) -> Tensor:
    """Return the entries [S, n, 16] of a table [S, 16, previous, token]."""
    return table[torch.arange(NUM_SEEDS)[:, None, None], _POSITIONS, previous, tokens]


def gradient(objective: Objective, logits: Tensor, batch: Batch) -> Tensor:
    """Return the gradient of each seed's objective by its logits, [S, 16, previous, token].

    megarl packs the seeds as one batch, so its sequence mean divides by the responses of all seeds, and not of one.
    """
    table, responses = logits.log_softmax(-1), batch.rewards.numel()
    logprobs, old = pick(table, batch.previous, batch.tokens).flatten(), batch.old_logprobs.flatten()
    advantages = advantages_of(objective, batch.rewards.flatten(), torch.arange(responses)).repeat_interleave(LENGTH)
    bounds = torch.arange(0, responses * LENGTH + 1, LENGTH)
    mask = torch.ones_like(old, dtype=torch.bool)
    columns = TokenColumns(logprobs, old, old, advantages, mask, bounds)
    weights = NUM_SEEDS * coefficients(objective, columns).values.view(batch.tokens.shape)
    rows = torch.arange(NUM_SEEDS)[:, None, None]
    probabilities = table.exp()[rows, _POSITIONS, batch.previous]
    scores = torch.nn.functional.one_hot(batch.tokens, VOCABULARY) - probabilities  # of the logits behind each token
    places = (rows.expand_as(batch.tokens), _POSITIONS.expand_as(batch.tokens), batch.previous)
    return torch.zeros_like(logits).index_put_(places, weights[..., None] * scores, accumulate=True)


def pass_rates(logits: Tensor, allowed: Tensor) -> Tensor:
    """Return the exact chance of a right response, float64 [S], by recursion from the last token."""
    steps = logits.softmax(-1) * allowed
    values = torch.ones(NUM_SEEDS, VOCABULARY, dtype=torch.float64)
    for position in reversed(range(LENGTH)):
        values = (steps[:, position] * values[:, None, :]).sum(-1)
    return values[:, 0]
