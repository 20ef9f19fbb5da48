"""Why a rank has failed, in a file for ``megarl launch``, which itself sees only exit codes."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from megarl.data.files import read_record
from megarl.errors import MegarlError

VARIABLE = "MEGARL_FAILURE"
"""The environment variable with the path of the file."""


def write_failure(error: MegarlError) -> None:
    """Write kind and message of the error, unless another rank has already written one.

    An error that only says that another rank failed gives way to one that knows the cause. Does nothing without
    ``megarl launch``, and on a file system that refuses.
    """
    if VARIABLE not in os.environ:
        return
    path = Path(os.environ[VARIABLE])
    record = {"kind": type(error).__name__, "message": " ".join(str(error).split()), "second_hand": error.second_hand}
    own = path.with_name(f".{path.name}.{os.environ.get('RANK', '0')}")
    with suppress(OSError):
        own.write_text(json.dumps(record))
        try:
            os.link(own, path)  # the whole file at once, and never over that of another rank
        except FileExistsError:
            if not error.second_hand and read_record(path).get("second_hand"):
                own.replace(path)
        except OSError:  # a file system without links
            own.replace(path)
        own.unlink(missing_ok=True)
