"""Cases that run on several ranks: the softmax over a vocabulary that is split between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from tiny_world import config, join

from megarl.megatron.passes.logprobs import linear_logprobs

NUM_ROWS, WIDTH = 9, 6


def vocabulary(layout: dict[str, int], vocab_size: int, padded: int, temperature: float) -> dict[str, Any]:
    """Log-probabilities, entropies and gradients of a weighted sum, with torch's float64 log_softmax beside them."""
    join(config(Path("unused"), layout))
    group = parallel_state.get_tensor_model_parallel_group()
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(NUM_ROWS, WIDTH, generator=generator, dtype=torch.float64)
    whole = 2.0 * torch.randn(padded, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocab_size, (NUM_ROWS,), generator=generator)
    labels[:2] = torch.tensor([0, vocab_size - 1])
    weights = torch.randn(NUM_ROWS, generator=generator, dtype=torch.float64)

    hidden = states.float().requires_grad_()
    shard = whole.float().chunk(group.size())[group.rank()].clone().requires_grad_()
    entering = copy_to_tensor_model_parallel_region(hidden, group=group)
    logprobs, entropies = linear_logprobs(entering, shard, labels, temperature, vocab_size, group)
    (logprobs * weights.float()).sum().backward()
    assert shard.grad is not None

    reference_hidden, reference = states.clone().requires_grad_(), whole.clone().requires_grad_()
    full = torch.log_softmax(reference_hidden @ reference[:vocab_size].t() / temperature, 1)
    picked = full.gather(1, labels[:, None])[:, 0]
    (picked * weights).sum().backward()
    assert reference.grad is not None
    assert reference_hidden.grad is not None
    gathered = gather_from_tensor_model_parallel_region(shard.grad.t().contiguous(), group=group).t()
    return {
        "logprobs": logprobs.detach(),
        "expected_logprobs": picked.detach().float(),
        "entropies": entropies,
        "expected_entropies": -(full.exp() * full).sum(1).detach().float(),
        "entropies_have_no_gradient": not entropies.requires_grad,
        "weight_gradient": gathered,
        "expected_weight_gradient": reference.grad.float(),
        "hidden_gradient": hidden.grad,
        "expected_hidden_gradient": reference_hidden.grad.float(),
    }
