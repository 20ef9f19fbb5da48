"""A folder with the weights of one version, as servers load them: safetensors shards and the files of the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from megarl.errors import ConfigError, WeightSyncError
from megarl.rollout.sglang_buckets import Bucket

FP8_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
"""What the config.json of an FP8 checkpoint says of its weights (routers, norms and embeddings are never in FP8)."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def write_weights(folder: Path, source: Path, buckets: Iterable[Bucket], version: int) -> Path:
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
            tensors = dict(bucket.cpu().tensors())
            save_file(tensors, part / name, metadata={"format": "pt"})
            where |= dict.fromkeys(tensors, name)
            total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        listing = {"metadata": {"total_size": total}, "weight_map": where}
        (part / "model.safetensors.index.json").write_text(json.dumps(listing))
        _copy_model_files(source, part)
        part.rename(target)
        for old in folder.glob("version_*"):
            if old != target:
                shutil.rmtree(old)
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(f"{folder}: the weights of version {version} could not be written ({error})") from error
    return target


def write_fp8_model(source: Path, folder: Path) -> Path:
    """Make ``folder`` the model in ``source`` as a server loads it that computes in FP8, without weights: those come
    with the first update. Returns ``folder``; ConfigError for a model that is quantised already."""
    config = json.loads((source / "config.json").read_text())
    if "quantization_config" in config:
        raise ConfigError(
            f"{source}/config.json names a quantization_config, expected a model in high precision: training reads its "
            "weights, and servers get them in FP8"
        )
    folder.mkdir(parents=True, exist_ok=True)
    _copy_model_files(source, folder)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": FP8_BLOCKS}, indent=2))
    return folder


def _copy_model_files(source: Path, folder: Path) -> None:
    """Everything but weights: config, tokenizer, code."""
    for file in source.iterdir():
        if file.is_file() and file.suffix not in _WEIGHTS and not file.name.endswith(".index.json"):
            shutil.copy2(file, folder / file.name)
