"""From logits to tokens: the sampling distribution, and a draw that depends on the request's seed alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from megarl.errors import NumericsError, RolloutError


def sampling_logprobs(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Log-probabilities of the sampling distribution.

    ``log_softmax(logits / temperature)``; for ``top_p < 1`` restricted to the nucleus, the smallest set of most likely
    tokens with mass >= top_p, and renormalised (equally likely tokens: the lower id first). Outside of the nucleus the
    value is -inf.

    ``logits`` [B, V] of any floating dtype, ``temperature > 0``; returns float32 [B, V] (float64 for float64 logits).
    Raises NumericsError if a row has a NaN, an infinite logit, or no finite logit. Source of the nucleus: Holtzman et
    al. 2020, section 3.1.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    logprobs = torch.log_softmax(wide if temperature == 1.0 else wide / temperature, dim=-1)
    if math.isnan(logprobs[:, 0].sum()):  # the sum of a bad row is NaN, and so are its log-probabilities
        bad = int(logprobs[:, 0].isnan().sum())
        raise NumericsError(
            f"logits of {bad} of {len(logits)} sequences are not finite while sampling: look at the weights that were "
            "sent to the engine"
        )
    if top_p < 1.0:
        ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
        mass = ordered.double().exp()
        in_nucleus = mass.cumsum(dim=-1) - mass < top_p  # the mass before the token; always true for the first token
        nucleus = torch.zeros_like(in_nucleus).scatter_(-1, order, in_nucleus)
        logprobs = torch.where(nucleus, logprobs, float("-inf"))
        logprobs = logprobs - logprobs.logsumexp(dim=-1, keepdim=True)
    return logprobs


def draw(logprobs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draws one token per row by inverting the cumulative distribution: the first token with ``cdf > u``.

    ``logprobs`` [B, V], ``uniforms`` float64 [B] in [0, 1); returns int64 [B]. The sum runs in float64, and a token of
    probability 0 is never drawn.
    """
    cdf = logprobs.double().exp().cumsum(dim=-1)
    # Less than the total: u <= 1 - 2**-53 takes away at least half of the distance to the next smaller number.
    target = uniforms[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, target, right=True)[:, 0]


class Noise:
    """Uniform numbers for a batch of requests: number ``t`` of a request is a function of its seed and ``t`` alone.

    Philox is a counter-based generator, so that the seeds 0, 1, 2, ... give independent streams (Salmon et al. 2011).
    """

    _MAX_CHUNK = 256
    """Numbers drawn per request at a time; bounds the memory of long responses."""

    def __init__(self, seeds: Sequence[int], num_steps: int) -> None:
        for seed in (min(seeds), max(seeds)):
            if not 0 <= seed < 2**128:
                raise RolloutError(f"seed of a request is {seed}, expected 0 <= seed < 2**128")
        self._streams = [np.random.Generator(np.random.Philox(key=seed)) for seed in seeds]
        self._chunk = min(num_steps, self._MAX_CHUNK)
        self._numbers = np.empty((self._chunk, len(seeds)))
        self._first_step = -self._chunk

    def at(self, step: int, rows: np.ndarray) -> torch.Tensor:
        """Uniforms float64 [len(rows)] of the requests ``rows`` for token ``step``; ValueError for a step before the
        last chunk."""
        if step < self._first_step:
            raise ValueError(f"noise for step {step} asked for after step {self._first_step}")
        while step >= self._first_step + self._chunk:
            self._first_step += self._chunk
            self._numbers = np.stack([stream.random(self._chunk) for stream in self._streams], axis=1)
        return torch.from_numpy(self._numbers[step - self._first_step][rows])
