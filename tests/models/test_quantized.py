"""Quantised checkpoints: names, shapes and bits are those of transformers' dequantised model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import write_family
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, GptOssConfig, GptOssForCausalLM, Mxfp4Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megarl.convert.conversion import to_hf, to_megatron
from megarl.convert.job import Options
from megarl.core.fp8 import quantize_fp8
from megarl.errors import CheckpointError
from megarl.files.hf_config import read_weight_block
from megarl.models.hf_files import HFCheckpoint, copy_model_files

Tensors = dict[str, torch.Tensor]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def octets(*shape: int, high: int = 256) -> torch.Tensor:
    """All values below ``high``, again and again."""
    return (torch.arange(int(np.prod(shape))) * 7 % high).to(torch.uint8).reshape(shape)


def write(folder: Path, tensors: Tensors, quantization: Any, **config: Any) -> Path:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    table = {"model_type": "qwen3_moe", "dtype": "bfloat16", "quantization_config": quantization, **config}
    (folder / "config.json").write_text(json.dumps(table))
    return folder


def fp8(*shape: int) -> torch.Tensor:
    return random(*shape).mul(30).to(torch.float8_e4m3fn)


def by_transformers(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)


def by_bits(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """compressed-tensors' packed INT4, in numpy; the products are rounded once, to bf16."""
    words = codes.numpy().view(np.uint32)
    values = np.stack([(words >> np.uint32(4 * i)) & np.uint32(15) for i in range(8)], -1).astype(np.float32) - 8
    values = values.reshape(len(words), -1)
    spread = np.repeat(scales.float().numpy(), 32, 1)[:, : values.shape[1]]
    return torch.from_numpy(values * spread).bfloat16()


def e8m0(*shape: int) -> torch.Tensor:
    return (octets(*shape, high=12) + 120).view(torch.float8_e8m0fnu)


def compressed(kind: str, bits: int, form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": kind, "num_bits": bits, "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


FP8 = {"quant_method": "fp8", "fmt": "e4m3"}
CHANNEL = compressed("float", 8, "float-quantized", strategy="channel")
INT4 = compressed("int", 4, "pack-quantized", strategy="group", group_size=32)
WHOLE = {**FP8, "weight_block_size": None, "activation_scheme": "static"}
BLOCKS = {**FP8, "weight_block_size": [16, 32]}

CASES: dict[str, tuple[dict[str, Any], str, tuple[str, torch.Tensor], tuple[str, torch.Tensor], Callable[..., Any]]] = {
    # name: (quantization_config, weight, codes, scales, their values)
    "blocks": (BLOCKS, "x.weight", ("x.weight", fp8(32, 64)), ("x.weight_scale_inv", random(2, 2)), by_transformers),
    "powers of two": (
        {**BLOCKS, "scale_fmt": "ue8m0"},
        "x.weight",
        ("x.weight", fp8(32, 64)),
        ("x.weight_scale_inv", e8m0(2, 2)),
        by_transformers,
    ),
    "named scale": (BLOCKS, "x.weight", ("x.weight", fp8(32, 64)), ("x.scale", e8m0(2, 2)), by_transformers),
    "FP4 rows beside FP8 blocks": (
        BLOCKS,
        "x.weight",
        ("x.weight", octets(16, 32).view(torch.int8)),
        ("x.scale", e8m0(16, 2)),
        by_transformers,
    ),
    "mxfp8": (
        {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
        "x.weight",
        ("x.weight", fp8(8, 64)),
        ("x.weight_scale_inv", octets(8, 2, high=255)),
        by_transformers,
    ),
    "one scale": (WHOLE, "x.weight", ("x.weight", fp8(8, 6)), ("x.weight_scale", torch.tensor(0.3)), by_transformers),
    "one scale in a list": (
        WHOLE,
        "x.weight",
        ("x.weight", fp8(8, 6)),
        ("x.weight_scale_inv", torch.tensor([0.3])),
        by_transformers,
    ),
    "stack": (
        BLOCKS,
        "mlp.experts.gate_up_proj",
        ("mlp.experts.gate_up_proj", fp8(3, 32, 64)),
        ("mlp.experts.gate_up_proj_scale_inv", random(3, 2, 2)),
        by_transformers,
    ),
    "stack with one scale each": (
        WHOLE,
        "mlp.experts.down_proj",
        ("mlp.experts.down_proj", fp8(3, 8, 6)),
        ("mlp.experts.down_proj_scale", random(3)),
        lambda codes, scales: by_transformers(codes, scales[:, None, None]),
    ),
    "rows": (
        CHANNEL,
        "x.weight",
        ("x.weight", fp8(8, 6)),
        ("x.weight_scale", random(8, 1).bfloat16()),
        lambda codes, scales: codes.bfloat16() * scales,  # the formula of compressed-tensors
    ),
    "INT4": (
        INT4,
        "x.weight",
        ("x.weight_packed", octets(4, 8 * 4).view(torch.int32)),
        ("x.weight_scale", random(4, 2).bfloat16()),
        by_bits,
    ),
    "INT4 with a small last group": (
        INT4,
        "x.weight",
        ("x.weight_packed", octets(4, 6 * 4).view(torch.int32)),
        ("x.weight_scale", random(4, 2).bfloat16()),
        by_bits,
    ),
    "mxfp4": (
        {"quant_method": "mxfp4"},
        "mlp.experts.gate_up_proj",
        ("mlp.experts.gate_up_proj_blocks", octets(3, 10, 17, 16)),
        ("mlp.experts.gate_up_proj_scales", octets(3, 10, 17, high=255)),  # 255 stands for NaN
        convert_moe_packed_tensors,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_weight_has_the_bits_of_transformers(case: str, tmp_path: Path) -> None:
    quantization, name, codes, scales, value_of = CASES[case]
    others = {
        "norm.weight": random(4).bfloat16(),
        "x.input_scale": torch.tensor(2.0),
        "x.activation_scale": torch.ones(1),
        "self_attn.k_scale": torch.ones(1),
        "x.weight_shape": torch.tensor([4, 64]),
    }
    expected = value_of(codes[1], scales[1])
    assert expected.dtype == torch.bfloat16
    with HFCheckpoint(write(tmp_path, dict([codes, scales]) | others, quantization)) as hf:
        assert hf.names() == {name, "norm.weight"}
        hf.check_values(name)
        assert (hf.shape(name), hf.dtype(name)) == (tuple(expected.shape), torch.bfloat16)
        assert torch.equal(hf.read(name).view(torch.int16), expected.view(torch.int16))
        for index in range(len(expected)):
            rows = slice(index, index + 1)
            assert torch.equal(hf.read(name, rows).view(torch.int16), expected[rows].view(torch.int16))
    small = codes[1][:, :-1] if codes[1].dim() == 2 and scales[1].numel() > 8 else codes[1]
    shape = torch.ones(5, 7, 5, dtype=scales[1].dtype if scales[1].dtype == torch.uint8 else torch.float32)
    problem = r"is \(5, 7, 5\), expected|has dtype .*, expected weights in 16|scale\w* is I64, expected"
    for wrong in ({}, {scales[0]: shape}, {scales[0]: scales[1].long()}):
        with HFCheckpoint(write(tmp_path, {codes[0]: small.contiguous(), **wrong}, quantization)) as hf:
            (found,) = hf.names()
            with pytest.raises(CheckpointError, match=problem):
                hf.check_values(found)


def quantized_model(folder: Path, block: tuple[int, int] | None, **quantization: Any) -> Path:
    """Write a tiny Qwen3-MoE in FP8."""
    write_family(folder, "qwen3_moe")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        codes, scales = quantize_fp8(tensors[name], block or (1 << 20, 1 << 20))
        if quantization.get("scale_fmt"):
            scales = scales.log2().ceil().exp2().to(torch.float8_e8m0fnu)
        tensors |= {name: codes, name + "_scale_inv": scales if block else scales.reshape(())}
        if quantization.get("activation_scheme") == "static" and "self_attn" in name:  # for experts transformers warns
            tensors[name.replace("weight", "activation_scale")] = torch.tensor(1.5)
    config = json.loads((folder / "config.json").read_text())
    return write(folder, tensors, {**FP8, "weight_block_size": block, **quantization}, **config)


def gpt_oss(folder: Path) -> Path:
    """Write a tiny GPT-OSS in MXFP4."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4, "num_attention_heads": 4}
    config = GptOssConfig(num_hidden_layers=2, vocab_size=64, head_dim=16, num_key_value_heads=2, **sizes)
    model = GptOssForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        tensors[name + "_blocks"] = octets(experts, rows, columns // 32, 16)
        tensors[name + "_scales"] = octets(experts, rows, columns // 32, high=10) + 120
    written = json.loads((folder / "config.json").read_text())
    return write(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, **written)


MODELS: dict[str, tuple[Callable[[Path], Path], Any]] = {
    "blocks": (lambda folder: quantized_model(folder, (8, 8)), FineGrainedFP8Config(dequantize=True)),
    "powers of two": (
        lambda folder: quantized_model(folder, (4, 8), scale_fmt="ue8m0"),
        FineGrainedFP8Config(dequantize=True, scale_fmt="ue8m0"),
    ),
    "one scale": (
        lambda folder: quantized_model(folder, None, activation_scheme="static"),
        FineGrainedFP8Config(dequantize=True, weight_block_size=None, activation_scheme="static"),
    ),
    "mxfp4": (gpt_oss, Mxfp4Config(dequantize=True)),
}


def load(folder: Path, **settings: Any) -> Tensors:
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True, **settings
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.state_dict()


@pytest.mark.parametrize("case", MODELS)
def test_a_model_has_the_bits_of_transformers(case: str, tmp_path: Path) -> None:
    make, settings = MODELS[case]
    (whole := tmp_path / "whole").mkdir()
    with HFCheckpoint(folder := make(tmp_path)) as hf:
        tensors = {name: hf.read(name) for name in hf.names()}
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    copy_model_files(folder, whole, None)
    ours, theirs = load(whole), load(folder, quantization_config=settings)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("case", ["blocks", "mxfp4"])
def test_a_conversion_dequantises(case: str, tmp_path: Path) -> None:
    folder = MODELS[case][0](tmp_path)
    to_megatron(folder, tmp_path / "megatron", Options(layers="local"))
    to_hf(tmp_path / "megatron", tmp_path / "back", None, Options())
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    with HFCheckpoint(folder) as source, HFCheckpoint(tmp_path / "back") as back:
        assert source.names() == back.names()
        for name in source.names():
            assert torch.equal(source.read(name), back.stored(name)), name


def test_blocks_of_a_config() -> None:
    block = {"strategy": "block", "block_structure": [128, 64]}
    found = compressed("float", 8, "float-quantized", **block)
    assert read_weight_block({"text_config": {"quantization_config": found}}) == (128, 64)
    assert read_weight_block({"quantization_config": INT4}) == (1, 32)
    groups = {"config_groups": {"experts": INT4["config_groups"]["group_0"], **CHANNEL["config_groups"]}}
    assert read_weight_block({"quantization_config": {**INT4, **groups}}) is None
    for without in ({"quantization_config": WHOLE}, {"quantization_config": CHANNEL}, {}):
        assert read_weight_block(without) is None
