"""Episodes with a calculator whose policy has drifted: log-probabilities without a model behind them.

The log-ratio of each token is drawn from a pair of policies, old and theta, so that every token ratio has mean 1 under
the old policy. Tool outputs lie between the turns; their log-probabilities are arbitrary, and no ratio may count them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.core.objectives import TokenColumns

NUM_TURNS, CALL, OUTPUT, NUM_EPISODES = 64, 64, 16, 64
NUM_STATES, VOCABULARY = 32, 16


def make_episodes(sigma: float, seed: int) -> TokenColumns:
    """Return episodes of 64 turns: 64 tokens of the old policy, then 16 of the tool with arbitrary log-probabilities.

    Half of the episodes, by chance, have advantage 1, the others -1; a real advantage depends on the tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    old, log_ratios = drifted_policy(sigma, generator)
    num_tokens = NUM_EPISODES * NUM_TURNS * CALL
    drawn = torch.multinomial(old.exp().flatten(), num_tokens, replacement=True, generator=generator)
    is_call = (torch.arange(CALL + OUTPUT) < CALL).repeat(NUM_EPISODES * NUM_TURNS)
    length = NUM_TURNS * (CALL + OUTPUT)
    behind, ahead = -3 * torch.rand(2, is_call.numel(), dtype=torch.float64, generator=generator)
    behind[is_call] = old.flatten()[drawn]
    ahead[is_call] = behind[is_call] + log_ratios.flatten()[drawn]
    signs = torch.randint(2, (NUM_EPISODES,), generator=generator).double() * 2 - 1
    bounds = torch.arange(0, is_call.numel() + 1, length)
    return TokenColumns(ahead, behind, behind, signs.repeat_interleave(length), is_call, bounds)


def drifted_policy(sigma: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return log pi_old and log(pi_theta / pi_old), float64 [states, tokens], with a token's log-ratio of sd ``sigma``.

    Three states in four are nearly certain of their token, as in text. The drift is one direction of the logits; its
    size is bisected. States have equal chances.
    """
    logits, direction = torch.randn(2, NUM_STATES, VOCABULARY, dtype=torch.float64, generator=generator)
    is_certain = torch.arange(NUM_STATES) % 4 > 0
    old = (logits * torch.where(is_certain, 6.0, 1.0)[:, None]).log_softmax(-1)

    def log_ratios(size: float) -> Tensor:
        return (old + size * direction).log_softmax(-1) - old

    def deviation(size: float) -> float:
        values, chances = log_ratios(size), old.exp() / NUM_STATES
        mean = (chances * values).sum()
        return float((chances * (values - mean).square()).sum().sqrt())

    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if deviation(middle) < sigma else (low, middle)
    return old, log_ratios(low)
