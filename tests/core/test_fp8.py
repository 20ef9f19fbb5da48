"""FP8 block rounding against loops, against its own promises, and against transformers' dequantisation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megarl.core.fp8 import dequantize_fp8, is_fp8_weight, quantize_fp8, round_through_fp8
from megarl.data.tiny import write_tiny_model


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense layer between two with experts."""
    sizes = {"hidden_size": 32, "num_experts": 8, "expert_width": 16, "max_positions": 64, "initializer_range": 0.3}
    return write_tiny_model(tmp_path_factory.mktemp("fp8") / "model", dense_layers=(1,), **sizes)


def rounded_by_loops(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    result = torch.zeros_like(weight)
    for top in range(0, weight.shape[0], block[0]):
        for left in range(0, weight.shape[1], block[1]):
            where = (slice(top, top + block[0]), slice(left, left + block[1]))
            scale = max(weight[where].abs().max().item(), 1e-12) / 448.0
            scale = torch.tensor(scale, dtype=torch.float32)
            result[where] = (weight[where] / scale).to(torch.float8_e4m3fn).float() * scale
    return result


@pytest.mark.parametrize("shape", [(128, 128), (64, 32), (256, 384), (200, 300), (1, 129), (129, 1)])
def test_equals_loops_over_blocks(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[: shape[0] // 2] *= 30.0  # blocks of different scale
    torch.testing.assert_close(round_through_fp8(weight), rounded_by_loops(weight, (128, 128)), rtol=1e-6, atol=0)
    quantized, scale = quantize_fp8(weight)
    assert quantized.shape == shape
    assert quantized.dtype == torch.float8_e4m3fn
    assert quantized.is_contiguous()  # safetensors asks for it
    assert torch.equal(dequantize_fp8(quantized, scale), round_through_fp8(weight))
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    assert scale.dtype == torch.float32


def test_other_block_sizes() -> None:
    weight = torch.randn(50, 70, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        round_through_fp8(weight, (16, 32)), rounded_by_loops(weight, (16, 32)), rtol=1e-6, atol=0
    )


def test_relative_error_of_normal_weights() -> None:
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)) * 0.02
    error = ((round_through_fp8(weight) - weight).norm() / weight.norm()).item()
    assert 0.024 < error < 0.028


def test_representable_values_are_exact() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()]  # all 254 finite values, 448 among them: the scale is a power of two
    weight = codes.reshape(2, 127) * 2.0**-9
    assert torch.equal(round_through_fp8(weight), weight)
    assert torch.equal(round_through_fp8(weight.bfloat16()), weight.bfloat16())


def test_idempotent() -> None:
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(1))
    once, codes = round_through_fp8(weight), quantize_fp8(weight)[0]
    assert torch.equal(quantize_fp8(once)[0].view(torch.uint8), codes.view(torch.uint8))
    torch.testing.assert_close(round_through_fp8(once), once, rtol=3e-7, atol=0)


def test_zero_and_tiny_blocks_stay_finite() -> None:
    weight = torch.zeros(256, 128)
    weight[128:] = 1e-40  # subnormal
    rounded = round_through_fp8(weight)
    assert torch.equal(rounded[:128], torch.zeros(128, 128))
    assert rounded.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keeps_the_dtype_and_rounds_in_fp32(dtype: torch.dtype) -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    rounded = round_through_fp8(weight)
    assert rounded.dtype == dtype
    assert torch.equal(rounded, dequantize_fp8(*quantize_fp8(weight.float())).to(dtype))


def test_refuses_what_is_no_matrix() -> None:
    with pytest.raises(ValueError, match="matrix"):
        round_through_fp8(torch.zeros(2, 3, 4))


def test_which_weights_are_rounded(model_path: Path) -> None:
    names = load_file(model_path / "model.safetensors")
    high = {name for name in names if not is_fp8_weight(name)}
    expected = {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"}
    for layer in range(3):
        norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
        expected |= {f"model.layers.{layer}.{norm}.weight" for norm in norms}
    expected |= {"model.layers.0.mlp.gate.weight", "model.layers.2.mlp.gate.weight"}  # layer 1 is dense
    assert high == expected


def test_transformers_reads_the_same_values_from_an_fp8_checkpoint(model_path: Path, tmp_path: Path) -> None:
    shutil.copytree(model_path, tmp_path, dirs_exist_ok=True)
    weights = load_file(model_path / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if is_fp8_weight(name):
            stored[name], stored[f"{name}_scale_inv"] = quantize_fp8(weight)
        else:
            stored[name] = weight.bfloat16()
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.2.mlp.gate"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    projection = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(loaded[projection], round_through_fp8(weights[projection]).bfloat16())
    fused = loaded["model.layers.2.mlp.experts.gate_up_proj"]
    for expert in range(8):
        name = f"model.layers.2.mlp.experts.{expert}.{{}}.weight"
        gate, up = (round_through_fp8(weights[name.format(part)]).bfloat16() for part in ("gate_proj", "up_proj"))
        assert torch.equal(fused[expert], torch.cat([gate, up]))
