"""Bad input, kills, full disks and memory: what a quantisation leaves, and what it takes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from fp8_worlds import BLOCK, matrices, same_tensors, write_plain

from megarl.convert import job
from megarl.convert.job import Options
from megarl.convert.quantization import Quantized, quantize
from megarl.errors import CheckpointError, ConfigError, NumericsError

ROOT = Path(__file__).parents[2]
ONE_FILE = 2000
"""Bytes for two of the matrices of ``matrices``."""


def quantized(source: Path, out: Path, **settings: Any) -> Quantized:
    options = Options(**{"block": BLOCK, "shard_bytes": ONE_FILE, **settings})
    return quantize(source, out, options)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_plain(tmp_path / "source", matrices(8), files=2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model.layers.1.self_attn.o_proj.weight", "model.norm.weight"])
def test_values_that_are_not_finite(name: str, value: float, tmp_path: Path) -> None:
    weights = matrices(3)
    weights[name].view(-1)[:3] = value
    with pytest.raises(NumericsError, match=rf"{name} holds 3 values of {weights[name].numel()} that are not finite"):
        quantized(write_plain(tmp_path / "source", weights), tmp_path / "fp8")
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


def test_experts_in_one_tensor_are_refused(tmp_path: Path) -> None:
    weights = matrices(2) | {"model.layers.0.mlp.experts.w13": torch.ones(2, 16, 16)}
    source = write_plain(tmp_path / "source", weights)
    with pytest.raises(ConfigError, match="w13 hold all experts of a layer, expected one matrix per expert"):
        quantized(source, tmp_path / "fp8")


@pytest.mark.parametrize(
    ("folder", "message"),
    [(name, "config.json cannot be read") for name in ("absent", "empty", "no_config")],
)
def test_what_is_no_checkpoint(folder: str, message: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    shutil.copytree(source, tmp_path / "no_config")
    (tmp_path / "no_config" / "config.json").unlink()
    with pytest.raises((CheckpointError, ConfigError), match=message):
        quantized(tmp_path / folder, tmp_path / "fp8")


@pytest.mark.parametrize("tensor", ["model.layers.1.self_attn.o_proj.weight", "model.norm.weight", "scale"])
def test_bytes_that_change_on_their_way_are_found(
    tensor: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = job.save_tensors
    name = tensor if tensor != "scale" else "model.layers.1.self_attn.o_proj.weight_scale_inv"

    def save_changed(tensors: dict[str, torch.Tensor], file: Path) -> None:
        if name in tensors:
            tensors[name].view(torch.uint8).view(-1)[0] ^= 1
        save(tensors, file)

    with monkeypatch.context() as patch:
        patch.setattr(job, "save_tensors", save_changed)
        with pytest.raises(CheckpointError, match=f"{name} came out different"):
            quantized(source, tmp_path / "fp8")
    assert not (tmp_path / "fp8").exists()
    assert quantized(source, tmp_path / "fp8").num_files == 5


def test_files_may_be_read_by_others_and_have_checksums(source: Path, tmp_path: Path) -> None:
    quantized(source, tmp_path / "fp8")
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "fp8").glob("*.safetensors")} == {0o644}
    manifest = json.loads((tmp_path / "fp8" / "conversion.json").read_text())
    assert len(manifest["sha256"]) == 5
    assert manifest["to"] == "fp8"


def tool(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megarl.cli", "quantize", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return preloaded.run(command, env=environment, timeout=1800)


def test_the_command(source: Path, tmp_path: Path) -> None:
    words = (source, tmp_path / "fp8", "--block", "16", "16", "--shard-gib", "2e-6")
    done = tool(*words)
    assert done.returncode == 0, done.stderr
    assert "8 of 9 tensors in FP8, blocks of 16 x 16; 30.8 kB -> " in done.stdout
    quantized(source, tmp_path / "here")
    assert same_tensors(tmp_path / "fp8", tmp_path / "here")
    again = tool(*words)
    assert again.returncode == 2
    assert re.fullmatch(r"megarl: error: \S+fp8 exists; .*\n", again.stderr)
