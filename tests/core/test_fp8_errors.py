"""Errors of FP8 blocks against loops, and stripes against the whole."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from megarl.core import fp8
from megarl.core.fp8 import ErrorSum, fp8_config, is_fp8_weight, quantize_by_stripes, quantize_fp8


def some_weight(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Blocks of 16 x 32 of different sizes, one of zeros, and values that come out as 0."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[: shape[0] // 2] *= 30.0
    weight[:16, :32] = 0.0
    weight[16:17, :5] = 1e-7
    return weight.to(dtype)


def errors_by_loops(weight: torch.Tensor, block: tuple[int, int]) -> dict[str, float]:
    quantized, scale = quantize_fp8(weight, block)
    before = weight.double().numpy()
    codes = quantized.double().numpy()
    found = {"squares": 0.0, "squared_errors": 0.0, "max": 0.0, "of_block": 0.0, "flushed": 0, "zero": 0}
    tops, lefts = range(0, weight.shape[0], block[0]), range(0, weight.shape[1], block[1])
    for top, left in itertools.product(tops, lefts):
        where = (slice(top, top + block[0]), slice(left, left + block[1]))
        after = codes[where] * float(scale[top // block[0], left // block[1]])
        error = np.abs(after - before[where])
        largest = np.abs(before[where]).max()
        found["squares"] += (before[where] ** 2).sum()
        found["squared_errors"] += (error**2).sum()
        found["max"] = max(found["max"], error.max())
        found["of_block"] = max(found["of_block"], error.max() / largest if largest else 0.0)
        found["flushed"] += int(((codes[where] == 0) & (before[where] != 0)).sum())
        found["zero"] += largest == 0
    return found


@pytest.mark.parametrize("shape", [(64, 96), (50, 70), (7, 9), (33, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stripes_are_the_whole_and_errors_are_those_of_loops(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "_STRIPE_VALUES", 1500)  # one block row each, or all rows
    weight, block, errors = some_weight(shape, dtype), (16, 32), ErrorSum((16, 32))
    quantized, scale = quantize_by_stripes(weight, block, errors)
    wanted, wanted_scale = quantize_fp8(weight, block)
    assert torch.equal(quantized.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scale, wanted_scale)
    found, expected = errors.total(), errors_by_loops(weight, block)
    norms = expected["squared_errors"] / expected["squares"] if expected["squares"] else 0.0
    assert found.relative_error == pytest.approx(norms**0.5, rel=1e-5)
    assert found.max_error == pytest.approx(expected["max"], rel=1e-5)
    assert found.max_error_of_block == pytest.approx(expected["of_block"], rel=1e-5)
    assert found.underflow == expected["flushed"] / weight.numel()
    assert found.num_zero_blocks == expected["zero"] > 0
    assert found.num_saturated == 0
    if shape[0] > 16:
        assert found.underflow > 0


def test_a_scale_that_is_too_small_is_counted() -> None:
    weight = some_weight((64, 64))
    quantized, scale = quantize_fp8(weight, (16, 32))
    errors = ErrorSum((16, 32))
    errors.add(weight, quantized, scale / 2)
    assert errors.total().num_saturated > 0


def test_what_an_fp8_config_says() -> None:
    config = fp8_config(["lm_head"], (16, 32))
    assert config["quant_method"] == "fp8"
    assert config["weight_block_size"] == [16, 32]
    assert config["modules_to_not_convert"] == ["lm_head"]


def test_the_projection_of_a_prediction_layer_stays() -> None:
    assert not is_fp8_weight("model.layers.61.eh_proj.weight")
    assert is_fp8_weight("model.layers.61.self_attn.o_proj.weight")
