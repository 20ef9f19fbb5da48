"""Files and folders that are there as a whole or not at all, whatever kills the writer."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file so that readers, and a kill at any moment, see the old content or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def model_files(folder: Path) -> Iterator[Path]:
    """The files of a Hugging Face folder that are no weights: config, tokenizer, code."""
    for file in folder.iterdir():
        if file.is_file() and file.suffix not in _WEIGHTS and not file.name.endswith(".index.json"):
            yield file


def replace_folder(new: Path, target: Path) -> None:
    """Gives folder ``new`` the name ``target`` in one step; a folder that had the name before is removed.

    At every moment ``target`` is the old folder or the new one. File systems that cannot exchange two names (some
    network ones) have a moment in which the old one is called ``target.old`` and the new one has its old name.
    Raises OSError.
    """
    if not target.exists():
        new.rename(target)
    elif _exchange(new, target):
        shutil.rmtree(new)
    else:
        aside = target.with_name(target.name + ".old")
        target.rename(aside)
        new.rename(target)
        shutil.rmtree(aside)
    sync_folder(target.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names at once; False where system or file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(second))


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last through a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
