"""The weight gradient of ``linear_logprobs``, sequence by sequence, for the gradient norms of single samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megarl.errors import ConfigError
from megarl.megatron.passes.logprobs import ROWS, logit_gradient, operand, product


def outer_squares(first: Tensor, second: Tensor) -> Tensor:
    """Return ``||sum_t left_t right_t^T||_F^2`` of each sample, float64 [n]; left [n, L, A], right [n, L, B], fp32.

    It equals ``sum_{t, u} (left_t . left_u) (right_t . right_u)``, the form computed if it takes fewer operations: L (A
    + B) instead of A B per token. Source: Li et al., arXiv 2110.05679, section 4.
    """
    length, products = first.size(1), first.size(2) * second.size(2)
    if length * (first.size(2) + second.size(2)) < products:
        return ((first @ first.mT) * (second @ second.mT)).sum((1, 2), dtype=torch.float64)
    return (first.mT @ second).square().sum((1, 2), dtype=torch.float64)


class WeightGradient:
    """The weight gradient ``sum_t dz_t h_t^T`` of ``linear_logprobs``, sequence by sequence.

    Made of its first result, before the backward pass; ``complete`` gives the result's gradient [S]. ``whole`` makes a
    column of all S positions from this rank's. Methods take positions [n, L] of n sequences of equal length.
    """

    def __init__(self, logprobs: Tensor) -> None:
        node: Any = logprobs.grad_fn
        if node.kept is not None:
            raise ConfigError(
                "gradient norms of single samples are of log-probabilities over the whole vocabulary, but these are "
                "over the sampler's kept sets; sample without top-p and top-k, or leave the kept sets out"
            )
        self._shard, self._scale = node.shard, node.scale
        self.hidden, self._weight, self._labels, self._log_sum = node.saved_tensors[:4]

    def complete(self, gradient: Tensor, whole: Callable[[Tensor], Tensor]) -> None:
        """Take the gradient [S] of the result."""
        columns = self.hidden.detach(), self._labels, self._log_sum, gradient.float() * self._scale
        self.hidden, self._labels, self._log_sum, self._factor = map(whole, columns)

    def squares(self, positions: Tensor) -> Tensor:
        """Return the squared norm of this rank's rows, float64 [n]."""
        count, length = positions.shape
        total = torch.zeros(count, dtype=torch.float64, device=positions.device)
        for first in range(0, count, step := max(1, ROWS // length)):
            places = positions[first : first + step]
            rows, hidden = places.flatten(), operand(self.hidden[places.flatten()])
            columns = self._labels[rows], self._log_sum[rows], self._factor[rows]
            for start, end in self._shard.blocks:
                weight = operand(self._weight[start:end])
                logits = product(hidden, weight.t()).mul_(self._scale)
                by_logit = logit_gradient(self._shard, (start, end), logits, *columns)
                pair = (factor.float().unflatten(0, places.shape) for factor in (by_logit, hidden))
                total[first : first + step] += outer_squares(*pair)
        return total

    def at_tokens(self, positions: Tensor, tokens: Tensor) -> Tensor:
        """Return the rows of the tokens at the same positions, fp32 [n, L, H]; 0 where another rank has them."""
        hidden, targets = self.hidden[positions].float(), tokens[positions]
        rows = self._shard.blocks[-1][1] if self._shard.blocks else 0
        local = targets - self._shard.first
        is_local = (local >= 0) & (local < rows)
        weight = self._weight[local.clamp(0, self._weight.size(0) - 1)].float()
        logits = (hidden @ weight.mT) * self._scale
        by_logit = (self._labels[positions][..., None] == targets[:, None]).float()
        by_logit -= (logits - self._log_sum[positions][..., None]).exp()
        by_logit *= self._factor[positions][..., None] * is_local[:, None]
        return by_logit.mT @ hidden
