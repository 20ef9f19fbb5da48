"""Checkpoint folders that servers load: the weights of one version, and an FP8 model without weights."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from megarl.core.fp8 import fp8_config
from megarl.data.files import model_files
from megarl.errors import ConfigError, WeightSyncError
from megarl.rollout.buckets import Bucket


class WeightFolder:
    """Writes ``folder/version_<n>``, one shard per bucket; WeightSyncError from any method if the disk refuses.

    The folder gets its name, and older versions are removed, once it is complete. Config and tokenizer files are copied
    from the checkpoint folder ``source``.
    """

    def __init__(self, folder: Path, source: Path, version: int) -> None:
        self._folder, self._source, self._version = folder, source, version
        self._target = folder / f"version_{version:07d}"
        self._part = self._target.with_suffix(".part")
        self._where: dict[str, str] = {}
        self._shards = 0
        self._bytes = 0
        with self._errors():
            for stale in (self._part, self._target):
                shutil.rmtree(stale, ignore_errors=True)
            self._part.mkdir(parents=True)

    def add(self, bucket: Bucket) -> None:
        """Write one more shard."""
        name = f"model-{self._shards:05d}.safetensors"
        host = bucket.on_host()
        with self._errors():
            save_file(dict(host.tensors()), self._part / name, metadata={"format": "pt"})
        self._where |= dict.fromkeys(bucket.names, name)
        self._shards += 1
        self._bytes += bucket.flat.numel()

    def finish(self) -> Path:
        """Complete the folder and return it."""
        listing = {"metadata": {"total_size": self._bytes}, "weight_map": self._where}
        with self._errors():
            (self._part / "model.safetensors.index.json").write_text(json.dumps(listing))
            _copy_model_files(self._source, self._part)
            self._part.rename(self._target)
            for old in self._folder.glob("version_*"):
                if old != self._target:
                    shutil.rmtree(old)
        return self._target

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            told = f"{self._folder}: the weights of version {self._version} could not be written ({error})"
            raise WeightSyncError(told) from error


def write_fp8_model(source: Path, folder: Path) -> Path:
    """Writes ``folder``: the model in ``source`` as an FP8 server loads it, without weights, which come with the first
    update. Returns ``folder``; ConfigError for a model that is quantised already."""
    config = json.loads((source / "config.json").read_text())
    if "quantization_config" in config:
        raise ConfigError(f"{source}/config.json names a quantization_config, expected a model in high precision")
    folder.mkdir(parents=True, exist_ok=True)
    _copy_model_files(source, folder)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": fp8_config(["lm_head"])}, indent=2))
    return folder


def _copy_model_files(source: Path, folder: Path) -> None:
    for file in model_files(source):
        shutil.copy2(file, folder / file.name)
