"""The kernels of ``linear_logprobs`` in Triton's interpreter, and beside them the block version on the same numbers.

    TRITON_INTERPRET=1 python cases_logprob_kernels.py STORE RANK OUT

Two processes run; each case is computed by the ranks that it names, and OUT gets {case: {version: columns}}.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from cuda_refusals import RefusesAsCuda, SaysCuda

from megarl.megatron.passes import logprob_kernels, logprobs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIDTH = 12


@dataclass(frozen=True)
class Case:
    tokens: int = 21
    vocab: int = 301
    padding: int = 19
    """Rows of the weight beyond the vocabulary."""
    dtype: torch.dtype = FP32
    entropy: bool = False
    kept: bool = False
    ranks: int = 1
    temperature: float = 0.7
    spread: float = 1.0
    """Of the logits."""
    shape: tuple[int, int] = (8, 128)
    """Rows and columns of a block."""


CASES = {
    "log-probabilities": Case(),
    "entropies": Case(entropy=True),
    "kept sets": Case(kept=True),
    "kept sets and entropies": Case(kept=True, entropy=True),
    "bf16": Case(dtype=BF16, entropy=True),
    "bf16, kept sets": Case(dtype=BF16, entropy=True, kept=True),
    "fp16": Case(dtype=FP16),
    "one block": Case(shape=(64, 1024), entropy=True),
    "no padding, whole blocks": Case(tokens=16, vocab=256, padding=0, entropy=True),
    "one token": Case(tokens=1, vocab=5, padding=0, entropy=True),
    "extreme logits": Case(spread=50.0, entropy=True, kept=True),
    "two ranks": Case(ranks=2, entropy=True),
    "two ranks, kept sets": Case(ranks=2, entropy=True, kept=True),
    "two ranks, one has only padding": Case(ranks=2, vocab=100, padding=140, entropy=True),
}


def sets_of(labels: torch.Tensor, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a tenth of the vocabulary in random order; the third is empty, the fourth is without its label."""
    generator = torch.Generator().manual_seed(1)
    ids = []
    for row, label in enumerate(labels.tolist()):
        others = torch.randperm(vocab, generator=generator)[: max(1, vocab // 10)].tolist()
        chosen = [one for one in others if one != label] + [label] * (row != 3)
        order = torch.randperm(len(chosen), generator=generator).tolist()
        ids.append([] if row == 2 else [chosen[place] for place in order])
    offsets = torch.tensor([0, *map(len, ids)]).cumsum(0)
    return torch.tensor([one for row in ids for one in row], dtype=torch.int32), offsets


def columns_of(case: Case, group: Any) -> dict[str, torch.Tensor]:
    """Log-probabilities, entropies, this rank's gradients; a quarter of the tokens has the coefficient 0."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(case.tokens, WIDTH, generator=generator).to(case.dtype)
    whole = (case.spread * torch.randn(case.vocab + case.padding, WIDTH, generator=generator)).to(case.dtype)
    labels = torch.randint(0, case.vocab, (case.tokens,), generator=generator)
    # At both ends, behind the first block, and behind the first rank's rows.
    ends = torch.tensor([0, case.vocab - 1, case.shape[1], (case.vocab + case.padding) // 2])
    labels[4:8] = torch.minimum(ends, torch.tensor(case.vocab - 1))[: max(0, case.tokens - 4)]
    coefficients, of_entropy = torch.randn(2, case.tokens, generator=generator)
    coefficients[::4] = 0.0
    weight = whole.chunk(case.ranks)[dist.get_rank() if group else 0].clone().requires_grad_()
    hidden.requires_grad_()
    kept = sets_of(labels, case.vocab) if case.kept else None
    with SaysCuda(case.dtype != FP32), RefusesAsCuda():
        found, entropies = logprobs.linear_logprobs(hidden, weight, labels, case.temperature, case.vocab, group, kept)
        terms = torch.where(coefficients != 0, found, 0.0) * coefficients
        terms = torch.where(found.isneginf(), 0.0, terms)
        (terms.sum() + (of_entropy * entropies).sum() * case.entropy).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return {
        "logprobs": found.detach(),
        "entropies": entropies.detach(),
        "hidden_gradient": hidden.grad,
        "weight_gradient": weight.grad,
    }


def main(store: str, rank: int, out: str) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=280)
    )
    logprob_kernels.FOLD = logprob_kernels.BY_LOGIT = (32, 4)  # less than a block has columns
    logprob_kernels.ENTRIES = 8
    results = {}
    for name, case in CASES.items():
        if rank >= case.ranks:
            continue
        logprobs.fused_shape = lambda rows, columns, shape=case.shape: shape
        logprobs.ROWS, logprobs.COLUMNS = case.shape
        results[name] = {}
        for version, kernels in (("blocks", None), ("kernels", logprob_kernels)):
            logprobs.kernels_for = lambda device, kernels=kernels: kernels
            results[name][version] = columns_of(case, dist.group.WORLD if case.ranks == 2 else None)
    torch.save(results, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
