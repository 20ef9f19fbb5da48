"""A folder that several processes write together, file by file, that can be interrupted, and that appears at the end.

While it is written the folder is called ``OUT.partial``. Each finished unit leaves a record there; another start with
the same source and settings keeps what is finished. The folder gets its name when every unit is done and checked.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from safetensors import SafetensorError

from megarl.data.files import replace_folder, sync_folder, write_atomically
from megarl.errors import CheckpointError, ConfigError, MegarlError
from megarl.megatron.distributed import shutdown
from megarl.models.hf_reader import MANIFEST, read_json, some

_WAIT = timedelta(hours=24)
"""Ranks wait for the slowest; a conversion of a large model takes hours."""

_JOB, _LOCK = ".job.json", ".lock"


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


_ENVIRONMENT = (("RANK", "0"), ("WORLD_SIZE", "1"))


class ConversionJob:
    """Writes folder ``out``; a context manager, on every rank. ``fingerprint`` is plain data that names source and
    settings: unfinished work with another one is thrown away.

    CheckpointError if ``out`` is there and not to be replaced, if another process writes it, or if the disk refuses.
    """

    def __init__(self, out: Path, fingerprint: Mapping[str, Any], ranks: Ranks, *, overwrite: bool) -> None:
        self.out = out.resolve()  # a link stays one, and its target is replaced
        self.folder = partial_of(self.out)
        self.ranks = ranks
        self._fingerprint = json.loads(json.dumps(fingerprint))
        self._overwrite = overwrite
        self._lock: Any = None
        self.kept = 0
        """Units that an earlier start had finished."""

    def __enter__(self) -> ConversionJob:
        if self.out.exists() and not self._overwrite:
            raise CheckpointError(f"{self.out} exists; remove it, choose another folder, or ask for --overwrite")
        if self.out.exists() and not self.out.is_dir():
            raise CheckpointError(f"{self.out} is a file, expected a folder or nothing")
        if self.ranks.rank == 0:
            with self.disk_errors():
                self._claim()
        self.ranks.wait()
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def _claim(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / _LOCK).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(f"another process writes {self.folder}; wait for it or stop it") from error
        job = self.folder / _JOB
        others = [entry.name for entry in self.folder.iterdir() if entry.name not in (_LOCK, _JOB)]
        if others and not job.is_file():
            raise CheckpointError(
                f"{self.folder} holds {some(others)} and is not what an interrupted conversion leaves (it may be a "
                "folder that --overwrite has replaced); remove it, or give it another name"
            )
        if not job.is_file() or job.read_bytes() != self._identity():
            for entry in self.folder.iterdir():
                if entry.name != _LOCK:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            write_atomically(job, self._identity())

    def _identity(self) -> bytes:
        return json.dumps(self._fingerprint, sort_keys=True, indent=1).encode()

    @contextmanager
    def disk_errors(self) -> Iterator[None]:
        """What the disk says becomes a CheckpointError that tells what is left."""
        try:
            yield
        except MegarlError:
            raise
        except (
            OSError,
            RuntimeError,
            SafetensorError,
        ) as error:  # torch and safetensors have their own for a full disk
            raise CheckpointError(
                f"{self.folder} cannot be written ({error}); {self.out} is as it was. What is finished stays: run "
                "the same command again to go on"
            ) from error

    def run(
        self,
        units: Sequence[Any],
        sizes: Sequence[int],
        write: Callable[[int, Any], tuple[Path, Any]],
        finish: Callable[[list[Any]], None],
    ) -> None:
        """Write this rank's unfinished units with ``write(number, unit) -> (file, record)``, each made to last before
        its record is kept; then rank 0 calls ``finish`` with the records of all units, in order."""
        mine = list(self.ranks.share(units))
        with progress_bar("converting", sum(sizes[number] for number, _ in mine), self.ranks.rank == 0) as advance:
            for number, unit in mine:
                if self._record(number) is None:
                    with self.disk_errors():
                        file, record = write(number, unit)
                        _sync_file(file)
                        kept = {"file": file.name, "bytes": file.stat().st_size, "record": record}
                        write_atomically(self._record_file(number), pickle.dumps(kept))
                else:
                    self.kept += 1
                advance(sizes[number])
        self.ranks.wait()
        if self.ranks.rank == 0:
            with self.disk_errors():
                records = [self._record(number) for number in range(len(units))]
                if None in records:
                    raise CheckpointError(
                        f"a unit of {self.folder} is gone; another process has written there: try again"
                    )
                finish(records)
        self.ranks.wait()

    def _record(self, number: int) -> Any:
        """What ``write`` returned, if its file is still there as it was; else None."""
        path = self._record_file(number)
        if not path.is_file():
            return None
        kept = pickle.loads(path.read_bytes())
        file = self.folder / kept["file"]
        return kept["record"] if file.is_file() and file.stat().st_size == kept["bytes"] else None

    def _record_file(self, number: int) -> Path:
        return self.folder / f".unit_{number:06d}"

    def forget(self, number: int) -> None:
        """Let the next start write this unit anew."""
        self._record_file(number).unlink(missing_ok=True)

    def publish(self, manifest: Mapping[str, Any]) -> None:
        """Give the folder its name, with ``manifest`` and the SHA-256 of every file of weights in it."""
        files = sorted(path for path in self.folder.iterdir() if path.suffix in (".safetensors", ".distcp"))
        digests = self._digests(files)
        if self.ranks.rank == 0:
            with self.disk_errors():
                text = json.dumps({**manifest, "sha256": digests}, indent=1)
                write_atomically(self.folder / MANIFEST, text.encode())
                sync_folder(self.folder)
                if self.out.exists() and not self._overwrite:
                    raise CheckpointError(
                        f"{self.out} has appeared meanwhile; {self.folder} is whole: rename one of them"
                    )
                replace_folder(self.folder, self.out)
                # Only now: until it has its name, these tell the folder from a foreign one.
                for entry in (*self.out.glob(".unit_*"), self.out / _JOB, self.out / _LOCK):
                    entry.unlink()
        self.ranks.wait()

    def _digests(self, files: Sequence[Path]) -> dict[str, str]:
        mine = {file.name: sha256_of(file) for _, file in self.ranks.share(files)}
        if self.ranks.size == 1:
            return mine
        gathered: list[dict[str, str]] = [{}] * self.ranks.size
        dist.all_gather_object(gathered, mine)
        return {name: digest for part in gathered for name, digest in sorted(part.items())}


def partial_of(out: Path) -> Path:
    """What a folder is called until it is whole."""
    if not out.name:
        raise ConfigError(f"{out} cannot be written; name a folder")
    return out.with_name(out.name + ".partial")


def require_apart(out: Path, *sources: Path | None) -> None:
    """ConfigError if ``out``, or the folder in which it is made, is a source or has one inside."""
    written = (out.resolve(), partial_of(out.resolve()))
    for source in sources:
        if source is not None and {source.resolve(), *source.resolve().parents} & set(written):
            raise ConfigError(f"{out} would replace its own source {source}; choose another folder")


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def require_unchanged(folder: Path, ranks: Ranks) -> bool:
    """Compare the files of a folder that a conversion wrote with the checksums that it left; False if it left none.

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


def describe(files: Iterable[Path]) -> list[list[Any]]:
    """(name, bytes, time of change) of files: tells a source from another."""
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(files)]


@contextmanager
def progress_bar(label: str, num_bytes: int, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Inside, the yielded function takes the bytes that are done."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not enabled)
    with bar:
        task = bar.add_task(label, total=num_bytes)
        yield lambda done: bar.advance(task, done)


def _sync_file(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
