"""Plain transformers forwards as the oracle of the rollout tests, and random requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megarl.core.types import SampleRequest

TIE = 1e-4
"""Of the logits of two experts: a hundred times what two float32 computations differ by."""


@dataclass(frozen=True)
class Oracle:
    """Full uncached forwards of single sequences in transformers' eager implementation."""

    model: Any

    def logits(self, tokens: Sequence[int] | np.ndarray) -> torch.Tensor:
        """float32 [T, V]."""
        with torch.no_grad():
            return self.model(torch.as_tensor(np.asarray(tokens, dtype=np.int64))[None], use_cache=False).logits[0]

    def routes(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """int64 [T, L, K] as the routers return them."""
        return torch.stack([experts for _, _, experts in self._routed(tokens)], dim=1).numpy()

    def gates(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """float32 [T, L, K], the weights beside ``routes``."""
        return torch.stack([weights for _, weights, _ in self._routed(tokens)], dim=1).float().numpy()

    def clear(self, tokens: Sequence[int] | np.ndarray) -> int:
        """How many tokens come before the first for which rounding could decide between two experts.

        Two correct computations may choose another expert there, and differ in all that follows.
        """
        nearest = torch.full((len(tokens),), torch.inf)
        for logits, _, experts in self._routed(tokens):
            best = logits.float().topk(experts.shape[-1] + 1).values
            nearest = torch.minimum(nearest, best[:, -2] - best[:, -1])
        ties = (nearest < TIE).nonzero()
        return int(ties[0]) if len(ties) else len(tokens)

    def _routed(self, tokens: Sequence[int] | np.ndarray) -> list[tuple[torch.Tensor, ...]]:
        """What each router returns: logits [T, E], weights and experts [T, K]."""
        seen: list[tuple[torch.Tensor, ...]] = []
        routers = [module for name, module in self.model.named_modules() if name.endswith("mlp.gate")]
        handles = [router.register_forward_hook(lambda m, a, out: seen.append(out)) for router in routers]
        self.logits(tokens)
        for handle in handles:
            handle.remove()
        return seen


def make_requests(
    num: int, *, seed: int = 0, lengths: tuple[int, int] = (1, 12), copies: int = 1
) -> list[SampleRequest]:
    """Random prompts of different lengths, ``copies`` responses each."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, 32, rng.integers(lengths[0], lengths[1] + 1), dtype=np.int32) for _ in range(num)]
    return [
        SampleRequest(prompt_tokens=prompt, group=group, sample=sample, seed=1000 * group + sample)
        for group, prompt in enumerate(prompts)
        for sample in range(copies)
    ]
