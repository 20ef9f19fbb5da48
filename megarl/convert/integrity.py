"""Checks around a conversion: checksums, fingerprints of sources, comparison of bits; and the ranks that share it."""

from __future__ import annotations

import atexit
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.errors import CheckpointError, ConfigError
from megarl.megatron.distributed import shutdown
from megarl.models.hf_reader import MANIFEST, read_json

_WAIT = timedelta(hours=24)
"""Ranks wait for the slowest; a conversion of a large model takes hours."""
_ENVIRONMENT = (("RANK", "0"), ("WORLD_SIZE", "1"))


class Ranks:
    """The processes of torchrun that share the work through the file system; alone without it."""

    def __init__(self) -> None:
        self.rank, self.size = (int(os.environ.get(name, default)) for name, default in _ENVIRONMENT)
        if self.size > 1 and "RANK" not in os.environ:
            raise ConfigError("found WORLD_SIZE without RANK; start with torchrun, or unset WORLD_SIZE")
        if self.size > 1 and not dist.is_initialized():
            dist.init_process_group("gloo", timeout=_WAIT)
            atexit.register(shutdown)  # gloo's threads abort a process that ends with them

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.size > 1:
            dist.barrier()

    def share(self, units: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """(number, unit) of this rank's units."""
        yield from list(enumerate(units))[self.rank :: self.size]


def partial_of(out: Path) -> Path:
    """The name of a folder until it is complete."""
    if not out.name:
        raise ConfigError(f"{out} cannot be written; name a folder")
    return out.with_name(out.name + ".partial")


def require_apart(out: Path, *sources: Path | None) -> None:
    """ConfigError if ``out`` or its ``.partial`` folder is a source or contains one."""
    written = (out.resolve(), partial_of(out.resolve()))
    for source in sources:
        if source is not None and {source.resolve(), *source.resolve().parents} & set(written):
            raise ConfigError(f"{out} would replace its own source {source}; choose another folder")


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def require_unchanged(folder: Path, ranks: Ranks) -> bool:
    """Compare a folder with the checksums of the conversion that wrote it; False if it has none.

    Raises CheckpointError naming the file that has changed.
    """
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return False
    digests = read_json(manifest).get("sha256")
    if not isinstance(digests, dict):
        raise CheckpointError(f"{manifest} holds no checksums; remove it if it is not of a conversion")
    for _, (name, digest) in ranks.share(sorted(digests.items())):
        if not (folder / name).is_file() or sha256_of(folder / name) != digest:
            raise CheckpointError(
                f"{folder / name} is not the file that was written: {MANIFEST} has another SHA-256 (remove {MANIFEST} "
                "if the change is yours)"
            )
    return True


def fingerprint(files: Iterable[Path], model: Path, **settings: Any) -> dict[str, Any]:
    """Plain data that tells one conversion from another: source files, the model's config, and settings."""
    stats = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(files)]
    return {"source": stats, "config": (model / "config.json").read_text(), **settings}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal in shape, dtype and every bit, NaN included."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))
