"""Runs one command as its child and takes it down when the process that asked for it is gone.

``server`` starts this file as ``python reaper.py PARENT_PID SECRET_FILE COMMAND...`` in a session of
its own, so that the process group holds the reaper, the server and all its children. A parent killed with SIGKILL
cleans up nothing; the reaper sees that it has a new parent and kills the group. Standard library only: it is small.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from types import FrameType

POLL_S = 0.2


def _stay(_signal: int, _frame: FrameType | None) -> None:
    """SIGTERM goes to the whole group: the server ends by it, and the reaper waits to report how it ended."""


def watch(parent_pid: int, secret_file: str, command: list[str]) -> int:
    """Returns the exit code of ``command`` (128 + signal number if a signal ended it, as a shell does).

    ``secret_file`` (empty: none) is removed at the end, whatever the end is.
    """
    # A handler, not SIG_IGN: the child would inherit that.
    signal.signal(signal.SIGTERM, _stay)
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        # The parent's id and not a pipe: a pipe stays open in every process that the parent has forked meanwhile.
        while (code := child.poll()) is None and os.getppid() == parent_pid:
            time.sleep(POLL_S)
    finally:
        if secret_file:
            with contextlib.suppress(FileNotFoundError):  # the parent was first
                os.unlink(secret_file)
    if code is None:
        print(f"megarl: process {parent_pid}, which started this server, is gone: killing it", flush=True)
        code = -signal.SIGKILL
        os.killpg(0, signal.SIGKILL)  # this process included
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(watch(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
