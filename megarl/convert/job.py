"""Write the folder of a conversion file by file, on several ranks; an interrupted conversion can be continued.

Until all files are written and verified, the folder is called ``OUT.partial``. Each finished unit of work leaves a
record in the folder. A later start with equal source and settings skips the units with a record.
"""

import atexit
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from safetensors import SafetensorError

from megarl.core.fp8 import BLOCK
from megarl.errors import CheckpointError, ConfigError, MegarlError, some
from megarl.files import outputs
from megarl.files.outputs import MARK, partial_of, replace_folder, require_apart, require_own
from megarl.files.writing import describe_write_error, read_record, sha256_of, sync, write_atomically
from megarl.megatron.checkpoints.manifest import MANIFEST as RUN_MANIFEST
from megarl.megatron.checkpoints.manifest import read_manifest
from megarl.megatron.distributed import shutdown
from megarl.models.hf_files import FP8_ERRORS, MANIFEST, save_tensors, write_index
from megarl.models.hf_folder import read_json
from megarl.models.names import is_fp32

_LOCK, _UNIT = ".megarl.lock", ".megarl-unit-"
_WRITTEN = (*outputs.HF_FILES, "__*_0.distcp", ".metadata*", "metadata.json", "common.pt", MANIFEST, FP8_ERRORS)
"""Names of the files that a conversion makes, without the copies from the model's folder."""
T = TypeVar("T")
_WAIT = timedelta(hours=24)
"""Time limit of a barrier: a conversion of a large model takes hours."""


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of ``megarl convert`` and ``megarl quantize``."""

    dtype: torch.dtype | None = None
    """Dtype of the output, except for the tensors of ``is_fp32``; None: the dtype of each source tensor."""
    layers: Literal["local", "te"] = "te"
    """Whose names a written Megatron checkpoint gets. The names of a source are recognised."""
    stack_layers: bool = False
    """Write a single tensor for all layers, Megatron's default with ``--moe-layer-freq 1``."""
    drop: tuple[str, ...] = ()
    """Globs of source tensors to leave out, for instance prediction layers."""
    block: tuple[int, int] = BLOCK
    """Rows and columns of an FP8 block."""
    keep: tuple[str, ...] = ()
    """Globs of tensors that stay in high precision."""
    verify: bool = True
    """Read the output back, and compare with the source bit for bit."""
    overwrite: bool = False
    shard_bytes: int = 2 << 30
    """Largest safetensors file, unless a single parameter is larger."""

    def dtype_of(self, name: str, stored: torch.dtype) -> torch.dtype:
        """Return the output dtype of the Hugging Face tensor ``name`` with the source dtype ``stored``."""
        if self.dtype is None or not stored.is_floating_point:
            return stored
        return torch.float32 if is_fp32(name) else self.dtype


class Ranks:
    """The processes of torchrun, which divide the files; without torchrun, a single process."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if self.size > 1 and "RANK" not in os.environ:
            raise ConfigError("found WORLD_SIZE without RANK; start with torchrun, or unset WORLD_SIZE")
        if self.size > 1 and not dist.is_initialized():
            dist.init_process_group("gloo", timeout=_WAIT)
            atexit.register(shutdown)  # gloo's threads abort a process that ends with them

    def wait(self) -> None:
        """Wait until all ranks are here."""
        if self.size > 1:
            dist.barrier()

    def share(self, units: Sequence[T]) -> list[tuple[int, T]]:
        """Return (number, unit) of this rank's units."""
        return list(enumerate(units))[self.rank :: self.size]


def require_unchanged(folder: Path, ranks: Ranks) -> bool:
    """Compare a folder with the checksums of the run or conversion that wrote the folder; False without checksums.

    DamageError for a damaged checkpoint of a run, CheckpointError for a changed output of a conversion.
    """
    is_conversion = (folder / MANIFEST).is_file()
    if (folder / RUN_MANIFEST).is_file() or (folder.name.startswith("step_") and not is_conversion):
        digests: Any = {name: digest for name, (_, digest) in read_manifest(folder).items()}
        advice = "it is damaged"
    elif is_conversion:
        digests = read_json(folder / MANIFEST).get("sha256")
        advice = f"{MANIFEST} has another SHA-256 (remove {MANIFEST} if the change is yours)"
        if not isinstance(digests, dict):
            raise CheckpointError(f"{folder / MANIFEST} holds no checksums; remove it if it is not of a conversion")
    else:
        return False
    for _, (name, digest) in ranks.share(sorted(digests.items())):
        if not (folder / name).is_file() or sha256_of(folder / name) != digest:
            raise CheckpointError(f"{folder / name} is not the file that was written: {advice}")
    return True


def same_bits(tensor: torch.Tensor, reference: torch.Tensor) -> bool:
    """Whether two tensors are equal in shape, dtype and every bit, NaN included."""
    if tensor.dtype != reference.dtype or tensor.shape != reference.shape:
        return False
    return torch.equal(*(values.contiguous().reshape(-1).view(torch.uint8) for values in (tensor, reference)))


class ConversionJob:
    """Writes folder ``out``; a context manager, on every rank.

    ConfigError if ``out`` holds anything that megarl did not write. CheckpointError if ``out`` exists and must not be
    replaced, if another process writes ``out``, or if the disk fails.
    """

    num_kept = 0
    """Files of this rank that an earlier start had finished."""

    def __init__(
        self, kind: str, out: Path, source: Path, model: Path, files: Iterable[Path], options: Options, ranks: Ranks
    ) -> None:
        """Convert ``files`` of ``source``; unfinished work of another source or with other settings is removed.

        kind: megatron, hf or fp8. model: the folder whose config and tokenizer are copied.

        ConfigError if ``out`` would replace the source or the model.
        """
        require_apart(out, source, model)
        self.out = out.resolve()  # a link stays; its target is replaced
        self.folder, self.ranks = partial_of(self.out), ranks
        settings = {name: value for name, value in asdict(options).items() if name not in ("verify", "overwrite")}
        stats = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(files)]
        identity = {**settings, "to": kind, "dtype": str(options.dtype), "source": stats}
        identity["config"] = (model / "config.json").read_text()
        self._identity = json.loads(json.dumps(identity))  # as read back from a file
        self._overwrite, self._model, self._lock = options.overwrite, model, None

    def __enter__(self) -> Self:
        require_own(self.out)
        self._require_free("exists; remove it, choose another folder, or ask for --overwrite")
        if self.ranks.rank == 0:
            with self._explain_disk_errors():
                self._claim()
        self.ranks.wait()
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def _require_free(self, problem: str) -> None:
        if self.out.exists() and any(self.out.iterdir()) and not self._overwrite:
            raise CheckpointError(f"{self.out} {problem}")

    def _claim(self) -> None:
        require_own(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / _LOCK).open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(f"another process writes {self.folder}; wait for it or stop it") from error
        continues = read_record(self.folder / MARK).get("job") == self._identity
        outputs.begin(self.folder, _WRITTEN, self._model, keep=["*" if continues else _LOCK], job=self._identity)

    @contextmanager
    def _explain_disk_errors(self) -> Iterator[None]:
        try:
            yield
        except MegarlError:
            raise
        except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own errors
            reason = describe_write_error(error, self.folder)
            raise CheckpointError(
                f"{self.folder} cannot be written ({reason}); {self.out} is as it was. What is finished stays: run the "
                "same command again to go on"
            ) from error

    def write(
        self,
        units: Sequence[Any],
        sizes: Sequence[int],
        write_unit: Callable[[int, Any], tuple[Path, Any]],
        finish: Callable[[list[Any]], None],
    ) -> None:
        """Write this rank's unfinished units with ``write_unit(number, unit) -> (file, record)``.

        A record is plain data for JSON. Rank 0 then calls ``finish`` with the records of all units, in order.
        CheckpointError if the disk fails or a record is gone.
        """
        for number, unit in self._share("converting", units, sizes):
            if self._record(number) is not None:
                self.num_kept += 1
                continue
            with self._explain_disk_errors():
                file, record = write_unit(number, unit)
                sync(file)  # before the record: a record always means a complete file
                entry = {"file": file.name, "bytes": file.stat().st_size, "record": record}
                write_atomically(self._record_file(number), json.dumps(entry).encode())
        self.ranks.wait()
        if self.ranks.rank == 0:
            with self._explain_disk_errors():
                records = [self._record(number) for number in range(len(units))]
                if None in records:
                    raise CheckpointError(f"a unit of {self.folder} is gone: somebody else writes there; try again")
                finish(records)
        self.ranks.wait()

    def write_shards(
        self,
        shards: Sequence[Sequence[T]],
        sizes: Sequence[int],
        encode: Callable[[T], tuple[dict[str, torch.Tensor], Any]],
        finish: Callable[[list[Any]], None],
    ) -> None:
        """Write a Hugging Face folder: a safetensors file for each shard, and the index.

        ``encode(piece)`` returns the tensors of a piece and a note for JSON. Rank 0 calls ``finish`` with all notes.
        """
        files = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]

        def write_shard(number: int, shard: Sequence[T]) -> tuple[Path, Any]:
            encoded = [encode(piece) for piece in shard]
            tensors = {name: tensor for by_name, _ in encoded for name, tensor in by_name.items()}
            save_tensors(tensors, self.folder / files[number])
            return self.folder / files[number], (list(tensors), [note for _, note in encoded])

        def write_folder(records: list[Any]) -> None:
            listing = {name: file for file, (names, _) in zip(files, records, strict=True) for name in names}
            write_index(self.folder, listing, sum(sizes))
            finish([note for _, notes in records for note in notes])

        self.write(shards, sizes, write_shard, write_folder)

    def verify(self, units: Sequence[Sequence[T]], sizes: Sequence[int], changed: Callable[[T], list[str]]) -> None:
        """Raise CheckpointError if ``changed(piece)`` returns names; the next start writes these units anew."""
        names: list[str] = []
        for number, unit in self._share("verifying", units, sizes):
            if different := [name for piece in unit for name in changed(piece)]:
                self._record_file(number).unlink(missing_ok=True)
                names += different
        if names:
            raise CheckpointError(
                f"{some(names)} came out different from the source; nothing was put in place. Run the command again: "
                "these files are written anew. If it repeats, disk or memory is damaged, the source changes, or the "
                "map is wrong"
            )
        self.ranks.wait()

    def _share(self, label: str, units: Sequence[Any], sizes: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """Yield (number, unit) of this rank; rank 0 shows a progress bar in bytes."""
        own_units = self.ranks.share(units)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        console = Console(stderr=True)
        with Progress(*columns, TimeRemainingColumn(), console=console, disable=self.ranks.rank != 0) as bar:
            task = bar.add_task(label, total=sum(sizes[number] for number, _ in own_units))
            for number, unit in own_units:
                yield number, unit
                bar.advance(task, sizes[number])

    def _record(self, number: int) -> Any:
        """Return the record of a unit whose file is complete, or None."""
        entry = read_record(self._record_file(number))  # empty if damaged: the unit is written anew
        file = self.folder / str(entry.get("file", ""))
        return entry.get("record") if file.is_file() and file.stat().st_size == entry.get("bytes") else None

    def _record_file(self, number: int) -> Path:
        return self.folder / f"{_UNIT}{number:06d}"

    def publish(self, **manifest: Any) -> None:
        """Rename the folder to ``out``, with ``manifest`` and the SHA-256 of every file of weights in the folder."""
        files = sorted(path for path in self.folder.iterdir() if path.suffix in (".safetensors", ".distcp"))
        digests = {file.name: sha256_of(file) for _, file in self.ranks.share(files)}
        if self.ranks.size > 1:
            gathered: list[dict[str, str]] = [{}] * self.ranks.size
            dist.all_gather_object(gathered, digests)
            digests = {name: digest for by_name in gathered for name, digest in sorted(by_name.items())}
        if self.ranks.rank == 0:
            with self._explain_disk_errors():
                text = json.dumps({**manifest, "sha256": digests}, indent=1)
                write_atomically(self.folder / MANIFEST, text.encode())
                outputs.seal(self.folder, job=self._identity)
                self._require_free(f"has appeared meanwhile; {self.folder} is whole: rename one")
                replace_folder(self.folder, self.out)
                # Last: until the folder has its name, another start goes on with these files.
                for entry in (*self.out.glob(f"{_UNIT}*"), self.out / _LOCK):
                    entry.unlink()
        self.ranks.wait()
