"""One writer for a run folder: a lock that a crash releases, and that says who holds it.

The kernel's lock on the file (flock) ends with its process, however that ends. Some network file systems keep such
locks to one node; so the holder also touches the file every few seconds, and a file that somebody on another node keeps
touching is held.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from megarl.errors import ConfigError

BEAT_S = 5.0
"""How often a holder should ``beat``."""
_GLANCE_S = 1.0
STALE_S = 60.0
"""A holder on another node that was not heard of for so long is gone."""


class RunLock:
    """Holds ``path``; a context manager. ``tell`` gets a line when it waits, ``wait_s`` for a holder on this node."""

    def __init__(
        self,
        path: Path,
        tell: Callable[[str], None] = lambda line: None,
        *,
        wait_s: float = 0.0,
        stale_s: float = STALE_S,
    ) -> None:
        self._path, self._tell, self._wait_s, self._stale_s = path, tell, wait_s, stale_s
        self._file: int | None = None
        self._owner: dict[str, Any] = {}

    def __enter__(self) -> RunLock:
        """ConfigError that names the holder if there is one."""
        try:
            self._take()
        except OSError as error:
            raise ConfigError(f"run.dir: {self._path.parent} cannot be written: {error}") from None
        return self

    def _take(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._await_kernel(file)
            self._await_other_node()
            self._file, self._owner = file, _owner()
            self._write(self._owner)
        except BaseException:
            self._file = None
            os.close(file)
            raise
        os.register_at_fork(after_in_child=self._forget)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            try:
                with suppress(OSError):  # the outcome of what was done under the lock counts
                    if read_holder(self._path) == self._owner:
                        self._write({})
            finally:
                os.close(self._file)
                self._file = None

    def _forget(self) -> None:
        """In a forked process, which may outlive the holder and must not hold."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def beat(self) -> None:
        """Say that the holder lives. ConfigError if another one has taken over, as two that begin on two nodes at once
        may where the file system keeps locks to one node: the later one goes on."""
        if self._file is not None:
            found = read_holder(self._path)
            if found is None:  # two wrote at once: who is read after this is the holder
                self._write(self._owner)
            elif found != self._owner:
                raise self._refusal()
            os.utime(self._file)

    def _await_kernel(self, file: int) -> None:
        # ``is_held`` takes it for a moment: no reason to be refused.
        until, told = time.monotonic() + max(self._wait_s, _GLANCE_S), False
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise self._refusal() from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                return None  # the holder's signs of life are all there is
            if not told and self._wait_s > _GLANCE_S:
                self._tell(f"{self._path} is held by {described(read_holder(self._path))}; waiting for its end")
                told = True
            time.sleep(0.2)

    def _await_other_node(self) -> None:
        """Nobody on this node holds it; wait whether somebody on another one still touches it."""
        holder = read_holder(self._path)
        if holder is None or holder["host"] == socket.gethostname() or _is_former_self(holder):
            return
        beat, until = self._path.stat().st_mtime, time.monotonic() + self._stale_s
        if self._now() - beat > self._stale_s:
            return
        self._tell(
            f"{self._path} was left by {described(holder)}; waiting up to {self._stale_s:.0f} s for a sign of it"
        )
        while time.monotonic() < until:
            if self._path.stat().st_mtime > beat:
                raise self._refusal()
            time.sleep(min(1.0, self._stale_s / 10))

    def _now(self) -> float:
        """By the clock of the file system, which need not be this node's."""
        probe = self._path.with_name(f".{self._path.name}.{socket.gethostname()}.{os.getpid()}")
        probe.touch()
        try:
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)

    def _refusal(self) -> ConfigError:
        holder = read_holder(self._path)
        return ConfigError(
            f"{self._path.parent} is in use by {described(holder)}; wait for its end, stop it, or take another run.dir"
        )

    def _write(self, owner: dict[str, Any]) -> None:
        """In place, because the lock is on this file and not on its name."""
        assert self._file is not None
        data = json.dumps(owner).encode()
        os.pwrite(self._file, data, 0)
        os.ftruncate(self._file, len(data))
        os.fsync(self._file)  # other nodes are to see it


_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Of file systems that know no flock."""


def read_holder(path: Path) -> dict[str, Any] | None:
    """Who wrote the lock and has not released it; None if nobody. It may have crashed."""
    try:
        holder = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return holder if isinstance(holder, dict) and "host" in holder else None


def is_held(path: Path) -> bool:
    """Whether a process on this node holds it, or one on another node was heard of lately."""
    holder = read_holder(path)
    if holder is None:
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return time.time() - path.stat().st_mtime < STALE_S
    return holder["host"] != socket.gethostname() and time.time() - path.stat().st_mtime < STALE_S


def described(holder: dict[str, Any] | None) -> str:
    """E.g. "process 12 on n1, Slurm job 7"."""
    if holder is None:
        return "another process"
    job = f", Slurm job {holder['job']}" if holder.get("job") else ""
    return f"process {holder['pid']} on {holder['host']}{job}, since {holder['since']}"


def _owner() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": os.environ.get("SLURM_JOB_ID"),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _is_former_self(holder: dict[str, Any]) -> bool:
    """Slurm runs one start of a job at a time: what an earlier start of this one has left is not held."""
    job = os.environ.get("SLURM_JOB_ID")
    return job is not None and holder.get("job") == job
