"""The manifest of a checkpoint: run, step, and the size and SHA-256 of every file.

It is written last and compared before loading. A checkpoint holds exactly what one save of one run wrote, or counts as
damaged: a changed, truncated, missing or additional file, a file of another step, a renamed folder.
"""

import hashlib
import json
import os
import random
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megarl.errors import DamageError, DataError
from megarl.files.foreign_json import MOST_JSON_BYTES, parse_json, read_regular
from megarl.files.outputs import IsOwn
from megarl.files.writing import read_record, sha256_of, write_atomically

MANIFEST = "manifest.json"
Files = Mapping[str, tuple[int, str]]
"""Bytes and SHA-256 of each file by name."""
_SMALL = 64 << 20
"""Files up to this size are always compared."""
_CLOCKS_NS = 60 * 10**9
"""The clocks of two nodes differ by less."""


def write_manifest(folder: Path, run: str, step: int, files: Files) -> None:
    write_atomically(folder / MANIFEST, _encode({"run": run, "step": step, "files": files}))


def _encode(record: Mapping[str, Any]) -> bytes:
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    return json.dumps({**record, "sha256": digest}, sort_keys=True, indent=1).encode()


def read_manifest(path: Path, run: str = "") -> Files:
    """The files of checkpoint ``path``; DamageError if the manifest or the names and sizes of files are not right.

    run: the run that must have saved the checkpoint; empty for any.
    """
    file = path / MANIFEST
    if not file.is_file():
        raise DamageError(f"{path} has no {MANIFEST}, which a save writes last")
    record = _read(file)
    if path.name.startswith("step_") and path.name != step_name(record["step"]):
        raise DamageError(f"{path} is the checkpoint of step {record['step']} under another name")
    if run and record["run"] != run:
        raise DamageError(f"{path} is of run {record['run']}, expected {run} (remove run_id if it is of this run)")
    files = {name: (size, digest) for name, (size, digest) in record["files"].items()}
    _require_files(path, files)
    return files


def read_run(path: Path) -> str:
    """The run that has saved checkpoint ``path``; empty if its manifest does not say."""
    try:
        return _read(path / MANIFEST)["run"]
    except DamageError:
        return ""


def _read(file: Path) -> dict[str, Any]:
    """A manifest of exactly these fields and types; DamageError for anything else."""
    try:
        data = read_regular(file, MOST_JSON_BYTES)
        record = parse_json(data, str(file), MOST_JSON_BYTES)
    except DataError as error:
        raise DamageError(f"{file} is not the file that was written ({error})") from error
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
        if name not in sizes:
            raise DamageError(f"{path} lacks {name}")
        if name not in files:
            raise DamageError(f"{path} holds {name}, with which it was not saved")
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


def choose(files: Files, num_bytes: float) -> list[tuple[str, str]]:
    """(name, SHA-256) of all small files and of others in random order, up to ``num_bytes`` in all."""
    order = sorted(files, key=lambda name: (files[name][0] > _SMALL, random.SystemRandom().random()))
    sample, budget = [], num_bytes
    for name in order:  # in an order that changes no random generator of the run
        size, digest = files[name]
        budget -= size
        if size <= _SMALL or budget >= 0:
            sample.append((name, digest))
    return sample


def find_change(path: Path, sample: Iterable[tuple[str, str]]) -> str | None:
    """Return which of these files has changed since the save; None if all are."""
    for name, digest in sample:
        if sha256_of(path / name) != digest:
            return f"{path / name} is not the file that was written: {MANIFEST} has another SHA-256"
    return None


def step_name(step: int) -> str:
    return f"step_{step:07d}"
