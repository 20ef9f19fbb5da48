"""A folder with the weights of one version, as servers load them: safetensors shards and the files of the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megarl.errors import WeightSyncError

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def write_weights(folder: Path, source: Path, buckets: Iterable[list[tuple[str, torch.Tensor]]], version: int) -> Path:
    """Write ``folder/version_<n>`` and remove older versions; returns its path. It has its name when it is complete.

    ``source`` is a checkpoint folder whose config and tokenizer files are taken over. One shard per bucket.
    WeightSyncError if the disk refuses.
    """
    target = folder / f"version_{version:07d}"
    part = target.with_suffix(".part")
    try:
        for stale in (part, target):
            shutil.rmtree(stale, ignore_errors=True)
        part.mkdir(parents=True)
        where: dict[str, str] = {}
        total = 0
        for index, bucket in enumerate(buckets):
            name = f"model-{index:05d}.safetensors"
            tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in bucket}
            save_file(tensors, part / name, metadata={"format": "pt"})
            where |= dict.fromkeys(tensors, name)
            total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        listing = {"metadata": {"total_size": total}, "weight_map": where}
        (part / "model.safetensors.index.json").write_text(json.dumps(listing))
        for file in source.iterdir():
            if file.is_file() and file.suffix not in _WEIGHTS and not file.name.endswith(".index.json"):
                shutil.copy2(file, part / file.name)
        part.rename(target)
        for old in folder.glob("version_*"):
            if old != target:
                shutil.rmtree(old)
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(f"{folder}: the weights of version {version} could not be written ({error})") from error
    return target
