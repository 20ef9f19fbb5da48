"""Marks of tool calls, which distinguish the leftovers of a killed run from the processes of a living run."""

import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

MARK = "MEGARL_TOOL_CALL"
"""Environment variable with the mark of the call, in all processes of the call."""
FOLDER = "megarl-tool-"
"""Name of a scratch folder, before the mark."""
END_S = 30.0
"""Time limit for the kernel to remove killed processes."""


def new_mark() -> str:
    """Return a unique mark, which names this process: machine, PID namespace, id and start time."""
    return f"{_pid_namespace()}.{os.getpid()}.{_start_time(os.getpid())}.{secrets.token_hex(16)}"


def is_left(mark: str) -> bool:
    """Whether the process that made the mark has ended; False for marks of other machines and namespaces."""
    namespace, pid, start_time, *_ = [*mark.split("."), "", "", ""]
    return namespace == _pid_namespace() and pid.isdigit() and _start_time(int(pid)) != start_time


def reap() -> None:
    """End the processes and remove the scratch folders of killed runs; ``cgroup`` removes the groups."""
    kill_marked(is_left)
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*.*.*.*"):
        with suppress(OSError):
            if is_left(folder.name.removeprefix(FOLDER)) and folder.lstat().st_uid == os.geteuid():
                remove(folder)


def kill_marked(is_target: Callable[[str], bool]) -> None:
    """Kill all processes whose mark is a target, repeatedly until no such process is alive."""
    deadline = time.monotonic() + END_S
    killed = True
    while killed and time.monotonic() < deadline:
        killed = False
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.status() != psutil.STATUS_ZOMBIE and is_target(process.environ().get(MARK, "")):
                    killed = True
                    process.kill()


def remove(folder: Path) -> None:
    """Remove a folder that code may have made unreadable, or deeper than the longest path; do not follow links."""
    for words in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        subprocess.run([*words, "--", folder], stderr=subprocess.DEVNULL, check=False)


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def _pid_namespace() -> str:
    # The first namespace of every machine has the same number, and machines may share the temporary folder.
    return f"{_BOOT_ID.read_text().strip()}-{os.stat('/proc/self/ns/pid').st_ino}"


def _start_time(pid: int) -> str | None:
    """Return the start time in clock ticks since the machine's start; None if the process has ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if words[0] in (b"Z", b"X") else words[19].decode()
