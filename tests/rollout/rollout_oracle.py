"""Plain transformers forwards as the oracle of the rollout tests, and random requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megarl.core.types import SampleRequest


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
        seen: list[torch.Tensor] = []
        routers = [module for name, module in self.model.named_modules() if name.endswith("mlp.gate")]
        handles = [router.register_forward_hook(lambda m, a, out: seen.append(out[2])) for router in routers]
        self.logits(tokens)
        for handle in handles:
            handle.remove()
        return torch.stack(seen, dim=1).numpy()


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
