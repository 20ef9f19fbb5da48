"""What ``linear_logprobs`` may be given: dtypes as a GPU takes them, and what a bf16 policy really hands over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_world import coefficients_of, config, local_batch, micro_batches, policy_of
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.core.metrics import Stat
from megarl.core.types import TrainBatch
from megarl.megatron.passes import forward
from megarl.megatron.passes import logprobs as blocks
from megarl.megatron.passes.logprobs import linear_logprobs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class SaysCuda(TorchFunctionMode):
    """Inside, ``is_cuda`` of every tensor is true, so that code takes the path of a GPU with real numbers."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if getattr(function, "__self__", None) is torch.Tensor.is_cuda:
            return True
        return function(*arguments, **(named or {}))


class RefusesAsCuda(TorchDispatchMode):
    """Matrix products as CUDA has them, and an error for what makes the host wait for the device."""

    WAITS = ("aten.nonzero.default", "aten._local_scalar_dense.default", "aten.masked_select.default")

    def __init__(self) -> None:
        super().__init__()
        self.operands: set[torch.dtype] = set()
        """Of the products that add 16-bit numbers up in fp32."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        indices = [index for index in arguments[1] if index is not None] if "aten.index" in str(function) else []
        if str(function) in self.WAITS or any(index.dtype == torch.bool for index in indices):
            raise AssertionError(f"{function} makes the host wait for the GPU")
        if str(function).startswith("aten.mm."):
            left, right = arguments[:2]
            if left.dtype != right.dtype:
                raise RuntimeError(f"expected m1 and m2 to have the same dtype: {left.dtype} != {right.dtype}")
            if str(function) == "aten.mm.dtype":
                self.operands.add(left.dtype)
                assert arguments[2] == FP32
                return torch.mm(left.float(), right.float())
        return function(*arguments, **named)


@pytest.mark.parametrize(
    ("hidden_dtype", "weight_dtype"), [(FP32, BF16), (FP32, FP16), (BF16, BF16), (FP32, FP32), (BF16, FP32)]
)
def test_a_gpu_accepts_every_product_and_is_never_waited_for(
    hidden_dtype: torch.dtype, weight_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "ROWS", 4)
    monkeypatch.setattr(blocks, "COLUMNS", 16)
    torch.manual_seed(0)
    hidden = torch.randn(10, 8, dtype=BF16).to(hidden_dtype).requires_grad_()
    weight = torch.randn(40, 8, dtype=BF16).to(weight_dtype).requires_grad_()
    labels = torch.arange(10) * 4
    with SaysCuda(), RefusesAsCuda() as gpu:
        found, _ = linear_logprobs(hidden, weight, labels, 0.7, 37)
        found.sum().backward()
    assert gpu.operands == {weight_dtype} - {FP32}
    logits = hidden.detach().double() @ weight.detach()[:37].double().t() / 0.7
    torch.testing.assert_close(found.detach(), logits.log_softmax(1)[range(10), labels].float())
    for tensor in (hidden, weight):
        assert tensor.grad is not None
        assert (tensor.grad.dtype, tensor.grad.shape) == (tensor.dtype, tensor.shape)


def test_states_that_were_bf16_give_the_same_numbers_in_either_dtype() -> None:
    torch.manual_seed(0)
    states, weight = torch.randn(9, 8, dtype=BF16), torch.randn(20, 8, dtype=BF16)
    found = []
    for dtype in (BF16, FP32):
        hidden, output = states.to(dtype, copy=True).requires_grad_(), weight.clone().requires_grad_()
        logprobs, entropies = linear_logprobs(hidden, output, torch.arange(9), 0.7, 20)
        logprobs.sum().backward()
        assert hidden.grad is not None
        found.append((logprobs.detach(), entropies, output.grad, hidden.grad.to(BF16)))
        assert hidden.grad.dtype == dtype  # fp32 states get a gradient that tensor parallelism sums in fp32
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("one_rank")
def test_a_bf16_policy_hands_over_a_bf16_weight_and_states_that_are_bf16_numbers(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float16Module makes fp32 of the hidden states; back to the weight's dtype they lose nothing."""
    settings = config(models["bf16"], model__dtype="bf16")
    policy, batch = policy_of(settings), local_batch()
    handed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def listen(hidden: torch.Tensor, weight: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
        handed.append((hidden, weight))
        return linear_logprobs(hidden, weight, *rest)  # type: ignore[arg-type]

    def coefficients(_: int, columns: TrainBatch, *__: torch.Tensor) -> tuple[torch.Tensor, None, dict[str, Stat]]:
        return coefficients_of(columns), None, {}

    monkeypatch.setattr(forward, "linear_logprobs", listen)
    micros = micro_batches(settings, batch)
    forward.run(policy.chunks, micros, temperature=0.8, vocab_size=30, coefficients=coefficients)
    assert len(handed) == len(micros)
    for hidden, weight in handed:
        assert weight.dtype == BF16
        assert hidden.dtype == FP32
        assert torch.equal(hidden.to(BF16).float(), hidden)
        assert hidden.abs().sum() > 0


@pytest.mark.parametrize("apart", [1.0, 1e-3, 0.0])
def test_the_divergence_of_two_passes_is_that_of_whole_softmaxes(apart: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "ROWS", 4)
    monkeypatch.setattr(blocks, "COLUMNS", 16)
    torch.manual_seed(0)
    first, weight = torch.randn(10, 8), torch.randn(40, 8)
    second = first + apart * torch.randn(10, 8)
    with SaysCuda(), RefusesAsCuda():
        found = blocks.linear_kl(first, second, weight, 0.7, 37)
    p, q = ((states.double() @ weight[:37].double().t() / 0.7).log_softmax(1) for states in (first, second))
    expected = (p.exp() * (p - q)).sum(1)
    torch.testing.assert_close(found, expected.float(), rtol=2e-3 if apart < 1 else 1e-5, atol=0.0)
    assert apart > 0 or not found.any()


def test_the_divergence_of_certainties_is_finite() -> None:
    first = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    found = blocks.linear_kl(first, first.flip(1), 300 * torch.eye(2), 1.0, 2)
    assert torch.isfinite(found).all()
    assert found[0] > 80.0
