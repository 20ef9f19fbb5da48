"""A small Qwen3-MoE with a dense layer, and plain transformers forwards of it as the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.core.types import SampleRequest
from megarl.data.tiny import write_tiny_model
from megarl.rollout.local import LocalEngine


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


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A wide initialisation, so that probabilities, routes and positions all differ visibly.
    return write_tiny_model(
        tmp_path_factory.mktemp("rollout") / "model",
        hidden_size=32,
        num_experts=8,
        expert_width=16,
        dense_layers=(1,),
        max_positions=64,
        initializer_range=0.3,
    )


@pytest.fixture(scope="session")
def oracle(model_path: Path) -> Oracle:
    model = AutoModelForCausalLM.from_pretrained(
        model_path, attn_implementation="eager", experts_implementation="eager"
    )
    return Oracle(model.eval())


@pytest.fixture(scope="session")
def engine(model_path: Path) -> LocalEngine:
    """Shared by tests that leave the weights alone."""
    return LocalEngine.from_pretrained(model_path, weight_version=7)


def make_requests(num: int, *, seed: int = 0, lengths: tuple[int, int] = (1, 12), copies: int = 1) -> list:
    """Random prompts of different lengths, ``copies`` responses each."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, 32, rng.integers(lengths[0], lengths[1] + 1), dtype=np.int32) for _ in range(num)]
    return [
        SampleRequest(prompt_tokens=prompt, group=group, sample=sample, seed=1000 * group + sample)
        for group, prompt in enumerate(prompts)
        for sample in range(copies)
    ]
