"""A control group for each call of a tool, if this process may make groups: it also counts the kernel's memory.

Root may make groups nearly everywhere but in containers; other users may make groups below a group of their own, such
as the group of ``systemd-run --user --scope``. Version 2 has a single tree, version 1 a tree for memory and a tree for
processes.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from megarl.engines.tools.leftovers import is_left, new_mark

_VERSIONS = (({"memory.max", "pids.max"},), ({"memory.limit_in_bytes"}, {"pids.max"}))
"""Version -> tree -> files that the group of a call must have."""
_JOIN = 'n=$0; while [ "$n" -gt 0 ]; do echo $$ >"$1/cgroup.procs" || exit 125; shift; n=$((n - 1)); done; exec "$@"'


class Group:
    """The groups of one call: a folder in each tree."""

    def __init__(self, parents: Sequence[Path], memory_bytes: int, num_processes: int, mark: str) -> None:
        """Make the groups; OSError if that fails. memory_bytes: all processes, files in memory, and kernel memory."""
        self.folders = [parent / f"megarl-{mark}" for parent in parents]
        values = dict.fromkeys(("memory.max", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), memory_bytes)
        try:
            for folder in self.folders:
                folder.mkdir()
                for name, value in (values | {"memory.swap.max": 0, "pids.max": num_processes}).items():
                    if (folder / name).exists():
                        (folder / name).write_text(str(value))
        except OSError:
            self.remove()
            raise

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command that joins the groups and then runs ``words``."""
        return ["/bin/sh", "-c", _JOIN, str(len(self.folders)), *map(str, self.folders), *words]

    @property
    def was_full(self) -> bool:
        """Whether the kernel has killed a process for the memory of the group."""
        for file in (folder / name for folder in self.folders for name in ("memory.events", "memory.oom_control")):
            with suppress(OSError):
                if any(line.startswith("oom_kill ") and line != "oom_kill 0" for line in file.read_text().splitlines()):
                    return True
        return False

    def remove(self) -> None:
        """Remove the groups, after the end of the processes."""
        for folder in self.folders:
            with suppress(OSError):
                folder.rmdir()


def find_parents() -> tuple[Path, ...]:
    """Return the parent of the groups of a call in each tree; empty if this process may not make groups."""
    places = list(_own_groups())
    for trees in _VERSIONS:
        parents = [next((place for place in places if _can_join_below(place, files)), None) for files in trees]
        if None not in parents:
            return tuple(place for place in parents if place)
    return ()


def _own_groups() -> Iterator[Path]:
    """Yield the groups of this process in each tree, and the parents, inner groups first."""
    with suppress(OSError, ValueError):
        memberships = [line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines()]
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            (_, _, _, root, point, *_), (kind, _, options) = (half.split() for half in line.split(" - "))
            usable = {"cgroup": {*options.split(",")} & {"memory", "pids"}, "cgroup2": {""}}.get(kind, set())
            for controllers, path in memberships:
                if usable & {*controllers.split(",")} and Path(path).is_relative_to(root):
                    inner = Path(point) / Path(path).relative_to(root)
                    yield from (place for place in (inner, *inner.parents) if place.is_relative_to(point))


def _can_join_below(place: Path, files: set[str]) -> bool:
    for folder in place.glob("megarl-*.*.*.*"):
        if is_left(folder.name.removeprefix("megarl-")):
            with suppress(OSError):
                for pid in (folder / "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            with suppress(OSError):  # if processes are still ending, the next start removes the folder
                folder.rmdir()
    try:
        group = Group([place], 1 << 30, 8, new_mark())
    except OSError:
        return False
    try:
        has_files = all((group.folders[0] / name).exists() for name in files)
        return has_files and subprocess.run(group.command(["true"]), capture_output=True, check=False).returncode == 0
    finally:
        group.remove()
