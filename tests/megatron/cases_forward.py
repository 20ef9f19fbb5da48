"""Cases that run on several ranks: the softmax over a vocabulary that is split between them."""

from __future__ import annotations

import itertools
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


def kept_sets(labels: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, offsets): row 0 has none, row 1 its label alone, row 2 lacks its label, row 3 the whole vocabulary."""
    generator = torch.Generator().manual_seed(6)
    sets = []
    for row, label in enumerate(labels.tolist()):
        others = torch.randperm(vocab_size, generator=generator)
        others = others[others != label][: {0: 0, 1: 0, 3: vocab_size}.get(row, 4)]
        own = labels[row : row + 1] if row not in (0, 2) else labels[:0]
        sets.append(torch.cat([others[:2], own, others[2:]]))
    return torch.cat(sets), torch.tensor([0, *map(len, sets)]).cumsum(0)


def vocabulary(
    layout: dict[str, int],
    vocab_size: int,
    padded: int,
    temperature: float,
    entropy: bool = False,
    kept: bool = False,
) -> dict[str, Any]:
    """Log-probabilities, entropies and gradients of a weighted sum, with torch's float64 log_softmax beside them.

    entropy: the sum has the entropies in it too; kept: log-probabilities are of ``kept_sets``.
    """
    join(config(Path("unused"), layout))
    group = parallel_state.get_tensor_model_parallel_group()
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(NUM_ROWS, WIDTH, generator=generator, dtype=torch.float64)
    whole = 2.0 * torch.randn(padded, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocab_size, (NUM_ROWS,), generator=generator)
    labels[:2] = torch.tensor([0, vocab_size - 1])
    weights = torch.randn(NUM_ROWS, generator=generator, dtype=torch.float64)
    entropy_weights = torch.randn(NUM_ROWS, generator=generator, dtype=torch.float64)
    sets = kept_sets(labels, vocab_size) if kept else None

    hidden = states.float().requires_grad_()
    shard = whole.float().chunk(group.size())[group.rank()].clone().requires_grad_()
    entering = copy_to_tensor_model_parallel_region(hidden, group=group)
    logprobs, entropies = linear_logprobs(entering, shard, labels, temperature, vocab_size, group, sets)
    terms = logprobs * weights.float() + (entropies * entropy_weights.float() if entropy else 0.0)
    terms.sum().backward()
    assert shard.grad is not None

    reference_hidden, reference = states.clone().requires_grad_(), whole.clone().requires_grad_()
    logits = reference_hidden @ reference[:vocab_size].t() / temperature
    full = torch.log_softmax(logits, 1)
    expected_entropies = -(full.exp() * full).sum(1)
    masked = full
    if sets is not None:
        member = torch.zeros(logits.shape, dtype=torch.bool)
        for row, (start, end) in enumerate(itertools.pairwise(sets[1].tolist())):
            member[row, sets[0][start:end]] = True
        masked = logits.masked_fill(~member & member.any(1, keepdim=True), -torch.inf).log_softmax(1)
    picked = masked.gather(1, labels[:, None])[:, 0]
    live = torch.where(picked.isneginf(), 0.0, picked)
    (live * weights + (expected_entropies * entropy_weights if entropy else 0.0)).sum().backward()
    assert reference.grad is not None
    assert reference_hidden.grad is not None
    gathered = gather_from_tensor_model_parallel_region(shard.grad.t().contiguous(), group=group).t()
    return {
        "logprobs": logprobs.detach(),
        "expected_logprobs": picked.detach().float(),
        "entropies": entropies.detach(),
        "expected_entropies": expected_entropies.detach().float(),
        "weight_gradient": gathered,
        "expected_weight_gradient": reference.grad.float(),
        "hidden_gradient": hidden.grad,
        "expected_hidden_gradient": reference_hidden.grad.float(),
    }
