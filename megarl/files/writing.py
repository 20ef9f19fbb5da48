"""Write files so that they appear complete or not at all, even if the writer is killed."""

import ctypes
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError, DataError
from megarl.files.foreign_json import read_object

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def write_atomically(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file so that a reader sees the old content or the new content, even after a kill.

    durable: wait until the content is on the disk. OSError names the file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # write() sets no name
        raise
    finally:
        temporary.unlink(missing_ok=True)


def read_record(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file is missing or damaged."""
    with suppress(DataError):
        return read_object(path)
    return {}


def model_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a Hugging Face folder besides the weights: config, tokenizer, code. Without megarl's lists.

    ConfigError for a link that leads out of the folder, which would hand on any file of the reader. Links into the
    ``blobs`` of Hugging Face's cache are allowed.
    """
    inside = folder.resolve()
    blobs = inside.parent.parent / "blobs" if inside.parent.name == "snapshots" else inside
    for file in folder.iterdir():
        is_skipped = file.suffix in _WEIGHTS or file.name.endswith(".index.json") or file.name.startswith(".megarl")
        if file.is_file() and not is_skipped:
            if not {inside, blobs} & {*(target := file.resolve()).parents}:
                raise ConfigError(f"{file} is a link to {target}, outside of its folder; put the file itself there")
            yield file


def exchange(first: Path, second: Path) -> bool:
    """Exchange two names in a single step; return False if the file system cannot. OSError for other failures."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(second))


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk, for a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(folder: Path) -> None:
    """Flush every file of a folder, and the folder."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def find_tokenizer_code(folder: Path) -> str | None:
    """Return the tokenizer class in the code of a Hugging Face folder (``auto_map``); None without a class."""
    table: Any = read_record(folder / "tokenizer_config.json").get("auto_map")
    classes = table.get("AutoTokenizer") if isinstance(table, dict) else table
    return next((str(name) for name in classes if name), None) if isinstance(classes, list) else classes


def describe_write_error(error: BaseException, folder: Path) -> str:
    """Return in a line why a write to a folder failed, and the free space of the file system.

    torch and Megatron report a failed write without the cause ("unexpected pos 64"); the free space tells of a full
    disk.
    """
    return f"{' '.join(str(error).split())[-300:]}; {describe_room(folder)}"


def describe_room(folder: Path) -> str:
    """Return free space and size of a folder's file system, in words."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    usage = shutil.disk_usage(place)
    return f"{usage.free / 2**30:.3g} of {usage.total / 2**30:.3g} GiB are free in {place}"
