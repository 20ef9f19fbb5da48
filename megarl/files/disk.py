"""Says why a file could not be written: the system's own words, and the room on the disk.

torch and Megatron tell of a failed write without its cause ("enforce fail at inline_container.cc:672 ... unexpected
pos 64"). The disk is then asked again, by a small file.
"""

import os
import shutil
import tempfile
from pathlib import Path

_WITHOUT_CAUSE = ("inline_container", "unexpected pos", "<class 'OSError'>", "iostream error")
_PROBE_BYTES = 1 << 20


def describe_write_error(error: BaseException, folder: Path) -> str:
    """Why something in a folder could not be written, in one line, with the free space of its file system."""
    place = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
    reason = " ".join(str(error).split())[-300:]
    if any(words in reason for words in _WITHOUT_CAUSE):
        reason = _probe(place) or f"a write was cut short, as on a full disk, and one more is not ({reason})"
    return f"{reason}; {describe_room(place)}"


def describe_room(folder: Path) -> str:
    """The free space and the size of a folder's file system."""
    place = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
    usage = shutil.disk_usage(place)
    return f"{usage.free / 2**30:.3g} of {usage.total / 2**30:.3g} GiB are free in {place}"


def _probe(folder: Path) -> str | None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{error.strerror} ([Errno {error.errno}])"
    return None
