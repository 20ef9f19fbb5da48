"""FP8 checkpoints: as transformers reads them, whole blocks and ragged ones; and what is refused."""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from fp8_worlds import BLOCK, FAMILIES, rounded_by_loops, same_tensors, write_family
from safetensors.torch import load_file, save_file
from tiny_world import safetensors_of
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from megarl.convert import job
from megarl.convert.job import Options
from megarl.convert.quantization import quantize
from megarl.core.fp8_names import is_fp8_weight
from megarl.errors import CheckpointError, ConfigError, NumericsError
from megarl.models.hf_files import HFCheckpoint

ROOT = Path(__file__).parents[2]
NAME = "model.layers.1.self_attn.o_proj.weight"


def quantized(source: Path, out: Path, **settings: Any) -> list[Path]:
    quantize(source, out, Options(**{"block": BLOCK, **settings}))
    return sorted(out.glob("*.safetensors"))


def matrices(count: int = 4, shape: tuple[int, int] = (40, 24)) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(count)]
    return {**{n: torch.randn(shape, generator=generator) for n in names}, "model.norm.weight": torch.ones(shape[1])}


def write_plain(folder: Path, weights: dict[str, torch.Tensor], files: int = 1) -> Path:
    """A checkpoint of no family."""
    folder.mkdir(parents=True)
    names = sorted(weights)
    for number in range(files):
        part = {name: weights[name] for name in names[number::files]}
        save_file(part, folder / f"model-{number}.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"dtype": "float32"}))
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_plain(tmp_path / "source", matrices(8), files=2)


def loaded(folder: Path, dtype: torch.dtype, **settings: Any) -> dict[str, torch.Tensor]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True, **settings)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.state_dict()


def fp8_modules_of_transformers(folder: Path) -> set[str]:
    """What transformers makes FP8 modules of, if it does not dequantise: where it has a GPU."""
    config = AutoConfig.from_pretrained(folder)
    settings = {key: value for key, value in config.quantization_config.items() if key != "quant_method"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    quantizer = FineGrainedFP8HfQuantizer(FineGrainedFP8Config(**settings), pre_quantized=True)
    quantizer._process_model_before_weight_loading(model)
    return {name for name, module in model.named_modules() if isinstance(module, FP8Linear | FP8Experts)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_rounded_weights_bit_for_bit(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """And would make FP8 modules of what is FP8. All other tensors are as they were."""
    source, fp8 = write_family(family, tmp_path / "source", dtype), tmp_path / "fp8"
    assert len(quantized(source, fp8, shard_bytes=10_000)) > 1
    weights, after = load_file(source / "model.safetensors"), safetensors_of(fp8)
    for name, tensor in weights.items():
        assert (name + "_scale_inv" in after) == is_fp8_weight(name)
        if is_fp8_weight(name):
            assert (after[name].dtype, after[name + "_scale_inv"].dtype) == (torch.float8_e4m3fn, torch.float32)
        else:
            assert after[name].dtype == dtype
            assert torch.equal(after[name], tensor)
    rounded = {name: rounded_by_loops(one) if is_fp8_weight(name) else one for name, one in weights.items()}
    (tmp_path / "rounded").mkdir()
    save_file(rounded, tmp_path / "rounded" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "rounded" / "config.json").write_text((source / "config.json").read_text())
    found = loaded(fp8, dtype, quantization_config=FineGrainedFP8Config(dequantize=True))
    wanted = loaded(tmp_path / "rounded", dtype)
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    modules = (name.removesuffix(".weight_scale_inv") for name in after if name.endswith("_scale_inv"))
    assert fp8_modules_of_transformers(fp8) == {
        re.sub(r"\.experts\..*", ".experts", name).replace("block_sparse_moe", "mlp") for name in modules
    }
    config = json.loads((fp8 / "config.json").read_text())
    assert "lm_head" in config.pop("quantization_config")["modules_to_not_convert"]
    assert config == json.loads((source / "config.json").read_text())


@pytest.mark.parametrize("shape", [(17, 48), (5, 7), (1, 100)])
def test_ragged_edges_and_zeros_against_loops(shape: tuple[int, int], tmp_path: Path) -> None:
    weights = matrices(3, shape)
    weights["model.layers.0.self_attn.o_proj.weight"][:16, :16] = 0.0
    weights[NAME].zero_()
    weights["model.layers.2.self_attn.o_proj.weight"] *= 1e-30
    quantized(write_plain(tmp_path / "source", weights), tmp_path / "fp8")
    found = safetensors_of(tmp_path / "fp8")
    with HFCheckpoint(tmp_path / "fp8") as hf:
        for name in ("model.layers.0.self_attn.o_proj.weight", NAME):
            assert found[name].shape == shape
            assert found[name + "_scale_inv"].shape == (-(-shape[0] // 16), -(-shape[1] // 16))
            assert torch.equal(hf.read(name), rounded_by_loops(weights[name]))
        assert hf.read("model.layers.2.self_attn.o_proj.weight").isfinite().all()


GATE, EXPERTS = "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.experts.w13"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {GATE: torch.ones(16, 16), GATE.replace("gate", "gate_proj"): torch.ones(16, 16)},
            ConfigError,
            r"gate stays in high precision, and its name would .*mlp.gate_proj",
        ),
        ({EXPERTS: torch.ones(2, 16, 16)}, ConfigError, "w13 hold all experts of a layer, expected one matrix per"),
        ({NAME: torch.full((40, 24), float("nan"))}, NumericsError, f"{NAME} holds 960 values of 960 that are not fin"),
        ({"model.norm.weight": torch.full((3,), -float("inf"))}, NumericsError, "model.norm.weight holds 3 values of"),
    ],
)
def test_what_cannot_be_quantised(
    changes: dict[str, torch.Tensor], error: type[Exception], message: str, tmp_path: Path
) -> None:
    source = write_plain(tmp_path / "source", matrices() | changes)
    with pytest.raises(error, match=message):
        quantized(source, tmp_path / "fp8")
    assert not (tmp_path / "fp8").exists()


def test_what_is_fp8_already_is_refused(source: Path, tmp_path: Path) -> None:
    quantized(source, tmp_path / "fp8")
    with pytest.raises(ConfigError, match=r"is quantised already \('fp8', blocks \[16, 16\]\)"):
        quantized(tmp_path / "fp8", tmp_path / "again")
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"o_proj.weight \(torch.float8_e4m3fn\).* are quantised already"):
        quantized(tmp_path / "fp8", tmp_path / "again", shard_bytes=1 << 20)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("name", [NAME, "model.norm.weight", NAME + "_scale_inv"])
def test_bytes_that_change_on_their_way_are_found(
    name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = job.save_tensors

    def save_changed(tensors: dict[str, torch.Tensor], file: Path) -> None:
        if name in tensors:
            tensors[name].view(torch.uint8).view(-1)[0] ^= 1
        save(tensors, file)

    monkeypatch.setattr(job, "save_tensors", save_changed)
    with pytest.raises(CheckpointError, match=f"{name} came out different"):
        quantized(source, tmp_path / "fp8")
    assert not (tmp_path / "fp8").exists()


def test_the_command(source: Path, tmp_path: Path) -> None:
    """Its files may be read by others, and have checksums."""
    words = [str(source), str(tmp_path / "fp8"), "--block", "16", "16", "--shard-gib", "2e-6"]
    command = [sys.executable, "-m", "megarl.cli", "quantize", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = preloaded.run(command, env=environment, timeout=1800)
    assert done.returncode == 0, done.stderr
    assert "8 of 9 tensors in FP8, blocks of 16 x 16; 30.8 kB -> " in done.stdout
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "fp8").glob("*.safetensors")} == {0o644}
    manifest = json.loads((tmp_path / "fp8" / "conversion.json").read_text())
    assert len(manifest["sha256"]) == len(quantized(source, tmp_path / "here", shard_bytes=2147)) == 4
    assert manifest["to"] == "fp8"
    assert same_tensors(tmp_path / "fp8", tmp_path / "here")
    again = preloaded.run(command, env=environment, timeout=1800)
    assert again.returncode == 2
    assert re.fullmatch(r"megarl: error: \S+fp8 exists; .*\n", again.stderr)
