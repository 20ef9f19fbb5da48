"""Runs a server as its child process, and kills the server when the starting process is gone.

``server`` runs ``python reaper.py PARENT_PID SECRET_FILE COMMAND...`` in a session of its own. The process group then
holds the reaper, the server and all its children. A parent killed with SIGKILL cannot clean up, but the reaper gets a
new parent, and kills the group. PR_SET_PDEATHSIG would not do: it reaches only the child, and fires at the end of the
starting thread. Imports the standard library only, to stay small.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

POLL_S = 0.2


def watch(parent_pid: int, secret_file: str, command: list[str]) -> int:
    """Returns the exit code of ``command``; 128 + signal number if a signal ended it, as in a shell.

    ``secret_file`` (empty: none) is always removed at the end.
    """
    # SIGTERM goes to the whole group: the server ends, and the reaper stays to report the exit code. A handler, because
    # the child would inherit SIG_IGN.
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        # Polls the parent's id: a pipe would stay open in processes that the parent forks.
        while (code := child.poll()) is None and os.getppid() == parent_pid:
            time.sleep(POLL_S)
    finally:
        if secret_file:
            with contextlib.suppress(FileNotFoundError):  # the parent has removed the file
                os.unlink(secret_file)
    if code is None:
        print(f"megarl: process {parent_pid}, which started this server, is gone: killing it", flush=True)
        code = -signal.SIGKILL
        os.killpg(0, signal.SIGKILL)  # kills this process too
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(watch(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
