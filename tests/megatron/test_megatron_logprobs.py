"""What ``linear_logprobs`` may be given: dtypes as a GPU takes them, and what a bf16 policy really hands over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cuda_refusals import RefusesAsCuda, SaysCuda
from tiny_world import config, fixed_coefficients, local_batch, micro_batches, policy_of

from megarl.megatron.passes import forward
from megarl.megatron.passes import logprobs as blocks
from megarl.megatron.passes.logprobs import linear_logprobs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("hidden_dtype", "weight_dtype"), [(FP32, BF16), (FP32, FP16), (BF16, BF16), (FP32, FP32), (BF16, FP32)]
)
@pytest.mark.parametrize("sets", [False, True])
def test_a_gpu_accepts_every_product_and_is_never_waited_for(
    hidden_dtype: torch.dtype, weight_dtype: torch.dtype, sets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "ROWS", 4)
    monkeypatch.setattr(blocks, "COLUMNS", 16)
    torch.manual_seed(0)
    hidden = torch.randn(10, 8, dtype=BF16).to(hidden_dtype).requires_grad_()
    weight = torch.randn(40, 8, dtype=BF16).to(weight_dtype).requires_grad_()
    labels = torch.arange(10) * 4
    labels[-1] = 36
    member = torch.rand(10, 37) < 0.3
    member[range(10), labels] = True
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), member.sum(1).cumsum(0)])
    kept = (member.nonzero()[:, 1].int(), offsets) if sets else None
    with SaysCuda(), RefusesAsCuda() as gpu:
        found, entropies = linear_logprobs(hidden, weight, labels, 0.7, 37, None, kept)
        (found + 0.1 * entropies).sum().backward()
    assert gpu.operands == {weight_dtype} - {FP32}
    logits = hidden.detach().double() @ weight.detach()[:37].double().t() / 0.7
    reference = [one.detach().double().requires_grad_() for one in (hidden, weight)]
    logits = reference[0] @ reference[1][:37].t() / 0.7
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    if kept is not None:
        logits = logits.masked_fill(~member, -torch.inf)
    expected = logits.log_softmax(1)[range(10), labels]
    (expected + 0.1 * entropy).sum().backward()
    torch.testing.assert_close(found.detach(), expected.detach().float())
    for tensor, other in zip((hidden, weight), reference, strict=True):
        assert tensor.grad is not None
        assert other.grad is not None
        assert (tensor.grad.dtype, tensor.grad.shape) == (tensor.dtype, tensor.shape)
        # 16-bit products round the gradient of each logit.
        error = float((tensor.grad - other.grad).norm() / other.grad.norm())
        assert error < (1e-5 if weight_dtype == tensor.dtype == FP32 else 1e-2)


CERTAINTY = torch.tensor([[60.0, 0.0, -60.0], [200.0, 0.0, 0.0]])


@pytest.mark.parametrize("kept", [None, (torch.tensor([1, 0, 0]), torch.tensor([0, 2, 3]))])
def test_gradients_of_certainties_are_finite(kept: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    logits = CERTAINTY.clone().requires_grad_()
    logprobs, entropies = linear_logprobs(logits, torch.eye(3), torch.tensor([0, 0]), 1.0, 3, None, kept)
    (logprobs + entropies).sum().backward()
    torch.testing.assert_close(logprobs.detach(), torch.zeros(2))
    torch.testing.assert_close(logits.grad, torch.zeros(2, 3))


def test_a_far_larger_logit_outside_the_set_changes_nothing() -> None:
    logits = torch.tensor([[1e4, 1.0, 0.0]], requires_grad=True)
    kept = torch.tensor([2, 1], dtype=torch.int32), torch.tensor([0, 2])
    logprobs, _ = linear_logprobs(logits, torch.eye(3), torch.tensor([1]), 1.0, 3, None, kept)
    logprobs.sum().backward()
    expected = float(torch.tensor([1.0, 0.0]).softmax(0)[1])
    assert logprobs.item() == pytest.approx(-0.3132616875, rel=1e-6)
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([0.0, expected, -expected], rel=1e-6)


def test_entropies_cost_nothing_in_the_backward_pass_if_they_get_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("_by_logit", "_by_entropy"):
        original = getattr(blocks, name)
        monkeypatch.setattr(
            blocks, name, lambda *given, name=name, original=original: (calls.append(name), original(*given))[1]
        )
    hidden, weight = torch.randn(3, 8).requires_grad_(), torch.randn(9, 8)
    logprobs, _ = linear_logprobs(hidden, weight, torch.arange(3), 1.0, 9)
    logprobs.sum().backward()
    assert calls == ["_by_logit"]


def test_sets_that_do_not_fit_the_rows_are_refused() -> None:
    hidden, weight, labels, ids = torch.randn(3, 8), torch.randn(9, 8), torch.arange(3), torch.arange(3)
    for offsets in (torch.tensor([0, 1, 3]), torch.tensor([0, 1, 2, 2])):
        with pytest.raises(ValueError, match=r"expected \[4\] for 3 labels and an end at 3"):
            linear_logprobs(hidden, weight, labels, 1.0, 9, None, (ids, offsets))


def test_states_that_were_bf16_give_the_same_numbers_in_either_dtype() -> None:
    torch.manual_seed(0)
    states, weight = torch.randn(9, 8, dtype=BF16), torch.randn(20, 8, dtype=BF16)
    found = []
    for dtype in (BF16, FP32):
        hidden, output = states.to(dtype, copy=True).requires_grad_(), weight.clone().requires_grad_()
        logprobs, entropies = linear_logprobs(hidden, output, torch.arange(9), 0.7, 20)
        (logprobs + 0.1 * entropies).sum().backward()
        assert hidden.grad is not None
        found.append((logprobs.detach(), entropies.detach(), output.grad, hidden.grad.to(BF16)))
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

    monkeypatch.setattr(forward, "linear_logprobs", listen)
    micros = micro_batches(settings, batch)
    forward.run(policy.chunks, micros, temperature=0.8, vocab_size=30, coefficients=fixed_coefficients)
    assert len(handed) == len(micros)
    for hidden, weight in handed:
        assert weight.dtype == BF16
        assert hidden.dtype == FP32
        assert torch.equal(hidden.to(BF16).float(), hidden)
        assert hidden.abs().sum() > 0
