"""Signs of life of a run: what every rank is doing, a file for ``megarl status``, and stacks of a rank that hangs.

    <run>/status.json        the run as a whole, by the main rank
    <run>/ranks/<rank>.json  step and phase of each rank, touched every few seconds
    <run>/ranks/<rank>.stacks.txt  stacks of all threads of a rank that has not moved for log.hang_s

A thread of each rank writes them. It also ends a rank whose launcher is gone, which nobody else would.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from megarl.errors import ConfigError
from megarl.run.lock import RunLock

State = Literal["starting", "running", "finished", "stopped", "failed"]
BETWEEN = "between phases"
_ORPHANED = 70
"""Exit code of a rank whose launcher, or lock, is gone (EX_SOFTWARE)."""
_SPEED_STEPS = 20
_WRITE_AGAIN_S = 0.2
"""Phases that follow each other faster are not all written."""


@dataclass
class RunStatus:
    """What status.json says; times are seconds since 1970."""

    state: State = "starting"
    step: int = 0
    """Finished steps."""
    steps: int = 0
    phase: str = BETWEEN
    phase_since: float = field(default_factory=time.time)
    started: float = field(default_factory=time.time)
    updated: float = 0.0
    step_s: float | None = None
    """Wall-clock seconds of a step with all that comes between steps; mean of the last 20."""
    tokens_per_s: float | None = None
    eta_s: float | None = None
    ranks: int = 1
    last_error: str | None = None
    error_kind: str | None = None
    """Name of its class."""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    job: str | None = field(default_factory=lambda: os.environ.get("SLURM_JOB_ID"))
    restart: str | None = field(default_factory=lambda: os.environ.get("SLURM_RESTART_COUNT"))
    attempt: str | None = field(default_factory=lambda: os.environ.get("MEGARL_ATTEMPT"))
    """Which start of the trainer by ``megarl launch`` this is."""


class Vitals:
    """The signs of one rank; a context manager that starts and ends the thread."""

    def __init__(
        self, folder: Path, rank: int, ranks: int, *, steps: int, hang_s: float, beat_s: float | None = None
    ) -> None:
        """hang_s: seconds without any movement before stacks are written; beat_s: between two signs, default 2 s,
        more with many ranks, so that all together write no more than 50 files a second."""
        self._folder, self._rank, self._hang_s = folder, rank, hang_s
        self._beat_s = beat_s or max(2.0, ranks / 50)
        self._main = rank == 0
        self._parent = os.getppid()
        # Without torchrun the parent is a shell, which may well be left.
        self._has_launcher = "TORCHELASTIC_RUN_ID" in os.environ
        self._lock: RunLock | None = None
        self._ask: Callable[[str], None] | None = None
        self._moved, self._told_of_hang = time.monotonic(), False
        self._ends: deque[float] = deque(maxlen=_SPEED_STEPS + 1)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="vitals", daemon=True)
        self._file_lock = threading.Lock()
        self.status = RunStatus(steps=steps, ranks=ranks)

    def __enter__(self) -> Vitals:
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._write()

    def keep(self, lock: RunLock) -> None:
        """Touch this lock too."""
        self._lock = lock

    def listen(self, ask: Callable[[str], None]) -> None:
        """Look for a request to stop that ``megarl launch`` has left in the run folder."""
        self._ask = ask

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What the rank is doing while the block runs."""
        outer = self.status.phase
        self._enter(name)
        yield
        self._enter(outer)  # not after an error: the phase is told with it

    def move(self) -> None:
        """The rank goes on: a response is complete, a micro-batch is trained."""
        self._moved, self._told_of_hang = time.monotonic(), False

    def begin(self, done: int) -> None:
        """The run goes on after so many finished steps."""
        self.status.state, self.status.step = "running", done
        self._ends.append(time.monotonic())
        self._write()

    def finished_step(self, done: int) -> None:
        """A step has ended."""
        status = self.status
        self._ends.append(time.monotonic())
        status.step = done
        if len(self._ends) > 1:  # the first one is the begin
            status.step_s = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
            status.eta_s = (status.steps - done) * status.step_s
        self._write()

    def end(self, state: State, error: BaseException | None = None) -> None:
        """How the run ends."""
        self.status.state = state
        if error is not None:
            self.status.last_error = " ".join(str(error).split())[:2000] or type(error).__name__
            self.status.error_kind = type(error).__name__
        self._write()

    def _enter(self, name: str) -> None:
        self.status.phase, self.status.phase_since = name, time.time()
        self.move()
        if time.time() - self.status.updated > _WRITE_AGAIN_S:
            self._write()

    def _watch(self) -> None:
        while not self._ended.wait(self._beat_s):
            if self._has_launcher and os.getppid() != self._parent:
                self.status.state, self.status.last_error = "failed", "the launcher of the ranks is gone"
                self._write()  # it was killed and took nobody along
                self._end_at_once("its launcher is gone")
            self._write()
            try:
                self._look_around()
            except ConfigError as error:  # what another run is doing in this folder is not to be spoilt
                self._end_at_once(str(error))
            except OSError as error:  # of a file system that is away for a moment
                print(f"megarl: warning: {error}", file=sys.stderr, flush=True)

    def _look_around(self) -> None:
        if self._lock is not None:
            self._lock.beat()
        if self._ask is not None and self._is_asked_to_stop():
            self._ask("megarl launch")
        if time.monotonic() - self._moved > self._hang_s and not self._told_of_hang:
            self._told_of_hang = True
            self._tell_of_hang()

    def _is_asked_to_stop(self) -> bool:
        """The file names the start that it is for, so that one that is left behind stops nobody else."""
        try:
            return self.status.attempt is not None and stop_file(self._folder).read_text() == self.status.attempt
        except OSError:
            return False

    def _tell_of_hang(self) -> None:
        path = stacks_file(self._folder, self._rank)
        with path.open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self._where()}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        print(
            f"megarl: warning: {self._where()} and has not moved for {self._hang_s:.0f} s; stacks are in {path}",
            file=sys.stderr,
            flush=True,
        )

    def _where(self) -> str:
        status = self.status
        return f"rank {self._rank} on {status.host} is in phase {status.phase} after step {status.step}"

    def _end_at_once(self, why: str) -> None:
        """What is saved is complete; the rest would go on unseen."""
        print(f"megarl: error: rank {self._rank}: {why}; ending", file=sys.stderr, flush=True)
        os._exit(_ORPHANED)

    def _write(self) -> None:
        """Not forced onto the disk: it is about now."""
        self.status.updated = time.time()
        with self._file_lock:
            try:
                rank_file(self._folder, self._rank).parent.mkdir(parents=True, exist_ok=True)
                own = {"rank": self._rank, "host": self.status.host, "pid": self.status.pid, "step": self.status.step}
                own |= {"phase": self.status.phase, "phase_since": self.status.phase_since, "beat": time.time()}
                own |= {"beat_s": self._beat_s, "error": self.status.last_error, "attempt": self.status.attempt}
                _replace(rank_file(self._folder, self._rank), own)
                if self._main:
                    _replace(self._folder / "status.json", asdict(self.status))
            except OSError as error:  # of a full disk: signs of life must not end a run
                print(f"megarl: warning: no status written: {error}", file=sys.stderr, flush=True)


def rank_file(folder: Path, rank: int) -> Path:
    """Signs of life of a rank."""
    return folder / "ranks" / f"{rank:05d}.json"


def stop_file(folder: Path) -> Path:
    """A request to stop: the name of the start that is to end."""
    return folder / "stop"


def stacks_file(folder: Path, rank: int) -> Path:
    """Stacks of a rank that hung."""
    return folder / "ranks" / f"{rank:05d}.stacks.txt"


def read_signs(folder: Path, ranks: int, attempt: str | None = None) -> list[dict[str, Any]]:
    """What each rank has said last, in this start of the trainer if one is named; a rank without a word has step -1."""
    signs = []
    for rank in range(ranks):
        try:
            sign = json.loads(rank_file(folder, rank).read_text())
        except (OSError, ValueError):
            sign = {}
        if sign and (attempt is None or sign.get("attempt") == attempt):
            signs.append(sign)
        else:
            signs.append({"rank": rank, "host": "?", "pid": 0, "step": -1, "phase": "no sign of life", "beat": 0.0})
    return signs


def whereabouts(signs: Sequence[Mapping[str, Any]], now: float | None) -> str:
    """Where ranks are, those first that the others may wait for: those that have ended or are silent, then the fewest.

    ``now`` is None where all of them have ended: then the fewest come first.

    E.g. "rank 1: gone in train after step 3; ranks 0, 2-3: sync after step 3".
    """
    places: dict[tuple[int, str], list[int]] = {}
    for sign in signs:
        state, rank = ("", 0) if now is None else _state_of(sign, now)
        text = state + sign["phase"] + (f" after step {sign['step']}" if sign["step"] >= 0 else "")
        text += f" ({sign['error']})" if sign.get("error") else ""
        places.setdefault((rank, text), []).append(sign["rank"])
    ordered = sorted(places.items(), key=lambda item: (item[0][0], len(item[1])))
    return "; ".join(f"{_named(members)}: {text}" for (_, text), members in ordered)


def _state_of(sign: Mapping[str, Any], now: float) -> tuple[str, int]:
    """What is wrong with a rank, as the beginning of a phrase, and how much."""
    if sign["host"] == socket.gethostname() and sign["pid"] and not Path(f"/proc/{sign['pid']}").exists():
        return "gone in ", 0
    silent = now - sign["beat"]
    if silent > 2.5 * sign.get("beat_s", 2.0):
        return f"silent for {silent:.0f} s in " if sign["beat"] else "", 1
    return "", 2


def _named(members: list[int]) -> str:
    """ "rank 3", "ranks 0-2, 5"."""
    spans: list[list[int]] = []
    for rank in members:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    words = ", ".join("-".join(map(str, span)) for span in spans)
    return f"rank{'s' if len(members) > 1 else ''} {words}"


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)
