"""Writes a folder file by file, on several ranks, and can be interrupted at any time.

Until every unit is written and verified, the folder is called ``OUT.partial``. Each finished unit leaves a record
there, and another start with the same source and settings continues after these units.
"""

import atexit
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from safetensors import SafetensorError

from megarl.errors import CheckpointError, ConfigError, MegarlError, some
from megarl.files import outputs
from megarl.files.disk import describe_write_error
from megarl.files.outputs import MARK, partial_of, replace_folder, require_own
from megarl.files.writing import read_record, sha256_of, write_atomically
from megarl.megatron.checkpoints.manifest import MANIFEST as RUN_MANIFEST
from megarl.megatron.checkpoints.manifest import read_manifest
from megarl.megatron.distributed import shutdown
from megarl.models.hf_files import FP8_ERRORS, MANIFEST, save_tensors, write_index
from megarl.models.hf_folder import read_json

_LOCK, _UNIT = ".megarl.lock", ".megarl-unit-"
_WRITTEN = (*outputs.HF_FILES, "__*_0.distcp", ".metadata*", "metadata.json", "common.pt", MANIFEST, FP8_ERRORS)
"""Names of files of a conversion, besides those copied from its model."""
T = TypeVar("T")
_WAIT = timedelta(hours=24)
"""Ranks wait for the slowest; a conversion of a large model takes hours."""


class Ranks:
    """The processes of torchrun that share the work through the file system; alone without it."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if self.size > 1 and "RANK" not in os.environ:
            raise ConfigError("found WORLD_SIZE without RANK; start with torchrun, or unset WORLD_SIZE")
        if self.size > 1 and not dist.is_initialized():
            dist.init_process_group("gloo", timeout=_WAIT)
            atexit.register(shutdown)  # gloo's threads abort a process that ends with them

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    def share(self, units: Sequence[T]) -> list[tuple[int, T]]:
        """(number, unit) of this rank's units."""
        return list(enumerate(units))[self.rank :: self.size]


def require_unchanged(folder: Path, ranks: Ranks) -> bool:
    """Compare a folder with the checksums of the run or the conversion that wrote it; False if it has none.

    DamageError if it is of a run and damaged. CheckpointError if it is of a conversion and has been changed.
    """
    is_of_conversion = (folder / MANIFEST).is_file()
    if (folder / RUN_MANIFEST).is_file() or (folder.name.startswith("step_") and not is_of_conversion):
        digests: Any = {name: digest for name, (_, digest) in read_manifest(folder).items()}
        advice = "it is damaged"
    elif is_of_conversion:
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


def fingerprint(files: Iterable[Path], model: Path, **settings: Any) -> dict[str, Any]:
    """Plain data that tells one conversion from another: source files, the model's config, and settings."""
    stats = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(files)]
    return {"source": stats, "config": (model / "config.json").read_text(), **settings}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal in shape, dtype and every bit, NaN included."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


class ConversionJob:
    """Writes folder ``out``; a context manager, on every rank.

    ``fingerprint`` is plain data that identifies source and settings; unfinished work with another one is removed.
    ``model``: the folder whose config and tokenizer are copied.

    ConfigError if ``out`` holds anything that megarl did not write. CheckpointError if it exists and must not be
    replaced, if another process writes it, or if the disk fails.
    """

    def __init__(
        self, out: Path, fingerprint: Mapping[str, Any], ranks: Ranks, *, overwrite: bool, model: Path | None = None
    ) -> None:
        self.out = out.resolve()  # a link stays; its target is replaced
        self.folder = partial_of(self.out)
        self.ranks = ranks
        self._identity = json.loads(json.dumps(fingerprint))  # as it is read back
        self._overwrite, self._model = overwrite, model
        self._lock: Any = None
        self.kept = 0  # units that an earlier start had finished

    def __enter__(self) -> Self:
        require_own(self.out)
        self._require_leave("exists; remove it, choose another folder, or ask for --overwrite")
        if self.ranks.rank == 0:
            with self._explain_disk_errors():
                self._claim()
        self.ranks.wait()
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def _require_leave(self, told: str) -> None:
        if self.out.exists() and any(self.out.iterdir()) and not self._overwrite:
            raise CheckpointError(f"{self.out} {told}")

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

        A record is what JSON can hold. Then rank 0 calls ``finish`` with the records of all units, in order.
        """
        with self._share("converting", units, sizes) as mine:
            for number, unit in mine:
                if self._record(number) is not None:
                    self.kept += 1
                    continue
                with self._explain_disk_errors():
                    file, record = write_unit(number, unit)
                    with file.open("rb") as stream:  # before its record: a record always means a complete file
                        os.fsync(stream.fileno())
                    kept = {"file": file.name, "bytes": file.stat().st_size, "record": record}
                    write_atomically(self._record_file(number), json.dumps(kept).encode())
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
        """Write a Hugging Face folder: one safetensors file for each shard, and the index.

        ``encode(part)`` returns the tensors of a part and a note for JSON; rank 0 calls ``finish`` with all notes.
        """

        files = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]

        def write_shard(number: int, shard: Sequence[T]) -> tuple[Path, Any]:
            encoded = [encode(part) for part in shard]
            tensors = {name: tensor for made, _ in encoded for name, tensor in made.items()}
            save_tensors(tensors, self.folder / files[number])
            return self.folder / files[number], (list(tensors), [note for _, note in encoded])

        def write_folder(records: list[Any]) -> None:
            listing = {name: file for file, (names, _) in zip(files, records, strict=True) for name in names}
            write_index(self.folder, listing, sum(sizes))
            finish([note for _, notes in records for note in notes])

        self.write(shards, sizes, write_shard, write_folder)

    def verify(self, units: Sequence[Sequence[T]], sizes: Sequence[int], changed: Callable[[T], list[str]]) -> None:
        """Raise CheckpointError if ``changed(part)`` names anything; the next start writes these units anew."""
        names: list[str] = []
        with self._share("verifying", units, sizes) as mine:
            for number, unit in mine:
                if different := [name for part in unit for name in changed(part)]:
                    self._record_file(number).unlink(missing_ok=True)
                    names += different
        if names:
            raise CheckpointError(
                f"{some(names)} came out different from the source; nothing was put in place. Run the command again: "
                "these files are written anew. If it repeats, disk or memory is damaged, the source changes, or the "
                "map is wrong"
            )
        self.ranks.wait()

    @contextmanager
    def _share(self, label: str, units: Sequence[Any], sizes: Sequence[int]) -> Iterator[Iterator[tuple[int, Any]]]:
        """Inside: iterate over (number, unit) of this rank's units; rank 0 shows a progress bar in bytes."""
        mine = self.ranks.share(units)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        console = Console(stderr=True)
        with Progress(*columns, TimeRemainingColumn(), console=console, disable=self.ranks.rank != 0) as bar:
            task = bar.add_task(label, total=sum(sizes[number] for number, _ in mine))

            def advance() -> Iterator[tuple[int, Any]]:
                for number, unit in mine:
                    yield number, unit
                    bar.advance(task, sizes[number])

            yield advance()

    def _record(self, number: int) -> Any:
        """The record of a unit whose file is complete; else None."""
        kept = read_record(self._record_file(number))  # empty if it is damaged: the unit is written anew
        file = self.folder / str(kept.get("file", ""))
        return kept.get("record") if file.is_file() and file.stat().st_size == kept.get("bytes") else None

    def _record_file(self, number: int) -> Path:
        return self.folder / f"{_UNIT}{number:06d}"

    def publish(self, manifest: Mapping[str, Any]) -> None:
        """Give the folder its name, with ``manifest`` and the SHA-256 of every file of weights in it."""
        files = sorted(path for path in self.folder.iterdir() if path.suffix in (".safetensors", ".distcp"))
        digests = {file.name: sha256_of(file) for _, file in self.ranks.share(files)}
        if self.ranks.size > 1:
            gathered: list[dict[str, str]] = [{}] * self.ranks.size
            dist.all_gather_object(gathered, digests)
            digests = {name: digest for part in gathered for name, digest in sorted(part.items())}
        if self.ranks.rank == 0:
            with self._explain_disk_errors():
                text = json.dumps({**manifest, "sha256": digests}, indent=1)
                write_atomically(self.folder / MANIFEST, text.encode())
                outputs.seal(self.folder, job=self._identity)
                self._require_leave(f"has appeared meanwhile; {self.folder} is whole: rename one")
                replace_folder(self.folder, self.out)
                # Last: until the folder has its name, another start goes on with these files.
                for entry in (*self.out.glob(f"{_UNIT}*"), self.out / _LOCK):
                    entry.unlink()
        self.ranks.wait()
