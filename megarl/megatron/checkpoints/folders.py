"""The folders of checkpoints: found, written under another name, put in place, removed, set aside; and their manifests.

A checkpoint is a folder ``step_<n>``. A save writes ``step_<n>.partial``, and renames the folder when all files and the
manifest are on disk: a folder with the final name was once complete.

The manifest holds run, step, and the size and SHA-256 of every file. It is written last and compared before loading. A
checkpoint holds exactly what one save of one run wrote, or counts as damaged: a changed, truncated, missing or
additional file, a file of another step, a renamed folder.
"""

import hashlib
import json
import os
import re
import reprlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from megarl.errors import DamageError, DataError, SaveError, refusal, refuse_if, reworded
from megarl.files.foreign_json import MOST_JSON_BYTES, parse_json, read_regular
from megarl.files.outputs import IsOwn, find_foreign, free_name, matches, partial_of, remove_own, replace_folder
from megarl.files.writing import describe_write_error, read_record, sha256_of, sync, write_atomically
from megarl.megatron.distributed import from_main_rank, gather_on_main_rank, is_collective_error, is_main_rank

MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d+)")
_WRITTEN = ("__*_*.distcp*", ".metadata*", "metadata.json*", "common.pt*", MANIFEST, ".*.tmp")
"""Names of what Megatron and megarl write into the folder of a checkpoint."""
# CheckpointException is torch's: a BaseException, no Exception.
WRITE_ERRORS = (dist_checkpointing.core.CheckpointingException, CheckpointException, OSError, RuntimeError)


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of every complete checkpoint in ``folder``, oldest first; not folders of other content."""
    entries = folder.iterdir() if folder.is_dir() else ()
    numbered = ((int(match[1]), path) for path in entries if (match := _NAME.fullmatch(path.name)) and path.is_dir())
    return sorted((step, path) for step, path in numbered if _is_checkpoint([*os.listdir(path)]))


def _is_checkpoint(names: Sequence[str]) -> bool:
    return not names or any(matches(name, (MANIFEST, ".metadata", "__*_*.distcp")) for name in names)


def _is_written(name: str, _: os.stat_result) -> bool:
    return matches(name, _WRITTEN)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an error of writing ``path`` into a SaveError, and remove the partial folder, which may fill a disk."""
    try:
        yield
    except WRITE_ERRORS as error:
        if is_collective_error(error):
            raise
        failed = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        reason = describe_write_error(failed[0], partial_of(path)) if failed else "another rank says why"
        if is_main_rank():
            _remove_partial(partial_of(path))
        earlier = [folder.name for _, folder in complete_checkpoints(path.parent)]
        consequence = f"{earlier[-1]} is as it was" if earlier else "there is no earlier checkpoint"
        raise SaveError(f"{path} could not be written: {reason}; {consequence}") from error


def clear_partial(folder: Path, step: int, run: str) -> Path:
    """Make an empty partial folder for checkpoint ``step`` and return the final path; a collective call.

    SaveError if the folder holds anything that no save of ``run`` wrote.
    """
    path = folder / step_name(step)

    def make() -> None:
        for stale in folder.glob("step_*.partial"):
            _remove_partial(stale)
        for place, is_own in ((partial_of(path), _is_written), (path, saved_files(path, run))):
            if foreign := _find_foreign(place, is_own):
                raise SaveError(refusal("foreign_checkpoint", place=place, foreign=foreign[0]))
        with explained(path):
            partial_of(path).mkdir(parents=True, exist_ok=True)

    from_main_rank(make)
    return path


def _find_foreign(place: Path, is_own: IsOwn) -> list[str]:
    is_other = os.path.lexists(place) and (place.is_symlink() or not place.is_dir())
    return ["a link or a file"] if is_other else find_foreign(place, is_own)


def _remove_partial(folder: Path) -> None:
    with suppress(OSError):
        remove_own(folder, _is_written)


def set_aside(damaged: Iterable[Path]) -> None:
    """Rename damaged checkpoints to *.damaged; no command loads such folders."""
    for path in damaged:
        path.rename(free_name(path.with_name(f"{path.name}.damaged")))


def publish(path: Path, run: str, files: "Files", keep: int, keep_every: int) -> None:
    """Put a written checkpoint in place with a manifest, and keep the newest ``keep``; a collective call.

    Multiples of ``keep_every`` stay besides; 0: none.

    ``files``: written and flushed by the rank's processes. The whole checkpoint and its name are on disk before an
    older checkpoint is removed.
    """
    partial = partial_of(path)
    sync(partial)  # each rank: the names of its files
    by_rank = gather_on_main_rank(files)

    def put_in_place() -> None:
        with explained(path):
            written = {name: record for records in by_rank or [] for name, record in records.items()}
            manifest = {"run": run, "step": int(path.name.removeprefix("step_")), "files": _complete(partial, written)}
            write_atomically(partial / MANIFEST, _encode(manifest))
            sync(partial)
            replace_folder(partial, path, lambda folder: saved_files(folder, run))
        complete = complete_checkpoints(path.parent)
        for old in (old for step, old in complete[:-keep] if old != path and (not keep_every or step % keep_every)):
            if foreign := _find_foreign(old, saved_files(old, run)):
                warnings.warn(refusal("kept_checkpoint", old=old, keep=keep, foreign=foreign[0]), stacklevel=2)
                continue
            # remains after a kill are no checkpoint
            _remove_partial(old.rename(partial_of(old)))

    from_main_rank(put_in_place)


def _complete(folder: Path, written: "Files") -> "Files":
    """``written`` and the small files of the main rank, which are flushed and read here."""
    files = dict(written)
    for file in folder.iterdir():
        if file.name not in files:
            sync(file)
            files[file.name] = (file.stat().st_size, sha256_of(file))
    for name, (size, _) in files.items():
        if (actual := (folder / name).stat().st_size) != size:
            raise SaveError(f"{folder / name} has {actual} bytes, and {size} were written")
    return files


Files = Mapping[str, tuple[int, str]]
"""Bytes and SHA-256 of each file by name."""
_CLOCKS_NS = 60 * 10**9
"""The clocks of two nodes differ by less."""


def _encode(record: Mapping[str, Any]) -> bytes:
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    return json.dumps({**record, "sha256": digest}, sort_keys=True, indent=1).encode()


def read_manifest(path: Path, run: str = "") -> Files:
    """The files of checkpoint ``path``; DamageError if the manifest or the names and sizes of files are not right.

    run: the run that must have saved the checkpoint; empty for any.
    """
    file = path / MANIFEST
    refuse_if(not file.is_file(), DamageError, "no_manifest", path=path, manifest=MANIFEST)
    record = _read(file)
    if path.name.startswith("step_") and path.name != step_name(record["step"]):
        raise DamageError(f"{path} is the checkpoint of step {record['step']} under another name")
    refuse_if(run and record["run"] != run, DamageError, "manifest_of_other_run", path=path, record=record, run=run)
    files = {name: (size, digest) for name, (size, digest) in record["files"].items()}
    _require_files(path, files)
    return files


def read_run(path: Path) -> str:
    """The run that has saved checkpoint ``path``; empty if its manifest does not say."""
    with suppress(DamageError):
        return _read(path / MANIFEST)["run"]
    return ""


def _read(file: Path) -> dict[str, Any]:
    """A manifest of exactly these fields and types; DamageError for anything else."""
    with reworded(DataError, DamageError, f"{file} is not the file that was written (", ")"):
        data = read_regular(file, MOST_JSON_BYTES)
        record = parse_json(data, str(file), MOST_JSON_BYTES)
    if not isinstance(record, dict) or not record.pop("sha256", None) or _encode(record) != data:
        raise DamageError(f"{file} is not the file that was written")
    kinds = {key: type(value) for key, value in record.items()}
    if kinds != {"run": str, "step": int, "files": dict} or not all(map(_is_file, record["files"].items())):
        content = reprlib.repr(record)
        raise DamageError(f"{file} holds {content}, expected run, step, and bytes and SHA-256 of each file")
    return record


def _is_file(entry: tuple[str, Any]) -> bool:
    name, of_file = entry
    is_pair = isinstance(of_file, list) and [type(value) for value in of_file] == [int, str]
    return is_pair and of_file[0] >= 0 and name == Path(name).as_posix() and not {"..", "/"} & {*Path(name).parts}


def _require_files(path: Path, files: Files) -> None:
    entries = (file for file in path.rglob("*") if file.is_file() and not file.name.startswith(".nfs"))
    sizes = {str(file.relative_to(path)): file.stat().st_size for file in entries}
    del sizes[MANIFEST]
    for name in sorted({*sizes, *files}):
        refuse_if(name not in sizes, DamageError, "missing_file", path=path, name=name)
        refuse_if(name not in files, DamageError, "unsaved_file", path=path, name=name)
        if sizes[name] != (size := files[name][0]):
            raise DamageError(f"{path / name} has {sizes[name]} bytes, expected {size}")


def saved_files(path: Path, run: str) -> IsOwn:
    """Return which content of folder ``path`` is as ``run`` saved it: by size, and by SHA-256 if it is newer than the
    manifest.
    """
    record = read_record(path / MANIFEST)
    files: Any = record.get("files") if record.get("run") == run else None

    def is_saved(name: str, status: os.stat_result) -> bool:
        if not isinstance(files, dict) or name == MANIFEST:
            return isinstance(files, dict)
        size, digest = files.get(name, (None, ""))
        is_older = status.st_mtime_ns <= (path / MANIFEST).stat().st_mtime_ns + _CLOCKS_NS
        return status.st_size == size and (is_older or sha256_of(path / name) == digest)

    return is_saved


def step_name(step: int) -> str:
    return f"step_{step:07d}"
