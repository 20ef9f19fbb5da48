"""Open the files of a stranger's folder: regular files of a limited size, and nothing that could block.

A FIFO waits for a writer, a device may never end, and merely opening a device may have an effect. Therefore a file is
checked before the opening, opened without waiting, and checked again.
"""

import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

from megarl.errors import DataError
from megarl.files.foreign_json import parse_json

MOST_JSON_BYTES = 64 << 20
"""Limit of a file that is parsed as a whole; the largest known tokenizer.json has 34 MB."""
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    **dict.fromkeys((stat.S_IFCHR, stat.S_IFBLK), "a device"),
}


def is_file_name(value: object) -> bool:
    """Whether a value is the plain name of a file in a folder, without a path."""
    if not isinstance(value, str) or value in ("", "..") or re.search("[\0\ud800-\udfff]", value):
        return False
    return Path(value).name == value and len(os.fsencode(value)) <= 255


def require_regular(path: Path) -> None:
    """Raise DataError unless ``path``, links followed, is a regular file or does not exist."""
    if os.path.lexists(path) and not os.path.isfile(path):
        kind = _KINDS.get(stat.S_IFMT(os.stat(path).st_mode)) if os.path.exists(path) else "a link to nothing"
        raise DataError(f"{path} is {kind or 'no file'}, expected a regular file")


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. DataError for anything but a regular file, OSError from the system."""
    require_regular(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # exchanged after the first check
        os.close(descriptor)
        raise DataError(f"{path} is no regular file any more")
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file. DataError for a larger file, and for an unreadable file."""
    try:
        with open_regular(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > max_bytes:
                raise DataError(f"{path} has {size} bytes, expected at most {max_bytes}")
            return file.read(max_bytes)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. DataError, naming the file, for anything else."""
    record = parse_json(read_regular(path, MOST_JSON_BYTES), str(path), MOST_JSON_BYTES)
    if not isinstance(record, dict):
        raise DataError(f"{path} holds no JSON object")
    return record
