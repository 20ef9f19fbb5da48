"""One writer for a run folder: a lock with the name of its holder, which a crash releases.

The kernel's lock on the file (flock) ends with the process, in any way. On some network file systems only a single node
sees the lock. The holder therefore also touches the file every few seconds; a file with recent touches from a different
node is held.
"""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from megarl.errors import ConfigError, refusal
from megarl.files.writing import read_record

BEAT_S = 5.0
"""How often a holder should ``beat``."""
_GLANCE_S = 1.0
STALE_S = 60.0
"""Without a touch for so long, a holder on a different node is gone."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of file systems without flock."""


class RunLock:
    """A context manager that holds ``path``."""

    def __init__(
        self, path: Path, tell: Callable[[str], None] = lambda _: None, *, wait_s: float = 0, stale_s: float = STALE_S
    ) -> None:
        """tell: gets a line when the lock waits; wait_s: for a holder on this node; stale_s: for another node's."""
        self._path, self._tell, self._wait_s, self._stale_s = path, tell, wait_s, stale_s
        self._file: int | None = None
        self._owner: dict[str, Any] = {}

    def __enter__(self) -> Self:
        """Take the lock. ConfigError with the holder's name if there is a holder, or if the file is no lock."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            if os.pread(self._file, 1, 0) not in (b"", b"{", b"\0"):
                raise ConfigError(f"{self._path} is no lock of megarl; move it away, or choose another run.dir")
            self._await_kernel(self._file)
            self._await_other_node()
            since, job = time.strftime("%Y-%m-%d %H:%M:%S"), os.environ.get("SLURM_JOB_ID")
            self._owner = {"host": socket.gethostname(), "pid": os.getpid(), "job": job, "since": since}
            self._write(self._owner)
        except BaseException as error:
            self._close()
            if isinstance(error, OSError):
                raise ConfigError(f"run.dir: {self._path.parent} cannot be written: {error}") from None
            raise
        os.register_at_fork(after_in_child=self._close)  # a forked process may outlive the holder
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            try:
                with suppress(OSError):  # an error here must not hide the outcome of the block
                    if read_holder(self._path) == self._owner:
                        self._write({})
            finally:
                self._close()

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def beat(self) -> None:
        """Touch the file. ConfigError if another process holds the lock now.

        On file systems with node-local locks two runs may both acquire the lock; the later writer keeps it.
        """
        if self._file is not None:
            holder = read_holder(self._path)
            if holder is None:  # two runs wrote at the same time: the record that is read afterwards decides
                self._write(self._owner)
            elif holder != self._owner:
                raise self._refusal()
            os.utime(self._file)

    def _await_kernel(self, file: int) -> None:
        # ``is_held`` takes the lock for a moment, which is no reason to refuse.
        until, has_told = time.monotonic() + max(self._wait_s, _GLANCE_S), False
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise self._refusal() from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                return None  # no flock here: rely on the touched file alone
            if not has_told and self._wait_s > _GLANCE_S:
                self._tell(f"{self._path} is held by {_describe(read_holder(self._path))}; waiting for its end")
                has_told = True
            time.sleep(0.2)

    def _await_other_node(self) -> None:
        """Without a holder on the node, wait for a touch by a different node."""
        holder = read_holder(self._path)
        if holder is None or holder["host"] == socket.gethostname():
            return
        job = os.environ.get("SLURM_JOB_ID")
        if job is not None and holder.get("job") == job:  # an earlier start of this job: Slurm runs one at a time
            return
        beat, until = self._path.stat().st_mtime, time.monotonic() + self._stale_s
        if self._now() - beat > self._stale_s:
            return
        self._tell(refusal("old_lock", path=self._path, holder=_describe(holder), seconds=self._stale_s))
        while time.monotonic() < until:
            if self._path.stat().st_mtime > beat:
                raise self._refusal()
            time.sleep(min(1.0, self._stale_s / 10))

    def _now(self) -> float:
        """Return the time of the file system's clock, which may differ from the node's."""
        probe = self._path.with_name(f".{self._path.name}.{socket.gethostname()}.{os.getpid()}")
        probe.touch()
        try:
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)

    def _refusal(self) -> ConfigError:
        return ConfigError(refusal("run_in_use", folder=self._path.parent, holder=_describe(read_holder(self._path))))

    def _write(self, owner: dict[str, Any]) -> None:
        """Write in place, because the lock belongs to the file and not to its name."""
        assert self._file is not None
        data = json.dumps(owner).encode()
        os.pwrite(self._file, data, 0)
        os.ftruncate(self._file, len(data))
        os.fsync(self._file)  # for readers on other nodes


def read_holder(path: Path) -> dict[str, Any] | None:
    """Return the process that took the lock and has not released the lock, dead or alive; None without a holder."""
    holder = read_record(path)
    return holder if {"host", "pid", "since"} <= holder.keys() else None


def is_held(path: Path) -> bool:
    """Return whether a process of the node holds the lock, or a process of a different node touched the file lately."""
    holder = read_holder(path)
    if holder is None:
        return False
    is_here = holder["host"] == socket.gethostname()
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            is_here = False  # no flock here: rely on the touched file alone
    return not is_here and time.time() - path.stat().st_mtime < STALE_S


def _describe(holder: dict[str, Any] | None) -> str:
    if holder is None:
        return "another process"
    job = f", Slurm job {holder['job']}" if holder.get("job") else ""
    return f"process {holder['pid']} on {holder['host']}{job}, since {holder['since']}"
