"""FP8 block rounding against loops, against its own promises, and against transformers' dequantisation."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megarl.core.fp8 import dequantize_fp8, quantize_fp8, round_activations, round_through_fp8, round_to_e4m3
from megarl.core.fp8_names import fp8_config, is_fp8_weight
from megarl.data.tiny import write_tiny_model


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense layer between two with experts."""
    sizes = {"hidden_size": 32, "num_experts": 8, "expert_width": 16, "max_positions": 64, "initializer_range": 0.3}
    return write_tiny_model(tmp_path_factory.mktemp("fp8") / "model", dense_layers=(1,), **sizes)


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
    assert not round_through_fp8(weight)[:128].any()
    assert round_through_fp8(weight).isfinite().all()


def activations_by_loops(activations: torch.Tensor) -> torch.Tensor:
    """float32, in numpy but for the cast."""
    tokens = activations.float().reshape(-1, activations.shape[-1]).numpy()
    result = np.zeros_like(tokens)
    for row, token in enumerate(tokens):
        for left in range(0, len(token), 128):
            group = token[left : left + 128]
            scale = np.float32(max(np.abs(group).max(), np.float32(1e-10))) / np.float32(448)
            codes = torch.from_numpy(np.clip(group / scale, -448, 448)).to(torch.float8_e4m3fn)
            result[row, left : left + 128] = codes.float().numpy() * scale
    return torch.from_numpy(result).reshape(activations.shape)


@pytest.mark.parametrize("shape", [(4, 256), (2, 3, 200), (5, 64), (1, 129), (7,), (0, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_activations_equal_loops_over_groups(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    activations = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    activations[..., :64] *= 1000  # beyond e4m3's range, and groups of different scale
    activations = activations.to(dtype)
    assert torch.equal(round_activations(activations), activations_by_loops(activations))
    strided = torch.stack([activations, -activations], dim=-1)[..., 0]
    assert torch.equal(round_activations(strided), round_activations(activations))


def test_activations_that_are_tiny_or_not_finite() -> None:
    activations = torch.zeros(3, 128)
    activations[1, 3] = 1e-12  # below SGLang's floor: 4.48 of 448 steps
    activations[2, :2] = torch.tensor([torch.inf, 1.0])
    rounded = round_activations(activations)
    assert torch.equal(rounded[0], torch.zeros(128))
    assert rounded[1, 3] == pytest.approx(4.5 * 1e-10 / 448, rel=1e-5, abs=0)
    assert rounded[2].isnan().all()  # as 0 * inf in a kernel; nothing hides an overflow
    activations[2, 0] = torch.nan
    assert round_activations(activations)[2].isnan().all()


def test_a_cache_saturates() -> None:
    values = torch.tensor([0.0, 1.0, 1.06, 1.07, -300.0, 1e4, -1e9, 2.0**-10, 2.0**-11])
    expected = [0.0, 1.0, 1.0, 1.125, -288.0, 448.0, -448.0, 0.0, 0.0]
    assert round_to_e4m3(values).tolist() == expected
    assert round_to_e4m3(values.bfloat16()).dtype == torch.bfloat16


KERNEL = r"""
import importlib.util, os, pathlib, sys, types
os.environ["TRITON_INTERPRET"] = "1"
import torch, triton.language as tl, triton
source = pathlib.Path(triton.__file__).parents[1] / "sglang/kernels/ops/quantization/fp8_kernel.py"
text = source.read_text().split("\n@triton.jit\n")
kernel = next(part for part in text if part.startswith("def _per_token_group_quant_8bit_colmajor"))
folder = pathlib.Path(sys.argv[1])
(folder / "kernel.py").write_text(
    "import triton, triton.language as tl\n@triton.jit\n" + kernel.split("\n\n\ndef ")[0]
)
sys.path.insert(0, str(folder))
from kernel import _per_token_group_quant_8bit_colmajor as quantize
x = torch.load(folder / "x.pt")
# In float32: the interpreter of triton 3.9 casts to e4m3 wrongly where a mantissa carries (127 becomes 64).
q, scale = torch.empty(x.shape), torch.empty(x.shape[1] // 128, len(x)).t()
options = dict(bit8_min=-448.0, bit8_max=448.0, BLOCK=128, SCALE_UE8M0=False)
quantize[(scale.numel(),)](x, q, scale, 128, x.shape[1], scale.stride(1), 1e-10, **options)
torch.save((q, scale), folder / "out.pt")
"""


@pytest.mark.sglang
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_equal_those_of_the_kernel_of_sglang(
    sglang_python: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Its Triton kernel, read from the installed package and run by Triton's interpreter."""
    activations = torch.randn(12, 256, generator=torch.Generator().manual_seed(0))
    activations[3] *= 1e4
    activations[4], activations[5] = 0.0, activations[5] * 1e-12
    torch.save(activations.to(dtype), tmp_path / "x.pt")
    subprocess.run([sglang_python, "-c", KERNEL, tmp_path], check=True, capture_output=True)
    values, scale = torch.load(tmp_path / "out.pt")
    expected = values.to(torch.float8_e4m3fn).float().view(12, 2, 128) * scale[..., None]
    assert torch.equal(round_activations(activations.to(dtype)), expected.view(12, 256))


@pytest.mark.parametrize("shape", [(5, 64, 32), (2, 3, 130, 200), (3, 300, 999), (1, 1, 129), (1, 129, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_stack_is_its_matrices_bit_for_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Also in several pieces, and against torch's own cast to e4m3, which signs its zeros."""
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    stack = (stack * torch.logspace(-3, 2, shape[-1])).to(dtype)
    rounded, (codes, scales) = round_through_fp8(stack), quantize_fp8(stack)
    assert (rounded.dtype, codes.dtype, scales.dtype) == (dtype, torch.float8_e4m3fn, torch.float32)
    assert codes.is_contiguous()  # safetensors asks for it
    rows = zip(*(t.flatten(0, -3) for t in (stack, rounded, codes, scales)), strict=True)
    for matrix, its_rounded, its_codes, its_scales in rows:
        spread = its_scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[-2], : shape[-1]]
        expected = (matrix.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(its_codes.view(torch.uint8), expected.view(torch.uint8))
        expected = (expected.float() * spread).to(dtype)
        assert torch.equal(its_rounded.view(torch.uint8), expected.view(torch.uint8))
        for top, left in ((top, left) for top in range(0, shape[-2], 128) for left in range(0, shape[-1], 128)):
            largest = matrix[top : top + 128, left : left + 128].float().abs().max()
            assert its_scales[top // 128, left // 128] == largest / 448
        assert torch.equal(dequantize_fp8(*quantize_fp8(matrix.float())).to(dtype), its_rounded)
    with pytest.raises(ValueError, match="matrix"):
        round_through_fp8(torch.zeros(4))


def test_a_cache_rounds_as_the_cast_does_at_every_tie_and_code() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()].sort().values
    halves = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, halves, halves.nextafter(codes[1:]), halves.nextafter(codes[:-1])])
    values = torch.cat([values, torch.tensor([-0.0, 1e-30, -1e-30, 1e-45, torch.nan])])
    found, expected = round_to_e4m3(values), values.to(torch.float8_e4m3fn).float()
    assert torch.equal(found.nan_to_num(7.0).view(torch.int32), expected.nan_to_num(7.0).view(torch.int32))


def test_which_weights_are_rounded(model_path: Path) -> None:
    names = load_file(model_path / "model.safetensors")
    high = {name for name in names if not is_fp8_weight(name)}
    expected = {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"}
    for layer in range(3):
        norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
        expected |= {f"model.layers.{layer}.{norm}.weight" for norm in norms}
    expected |= {"model.layers.0.mlp.gate.weight", "model.layers.2.mlp.gate.weight"}  # layer 1 is dense
    assert high == expected
    assert not is_fp8_weight("model.layers.61.eh_proj.weight")


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
    high = ["lm_head", "model.layers.0.mlp.gate", "model.layers.2.mlp.gate"]
    config["quantization_config"] = fp8_config(high, (128, 128))
    (tmp_path / "config.json").write_text(json.dumps(config))

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    projection = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(loaded[projection], round_through_fp8(weights[projection]).bfloat16())
    fused = loaded["model.layers.2.mlp.experts.gate_up_proj"]
    for expert in range(8):
        name = f"model.layers.2.mlp.experts.{expert}.{{}}.weight"
        gate, up = (round_through_fp8(weights[name.format(part)]).bfloat16() for part in ("gate_proj", "up_proj"))
        assert torch.equal(fused[expert], torch.cat([gate, up]))
