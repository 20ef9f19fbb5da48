from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.errors import ConfigError
from megarl.run.lock import RunLock, is_held, read_holder

HOLD = """
import sys, time
from pathlib import Path
from megarl.run.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(3600)
"""


def holder(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "run" / "lock"
    process = holder(path)
    try:
        assert is_held(path)
        with pytest.raises(ConfigError, match=rf"run is in use by process {process.pid} on .*; wait for its end"):
            RunLock(path).__enter__()
        assert is_held(path)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_crash_releases_it(tmp_path: Path, end: signal.Signals) -> None:
    path = tmp_path / "lock"
    process = holder(path)
    process.send_signal(end)
    process.wait()
    assert read_holder(path) is not None  # it could not say so
    assert not is_held(path)
    with RunLock(path):
        assert read_holder(path)["pid"] == os.getpid()  # type: ignore[index]
    assert read_holder(path) is None
    with RunLock(path):
        pass


def test_a_forked_process_does_not_hold_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    heard, told = os.pipe()
    with RunLock(path):
        child = os.fork()
        if child == 0:
            os.write(told, b"1")  # it runs, and has let go before
            time.sleep(3600.0)
            os._exit(0)
        os.read(heard, 1)
    try:
        with RunLock(path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def foreign(path: Path, **more: str) -> None:
    path.write_text(json.dumps({"host": "another-node", "pid": 12, "job": "7", "since": "then", **more}))


def test_a_node_whose_lock_is_not_seen_here_is_believed_while_it_touches_the_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    foreign(path)
    assert is_held(path)
    toucher = "import os, sys, time\nwhile True: os.utime(sys.argv[1]); time.sleep(0.1)"
    process = subprocess.Popen([sys.executable, "-c", toucher, str(path)])
    told: list[str] = []
    try:
        with pytest.raises(ConfigError, match="in use by process 12 on another-node, Slurm job 7, since then"):
            RunLock(path, told.append, stale_s=60.0).__enter__()
    finally:
        process.kill()
        process.wait()
    assert "waiting up to 60 s" in told[0]


def test_a_node_that_is_silent_has_lost_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    foreign(path)
    with RunLock(path, stale_s=0.5):
        pass
    foreign(path)
    os.utime(path, (1.0, 1.0))
    started = time.monotonic()
    with RunLock(path, stale_s=300.0):
        pass
    assert time.monotonic() - started < 150.0
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # an earlier start of this very job, on another node
    foreign(path)
    with RunLock(path, stale_s=300.0):
        pass
    assert time.monotonic() - started < 150.0


def test_a_holder_notices_that_another_one_has_taken_over(tmp_path: Path) -> None:
    """Two that begin at once where the file system keeps locks to one node."""
    path = tmp_path / "lock"
    with RunLock(path) as lock:
        lock.beat()
        foreign(path)
        with pytest.raises(ConfigError, match="in use by process 12 on another-node"):
            lock.beat()
    assert read_holder(path) is not None  # and leaves it to that one
    with RunLock(tmp_path / "torn") as lock:
        (tmp_path / "torn").write_text('{"host": "a"}, "pid": 1}')  # two wrote at once
        lock.beat()
        assert read_holder(tmp_path / "torn") is not None
        lock.beat()


def test_a_holder_that_is_about_to_end_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    process = holder(path)
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        process.kill()

    with RunLock(path, tell, wait_s=600.0):
        assert process.wait() == -signal.SIGKILL
    assert len(told) == 1
    assert f"is held by process {process.pid} on" in told[0]


@pytest.mark.parametrize(("number", "is_refused"), [(errno.ENOLCK, False), (errno.ENOSYS, False), (errno.EIO, True)])
def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_refused: bool
) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, "no lock")

    path = tmp_path / "lock"
    monkeypatch.setattr(fcntl, "flock", fails)
    if is_refused:
        with pytest.raises(ConfigError, match=r"cannot be written: .*no lock"):
            RunLock(path).__enter__()
        return
    with RunLock(path):
        assert is_held(path)
        os.utime(path, (0, 0))  # touched last long ago
        assert not is_held(path)
