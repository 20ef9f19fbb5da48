"""Why a file could not be written: the system's own words, and the room on the disk.

torch and Megatron report a failed write without the cause ("enforce fail at inline_container.cc:672 ... unexpected
pos 64"). A small file is then written, to ask the disk again.
"""

import os
import shutil
import tempfile
from pathlib import Path

_WITHOUT_CAUSE = ("inline_container", "unexpected pos", "<class 'OSError'>", "iostream error")
_PROBE_BYTES = 1 << 20


def describe_write_error(error: BaseException, folder: Path) -> str:
    """Return in a line why a write to a folder failed, and the free space of the file system."""
    reason = " ".join(str(error).split())[-300:]
    if any(words in reason for words in _WITHOUT_CAUSE):
        reason = (
            _probe(_existing(folder)) or f"a write was cut short, as on a full disk, and one more is not ({reason})"
        )
    return f"{reason}; {describe_room(folder)}"


def describe_room(folder: Path) -> str:
    """Return free space and size of a folder's file system, in words."""
    place = _existing(folder)
    usage = shutil.disk_usage(place)
    return f"{usage.free / 2**30:.3g} of {usage.total / 2**30:.3g} GiB are free in {place}"


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())


def _probe(folder: Path) -> str | None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{error.strerror} ([Errno {error.errno}])"
    return None
