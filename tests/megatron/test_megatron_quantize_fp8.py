"""FP8 checkpoints as transformers reads them, from Hugging Face and from Megatron, whole blocks and ragged ones."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_worlds import BLOCK, FAMILIES, matrices, rounded_by_loops, write_family, write_plain
from safetensors.torch import load_file, save_file
from tiny_world import safetensors_of
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from megarl.convert.job import Options
from megarl.convert.quantization import Quantized, quantize
from megarl.core.fp8 import is_fp8_weight
from megarl.errors import ConfigError
from megarl.models.hf_files import HFCheckpoint


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {family: write_family(family, folder / family) for family in FAMILIES}


def quantized(source: Path, out: Path, **settings: Any) -> Quantized:
    return quantize(source, out, Options(**{"block": BLOCK, **settings}))


def loaded(folder: Path, dtype: torch.dtype, **settings: Any) -> dict[str, torch.Tensor]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True, **settings)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_rounded_weights_bit_for_bit(
    family: str, dtype: torch.dtype, families: dict[str, Path], tmp_path: Path
) -> None:
    source = families[family] if dtype == torch.float32 else write_family(family, tmp_path / "source", dtype)
    done = quantized(source, tmp_path / "fp8", shard_bytes=10_000)
    assert done.num_files > 1
    weights = load_file(source / "model.safetensors")
    rounded = {name: rounded_by_loops(one) if is_fp8_weight(name) else one for name, one in weights.items()}
    (tmp_path / "rounded").mkdir()
    save_file(rounded, tmp_path / "rounded" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "rounded" / "config.json").write_text((source / "config.json").read_text())

    settings = FineGrainedFP8Config(dequantize=True)
    found = loaded(tmp_path / "fp8", dtype, quantization_config=settings)
    wanted = loaded(tmp_path / "rounded", dtype)
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def fp8_modules_of_transformers(folder: Path) -> set[str]:
    """What transformers makes FP8 modules of, if it does not dequantise: where it has a GPU."""
    config = AutoConfig.from_pretrained(folder)
    settings = {key: value for key, value in config.quantization_config.items() if key != "quant_method"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    quantizer = FineGrainedFP8HfQuantizer(FineGrainedFP8Config(**settings), pre_quantized=True)
    quantizer._process_model_before_weight_loading(model)
    return {name for name, module in model.named_modules() if isinstance(module, FP8Linear | FP8Experts)}


def fp8_modules_in(folder: Path) -> set[str]:
    names = (name.removesuffix(".weight_scale_inv") for name in safetensors_of(folder) if name.endswith("_scale_inv"))
    return {re.sub(r"\.experts\..*", ".experts", name).replace("block_sparse_moe", "mlp") for name in names}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_makes_fp8_modules_of_what_is_fp8(family: str, families: dict[str, Path], tmp_path: Path) -> None:
    quantized(families[family], tmp_path / "fp8")
    assert fp8_modules_of_transformers(tmp_path / "fp8") == fp8_modules_in(tmp_path / "fp8")


def test_kept_tensors_are_as_they_were(families: dict[str, Path], tmp_path: Path) -> None:
    source = write_family("qwen3_moe", tmp_path / "half", torch.bfloat16)
    quantized(source, tmp_path / "fp8")
    before, after = safetensors_of(source), safetensors_of(tmp_path / "fp8")
    high = {name for name in before if not is_fp8_weight(name)}
    for name in before:
        assert (name + "_scale_inv" in after) == (name not in high)
        if name in high:
            assert after[name].dtype == torch.bfloat16
            assert torch.equal(after[name], before[name])
        else:
            assert after[name].dtype == torch.float8_e4m3fn
            assert after[name + "_scale_inv"].dtype == torch.float32
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert {"lm_head", "model.layers.0.mlp.gate"} <= set(config["quantization_config"]["modules_to_not_convert"])
    assert {key: value for key, value in config.items() if key != "quantization_config"} == json.loads(
        (source / "config.json").read_text()
    )


@pytest.mark.parametrize("shape", [(40, 24), (17, 48), (16, 33), (5, 7), (1, 100), (64, 64)])
def test_ragged_edges_and_zeros_against_loops(shape: tuple[int, int], tmp_path: Path) -> None:
    weights = matrices(3, shape)
    weights["model.layers.0.self_attn.o_proj.weight"][:16, :16] = 0.0
    weights["model.layers.1.self_attn.o_proj.weight"].zero_()
    weights["model.layers.2.self_attn.o_proj.weight"] *= 1e-30
    quantized(write_plain(tmp_path / "source", weights), tmp_path / "fp8")
    grid = (-(-shape[0] // 16), -(-shape[1] // 16))
    found = safetensors_of(tmp_path / "fp8")
    with HFCheckpoint(tmp_path / "fp8") as hf:
        for layer in (0, 1):
            name = f"model.layers.{layer}.self_attn.o_proj.weight"
            assert found[name].shape == shape
            assert found[name + "_scale_inv"].shape == grid
            assert torch.equal(hf.read(name), rounded_by_loops(weights[name]))
        tiny = hf.read("model.layers.2.self_attn.o_proj.weight")
        assert tiny.isfinite().all()


def test_a_name_that_engines_would_take_for_another(tmp_path: Path) -> None:
    weights = matrices(1)
    weights["model.layers.0.mlp.gate_proj.weight"] = torch.ones(16, 16)
    weights["model.layers.0.mlp.gate.weight"] = torch.ones(16, 16)
    source = write_plain(tmp_path / "source", weights)
    with pytest.raises(ConfigError, match=r"gate stays in high precision, and its name would .*mlp.gate_proj"):
        quantized(source, tmp_path / "fp8")
