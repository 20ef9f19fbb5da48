"""The tables of attacks: processes that get signals, files that are damaged, disks that fill up.

Each attack is a small function that strikes once and says what it has done, or None if there was nothing to strike.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from chaos_world import Run

# ---- processes ----


def _words(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{process.name()} {' '.join(process.cmdline())}"
    return ""


def _named(*parts: str) -> Callable[[Run], list[psutil.Process]]:
    """Processes of the run whose name or command line has one of these parts."""
    return lambda run: [process for process in run.tree()[1:] if any(part in _words(process) for part in parts)]


def _main(run: Run) -> list[psutil.Process]:
    return run.tree()[:1]


def _ranks(run: Run) -> list[psutil.Process]:
    """The trainers: the run itself, or the children of torchrun's agent."""
    agents = _agent(run)
    return agents[0].children() if agents else [] if run.launched else _main(run)


def _agent(run: Run) -> list[psutil.Process]:
    """torchrun, which is the only child of the launcher."""
    return [process for process in _main(run) for process in process.children()] if run.launched else []


def _savers(run: Run) -> list[psutil.Process]:
    """Processes that a rank has forked: they have its command line."""
    with suppress(psutil.Error):
        return [child for rank in _ranks(run) for child in rank.children() if child.cmdline() == rank.cmdline()]
    return []


PROCESSES: dict[str, Callable[[Run], list[psutil.Process]]] = {
    "launcher": lambda run: _main(run) if run.launched else [],
    "torchrun agent": _agent,
    "rank": _ranks,
    "background saver": _savers,
    "reward worker": _named("spawn_main"),
    "sandbox": _named("bwrap"),
    "server's reaper": _named("reaper.py"),
    "server launcher": _named("sglang.launch_server"),
    "scheduler": _named("sglang::scheduler"),
    "detokenizer": _named("sglang::detokenizer"),
}
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGSTOP": signal.SIGSTOP}


def signal_one(run: Run, kind: str, name: str, rng: random.Random) -> str | None:
    """Send a signal to one process of a kind; after SIGSTOP it goes on some time later."""
    with suppress(psutil.Error):
        if not (found := PROCESSES[kind](run)):
            return None
        process = rng.choice(found)
        run.struck.append(f"{name} to {kind} {process.pid} after step {run.step}")
        process.send_signal(SIGNALS[name])
        if name == "SIGSTOP":
            time.sleep(rng.uniform(0.2, 3.0))
            with suppress(psutil.Error):
                process.resume()
        return f"{name} to {kind}"
    return None


# ---- files ----


def _flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def _empty(path: Path, rng: random.Random) -> None:
    os.truncate(path, 0)


def _zeroes(path: Path, rng: random.Random) -> None:
    """As a file system does that has recorded the size and lost the data."""
    path.write_bytes(bytes(path.stat().st_size))


def _garbage(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(rng.randrange(1, 2000)))


def _longer(path: Path, rng: random.Random) -> None:
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 100)))


def _remove(path: Path, rng: random.Random) -> None:
    path.unlink()


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "one bit flipped": _flip,
    "truncated": _truncate,
    "emptied": _empty,
    "zeroes": _zeroes,
    "garbage": _garbage,
    "longer": _longer,
    "removed": _remove,
}


def exchange(path: Path, other: Path) -> bool:
    """Put another checkpoint's file of the same name in its place; False if it is the same."""
    source = other / path.name
    if not source.is_file() or source.read_bytes() == path.read_bytes():
        return False
    shutil.copyfile(source, path)
    return True


# ---- disks ----


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[bool]:
    """A file system of ``size`` in ``folder``; False where nobody may mount one."""
    folder.mkdir(parents=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(words, capture_output=True, check=False).returncode:
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def full(folder: Path, spare: int) -> Iterator[None]:
    """Fill the disk but for ``spare`` bytes, until the end of the block."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    with suppress(OSError):
        os.truncate(filler, max(0, filler.stat().st_size - spare))
    try:
        yield
    finally:
        filler.unlink()
