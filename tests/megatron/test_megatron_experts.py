"""The experts of a layer computed together, beside Megatron's own loop over them: the same numbers, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from tiny_world import config, join

from megarl.megatron.policy import Policy, schedule_of
from megarl.stand_ins.experts import join_experts

pytestmark = pytest.mark.usefixtures("one_rank")


def layers_of(model: Path, dtype: str = "fp32", **overrides: Any) -> tuple[Policy, list[SequentialMLP]]:
    settings = config(model, model__dtype=dtype, **overrides)
    join(settings)
    policy = Policy(settings, schedule_of(settings))
    return policy, [one for chunk in policy.chunks for one in chunk.modules() if isinstance(one, SequentialMLP)]


def inputs(layer: SequentialMLP, counts: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(counts))
    weight = layer.local_experts[0].linear_fc1.weight
    hidden = torch.randn(sum(counts), weight.size(1), generator=generator).to(weight.dtype).requires_grad_()
    return [hidden, torch.tensor(counts), torch.rand(sum(counts), generator=generator).requires_grad_()]


def weights_of(layer: SequentialMLP) -> list[torch.Tensor]:
    return [part.weight for one in layer.local_experts for part in (one.linear_fc1, one.linear_fc2)]


def gradients(layer: SequentialMLP, output: torch.Tensor, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of the inputs and the weights, wherever a pass leaves them."""
    weights = weights_of(layer)
    for weight in weights:
        weight.main_grad.zero_()  # type: ignore[attr-defined]
    factor = torch.linspace(-1, 1, output.numel()).view_as(output).to(output.dtype)
    (output * factor).sum().backward()
    found = [given[0].grad, given[2].grad, *(weight.main_grad.clone() for weight in weights)]  # type: ignore[attr-defined]
    given[0].grad = given[2].grad = None
    assert all(one is not None for one in found)
    return found  # type: ignore[return-value]


def counts_for(layer: SequentialMLP, pattern: str) -> list[int]:
    number = len(layer.local_experts)
    if pattern == "even":
        return [5] * number
    if pattern == "none":
        return [0] * number
    return [(7 * index) % 5 for index in range(number - 1)] + [0]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pattern", ["even", "uneven", "none"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_outputs_and_gradients_are_those_of_the_experts_one_by_one(
    dtype: str, pattern: str, overlap: bool, models: dict[str, Path]
) -> None:
    policy, layers = layers_of(models["base"], dtype, megatron={"overlap_grad_reduce": overlap})
    assert layers
    for layer in layers:
        assert vars(layer)["forward"].args[1].linear_fc1.adds is not overlap  # hooks say when a gradient is ready
        given = inputs(layer, counts_for(layer, pattern))
        with policy.chunks[0].no_sync():  # there are two backward passes
            together, no_bias = layer(*given)
            assert no_bias is None
            found = gradients(layer, together, given)
            one_by_one, _ = SequentialMLP.forward(layer, *given)  # type: ignore[arg-type]
            expected = gradients(layer, one_by_one, given)
        assert torch.equal(together, one_by_one)
        for mine, wanted in zip(found, expected, strict=True):
            assert torch.equal(mine, wanted)


def test_gradients_of_several_micro_batches_add_up(models: dict[str, Path]) -> None:
    _, (layer, *_) = layers_of(models["base"])
    number = len(layer.local_experts)
    parts = [inputs(layer, [size] * number) for size in (3, 4)]
    alone = [gradients(layer, layer(*given)[0], given)[2:] for given in parts]
    for weight in weights_of(layer):
        weight.main_grad.zero_()  # type: ignore[attr-defined]
    for given in parts:
        output = layer(*given)[0]
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    for weight, first, second in zip(weights_of(layer), *alone, strict=True):
        torch.testing.assert_close(weight.main_grad, first + second, rtol=1e-5, atol=1e-6)  # type: ignore[attr-defined]


def test_frozen_experts_get_no_gradient(models: dict[str, Path]) -> None:
    _, (layer, *_) = layers_of(models["base"])
    for weight in weights_of(layer):
        weight.requires_grad_(False)
        weight.main_grad.zero_()  # type: ignore[attr-defined]
    given = inputs(layer, [2] * len(layer.local_experts))
    layer(*given)[0].sum().backward()
    assert given[0].grad is not None
    assert not any(weight.main_grad.any() for weight in weights_of(layer))  # type: ignore[attr-defined]


def test_one_frozen_expert_gets_no_gradient_beside_others(models: dict[str, Path]) -> None:
    _, (layer, *_) = layers_of(models["base"])
    given = inputs(layer, [2] * len(layer.local_experts))
    frozen, trained = (layer.local_experts[index].linear_fc1.weight for index in (0, 1))
    frozen.requires_grad_(False)
    for weight in (frozen, trained):
        weight.main_grad.zero_()  # type: ignore[attr-defined]
    layer(*given)[0].sum().backward()
    assert not frozen.main_grad.any(), "the optimizer would train it"  # type: ignore[attr-defined]
    assert trained.main_grad.any()  # type: ignore[attr-defined]


def test_modules_with_a_hook_are_called_one_by_one(models: dict[str, Path]) -> None:
    _, (layer, *_) = layers_of(models["base"])
    given = inputs(layer, [2] * len(layer.local_experts))
    plain = layer(*given)[0]
    seen: list[int] = []
    handle = layer.local_experts[1].linear_fc2.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    assert torch.equal(layer(*given)[0], plain)
    handle.remove()
    assert seen == [2]


@pytest.mark.parametrize("setting", ["add_bias_linear", "moe_apply_probs_on_input", "fp8", "fp4"])
def test_experts_that_are_more_than_two_products_stay_megatrons(setting: str, models: dict[str, Path]) -> None:
    policy, layers = layers_of(models["base"])
    for layer in layers:
        del layer.forward
        setattr(layer.config, setting, True)
    for chunk in policy.chunks:
        join_experts(chunk, adds_gradients=True)
    assert all("forward" not in vars(layer) for layer in layers)
