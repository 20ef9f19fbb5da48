"""What the loss layer does with a block of logits on a GPU: its launches, and its passes over the logits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.megatron.passes import blocks, logprobs

pytestmark = pytest.mark.gate
ROWS, HIDDEN, VOCABULARY, BLOCK = 512, 64, 4_000, 1_024
PRODUCTS = ("mm", "addmm")


class Passes(TorchDispatchMode):
    """Counts products, kernels of Triton, and bytes of logits that other operations read or write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.logit_bytes = 0
        monkeypatch.setattr("triton.runtime.jit.JITFunction.run", self._launch)

    def _launch(self, *tensors: Any, grid: Any, **_: Any) -> None:
        logits, stride, *rest = tensors
        name = "by_logit" if isinstance(rest[0], torch.Tensor) else "fold"
        self.launches[name] += 1
        assert grid == (logits.size(0),)
        assert stride == logits.stride(0)
        self.logit_bytes += logits.numel() * 4
        if name == "by_logit":  # written over the logits, in 16 bits
            assert rest[0].data_ptr() == logits.data_ptr()
            self.logit_bytes += logits.numel() * rest[0].element_size()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name in PRODUCTS:
            self.launches[name] += 1
        elif not func.is_view and name not in ("empty", "empty_strided"):
            tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
            self.logit_bytes += sum(x.numel() * x.element_size() for x in tensors if x.numel() >= ROWS * BLOCK)
        return result


def test_a_block_is_passed_over_once_forward_and_once_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "FUSED_BYTES", ROWS * BLOCK * 4)
    hidden = torch.empty(ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(VOCABULARY, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(ROWS, device="cuda", dtype=torch.int64)
    with Passes(monkeypatch) as passes:
        values, entropies = logprobs.linear_logprobs(hidden, weight, labels, 0.7, VOCABULARY)
        (values + 0.1 * entropies).sum().backward()
    num_blocks = -(-VOCABULARY // BLOCK)
    assert passes.launches["fold"] == passes.launches["by_logit"] == num_blocks
    # The logits twice, their products with the weight and with the states.
    assert sum(passes.launches[name] for name in PRODUCTS) == 4 * num_blocks
    logits = ROWS * VOCABULARY * 4
    assert passes.logit_bytes / logits == pytest.approx(2.5), (
        "read once forward; read, and written in 16 bits, backward"
    )
