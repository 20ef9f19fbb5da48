"""Write the folder of a conversion file by file.

Until all files are written and verified, the folder is called ``OUT.partial``. A later start begins anew.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError

from megarl.core.fp8_names import BLOCK
from megarl.errors import CheckpointError, MegarlError, refusal, refuse_if, some
from megarl.files import outputs
from megarl.files.writing import describe_write_error, sha256_of, write_atomically
from megarl.megatron.checkpoints.folders import MANIFEST as RUN_MANIFEST
from megarl.megatron.checkpoints.folders import read_manifest
from megarl.models.hf_files import MANIFEST, save_tensors, write_index
from megarl.models.hf_folder import read_json
from megarl.models.names import is_fp32

_MODEL = (*outputs.HF_FILES, *(f"*/{name}" for name in outputs.HF_FILES))
_WRITTEN = (*_MODEL, "__*_0.distcp", ".metadata*", "metadata.json", "common.pt", MANIFEST)
"""Names of the files that a conversion makes, without the copies from the model's folder."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of ``megarl convert`` and ``megarl quantize``."""

    dtype: torch.dtype | None = None
    """Dtype of the output, except for the tensors of ``is_fp32``; None: the dtype of each source tensor."""
    layers: Literal["local", "te"] = "te"
    """Whose names a written Megatron checkpoint gets. The names of a source are recognised."""
    drop: tuple[str, ...] = ()
    """Globs of source tensors to leave out, for instance prediction layers."""
    block: tuple[int, int] = BLOCK
    """Rows and columns of an FP8 block."""
    overwrite: bool = False
    shard_bytes: int = 2 << 30
    """Largest safetensors file, unless a single parameter is larger."""

    def dtype_of(self, name: str, stored: torch.dtype) -> torch.dtype:
        """Return the output dtype of the Hugging Face tensor ``name`` with the source dtype ``stored``."""
        if self.dtype is None or not stored.is_floating_point:
            return stored
        return torch.float32 if is_fp32(name) else self.dtype


def require_unchanged(folder: Path) -> None:
    """Compare a folder with the checksums of the run or conversion that wrote the folder, if any.

    DamageError for a damaged checkpoint of a run, CheckpointError for a changed output of a conversion.
    """
    is_conversion = (folder / MANIFEST).is_file()
    if (folder / RUN_MANIFEST).is_file() or (folder.name.startswith("step_") and not is_conversion):
        digests: Any = {name: digest for name, (_, digest) in read_manifest(folder).items()}
        advice = "it is damaged"
    elif is_conversion:
        digests = read_json(folder / MANIFEST).get("sha256")
        advice = f"{MANIFEST} has another SHA-256 (remove {MANIFEST} if the change is yours)"
        refuse_if(not isinstance(digests, dict), CheckpointError, "no_checksums_of_conversion", file=folder / MANIFEST)
    else:
        return
    for name, digest in sorted(digests.items()):
        if not (folder / name).is_file() or sha256_of(folder / name) != digest:
            raise CheckpointError(f"{folder / name} is not the file that was written: {advice}")


def same_bits(tensor: torch.Tensor, reference: torch.Tensor) -> bool:
    """Whether two tensors are equal in shape, dtype and every bit, NaN included."""
    if tensor.dtype != reference.dtype or tensor.shape != reference.shape:
        return False
    return torch.equal(*(values.contiguous().reshape(-1).view(torch.uint8) for values in (tensor, reference)))


class ConversionJob:
    """Writes folder ``out``, first in an empty folder; then ``verify`` and ``publish``.

    ConfigError if ``out`` holds anything that megarl did not write. CheckpointError if ``out`` exists and must not be
    replaced, or if the disk fails.
    """

    def __init__(self, out: Path, source: Path, model: Path, options: Options) -> None:
        """``model``: the folder whose config and tokenizer are copied.

        ConfigError if ``out`` would replace the source or the model.
        """
        outputs.require_apart(out, source, model)
        self.out = out.resolve()  # a link stays; its target is replaced
        self.folder = outputs.partial_of(self.out)
        self._overwrite = options.overwrite
        outputs.require_own(self.out)
        self._require_free("exists; remove it, choose another folder, or ask for --overwrite")
        with self.writing():
            outputs.begin(self.folder, _WRITTEN, model)

    def _require_free(self, problem: str) -> None:
        if self.out.exists() and any(self.out.iterdir()) and not self._overwrite:
            raise CheckpointError(f"{self.out} {problem}")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Raise CheckpointError for an error of the disk inside."""
        try:
            yield
        except MegarlError:
            raise
        except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own errors
            facts = {"folder": self.folder, "reason": describe_write_error(error, self.folder), "out": self.out}
            raise CheckpointError(refusal("conversion_unwritten", **facts)) from error

    def write_shards(
        self,
        shards: Sequence[Sequence[T]],
        num_bytes: int,
        encode: Callable[[T], dict[str, torch.Tensor]],
        finish: Callable[[], None],
    ) -> None:
        """Write a Hugging Face folder: a safetensors file for each shard, and the index with ``num_bytes`` in all.

        ``encode(piece)`` returns the tensors [...] of a piece; ``finish`` is called at the end.
        """
        listing: dict[str, str] = {}
        with self.writing():
            for number, shard in enumerate(shown("converting", shards), start=1):
                tensors = {name: tensor for piece in shard for name, tensor in encode(piece).items()}
                file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
                save_tensors(tensors, self.folder / file)
                listing |= dict.fromkeys(tensors, file)
                del tensors  # before the next file needs the memory
            write_index(self.folder, listing, num_bytes)
            finish()

    def verify(self, units: Sequence[Sequence[T]], changed: Callable[[T], list[str]]) -> None:
        """Raise CheckpointError if ``changed(piece)`` returns names."""
        if names := [name for unit in shown("verifying", units) for piece in unit for name in changed(piece)]:
            raise CheckpointError(refusal("conversion_differs", names=some(names)))

    def publish(self, **manifest: Any) -> dict[str, Any]:
        """Rename the folder to ``out``, with ``manifest`` and the SHA-256 of its files of weights; return both."""
        files = sorted(path for path in self.folder.rglob("*") if path.suffix in (".safetensors", ".distcp"))
        with self.writing():
            manifest["sha256"] = {file.relative_to(self.folder).as_posix(): sha256_of(file) for file in files}
            write_atomically(self.folder / MANIFEST, json.dumps(manifest, indent=1).encode())
            outputs.seal(self.folder)
            self._require_free(f"has appeared meanwhile; {self.folder} is whole: rename one")
            outputs.replace_folder(self.folder, self.out)
        return manifest


def shown(label: str, units: Sequence[T]) -> Iterable[T]:
    """Yield the units with a progress bar."""
    return track(units, label, console=Console(stderr=True))
