"""What makes a folder of safetensors files a Hugging Face checkpoint: the division into files, index and config."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file

from megarl.data.files import model_files
from megarl.models.hf_reader import INDEX, MANIFEST

FP8_ERRORS = "fp8_errors.json"
"""What a folder with FP8 blocks says about the errors of each tensor."""
T = TypeVar("T")


def pack_shards(pieces: Sequence[T], sizes: Sequence[int], shard_bytes: int) -> tuple[list[list[T]], list[int]]:
    """What goes into each file, in order, and its bytes; a file is larger than ``shard_bytes`` only if one piece is."""
    shards: list[list[T]] = [[]]
    totals = [0]
    for piece, size in zip(pieces, sizes, strict=True):
        if shards[-1] and totals[-1] + size > shard_bytes:
            shards.append([])
            totals.append(0)
        shards[-1].append(piece)
        totals[-1] += size
    return shards, totals


def save_tensors(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """A safetensors file that others may read: safetensors 0.8 makes it private."""
    save_file(dict(tensors), file, metadata={"format": "pt"})
    file.chmod(0o644)


def write_index(folder: Path, listing: Mapping[str, str], num_bytes: int) -> None:
    """Which file holds which tensor."""
    index = {"metadata": {"total_size": num_bytes}, "weight_map": listing}
    (folder / INDEX).write_text(json.dumps(index, indent=1))


def copy_model_files(
    source: Path, target: Path, dtype: torch.dtype | None, quantization: Mapping[str, Any] | None = None
) -> None:
    """Config, tokenizer, code; the config says what the weights now are."""
    for file in model_files(source):
        if file.name not in (MANIFEST, FP8_ERRORS):
            shutil.copyfile(file, target / file.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
    if quantization is not None:
        config["quantization_config"] = quantization
    (target / "config.json").write_text(json.dumps(config, indent=2))
