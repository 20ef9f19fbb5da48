"""Cases that run on several ranks: the softmax over a vocabulary that is split between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from tiny_world import config, join

from megarl.megatron.forward import vocab_parallel_logprobs

NUM_ROWS = 9


def vocabulary(layout: dict[str, int], vocab_size: int, padded: int, temperature: float) -> dict[str, Any]:
    """Log-probabilities, entropies and the gradient of a weighted sum, with torch's float64 log_softmax beside them."""
    join(config(Path("unused"), layout))
    group = parallel_state.get_tensor_model_parallel_group()
    generator = torch.Generator().manual_seed(5)
    whole = 4.0 * torch.randn(NUM_ROWS, padded, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocab_size, (NUM_ROWS,), generator=generator)
    labels[:2] = torch.tensor([0, vocab_size - 1])
    weights = torch.randn(NUM_ROWS, generator=generator, dtype=torch.float64)

    shard = whole.float().chunk(group.size(), 1)[group.rank()].clone().requires_grad_()
    logprobs, entropies = vocab_parallel_logprobs(shard, labels, temperature, vocab_size, group)
    (logprobs * weights.float()).sum().backward()
    assert shard.grad is not None

    reference = whole[:, :vocab_size].clone().requires_grad_()
    full = torch.log_softmax(reference / temperature, 1)
    picked = full.gather(1, labels[:, None])[:, 0]
    (picked * weights).sum().backward()
    assert reference.grad is not None
    padding = torch.zeros(NUM_ROWS, padded - vocab_size, dtype=torch.float64)
    return {
        "logprobs": logprobs.detach(),
        "expected_logprobs": picked.detach().float(),
        "entropies": entropies,
        "expected_entropies": -(full.exp() * full).sum(1).detach().float(),
        "entropies_have_no_gradient": not entropies.requires_grad,
        "gradient": gather_from_tensor_model_parallel_region(shard.grad, group=group),
        "expected_gradient": torch.cat([reference.grad, padding], 1).float(),
    }
