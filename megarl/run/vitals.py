"""Signs of life of a run: each rank's phase, a file for ``megarl status``, and stacks of hanging ranks.

    <run>/status.json        the run as a whole, by the main rank
    <run>/ranks/<rank>.json  step and phase of each rank, touched every few seconds
    <run>/ranks/<rank>.stacks.txt  stacks of all threads of a rank without progress for log.hang_s

A thread of each rank writes the files with every beat, so that no step waits for the file system. The thread also ends
the rank when torchrun is gone.
"""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, Self

from megarl.errors import ConfigError, describe
from megarl.files.writing import write_atomically
from megarl.run.lock import RunLock
from megarl.run.status import HealthVerdict, rank_file, stacks_file, stop_file

State = Literal["starting", "running", "finished", "stopped", "failed"]
BETWEEN = "between phases"
_ORPHANED = 70
"""Exit code of a rank without launcher or lock (EX_SOFTWARE)."""
_SPEED_STEPS = 20


@dataclass
class RunStatus:
    """What status.json says; times are seconds since 1970."""

    state: State = "starting"
    step: int = 0
    """Finished steps."""
    steps: int = 0
    phase: str = BETWEEN
    phase_since: float = field(default_factory=time.time)
    updated: float = 0.0
    step_s: float | None = None
    """Wall-clock seconds, work between steps included; mean over 20 steps."""
    tokens_per_s: float | None = None
    eta_s: float | None = None
    k3: float | None = None
    """Of the latest step, as ``native_flip``: the distance between the training engine and the sampling engine."""
    native_flip: float | None = None
    dropped: float | None = None
    """Dropped responses of the latest step; None if the tripwires are off."""
    unjudged: str | None = None
    """How many responses of the latest step have a reward, and the first failure; None if all rewards succeeded."""
    sinks: str | None = None
    """What fails now of log.sinks."""
    health: list[HealthVerdict] | None = None
    """The verdicts after the latest step, worst first; None before the first step."""
    ranks: int = 1
    last_error: str | None = None
    error_kind: str | None = None
    """The class of the error."""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    job: str | None = field(default_factory=lambda: os.environ.get("SLURM_JOB_ID"))
    restart: str | None = field(default_factory=lambda: os.environ.get("SLURM_RESTART_COUNT"))
    attempt: str | None = field(default_factory=lambda: os.environ.get("MEGARL_ATTEMPT"))
    """Number of the trainer's start by ``megarl launch``."""


class Vitals:
    """The signs of life of one rank; a context manager around the writing thread."""

    def __init__(
        self, folder: Path, rank: int, ranks: int, *, steps: int, hang_s: float, beat_s: float | None = None
    ) -> None:
        """hang_s: seconds without progress before stacks are written; beat_s: seconds between two signs."""
        self._folder, self._rank, self._hang_s = folder, rank, hang_s
        self._beat_s = beat_s or max(1.0, ranks / 100)  # all ranks together write at most 100 a second
        self._parent = os.getppid()
        # Without torchrun the parent is a shell, which may end before the run (nohup).
        self._has_launcher = "TORCHELASTIC_RUN_ID" in os.environ
        self.lock: RunLock | None = None
        """Touched with every sign. The rank ends if another run has taken the lock."""
        self.ask: Callable[[str], None] | None = None
        """Called when ``megarl launch`` leaves a request to stop in the run folder."""
        self._moved, self._hang_reported = time.monotonic(), False
        self._ends: deque[float] = deque(maxlen=_SPEED_STEPS + 1)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="vitals", daemon=True)
        self._file_lock = threading.Lock()
        self.status = RunStatus(steps=steps, ranks=ranks)

    def __enter__(self) -> Self:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._write()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what the rank is doing while the block runs."""
        outer = self.status.phase
        self._enter(name)
        yield
        self._enter(outer)  # not after an error, because its message names the phase

    def mark_progress(self) -> None:
        """Note that the rank does not hang: a response is complete, or a micro-batch is trained."""
        self._moved, self._hang_reported = time.monotonic(), False

    def begin(self, done: int) -> None:
        """Begin the steps of the run, ``done`` of which are finished already."""
        self.status.state, self.status.step = "running", done
        self._ends.append(time.monotonic())
        self._write()

    def finish_step(self, done: int) -> None:
        """Update speed and remaining time at the end of a step; the thread writes them."""
        status = self.status
        self._ends.append(time.monotonic())
        if len(self._ends) > 1:  # the first entry is the begin of the run
            status.step_s = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
            status.eta_s = (status.steps - done) * status.step_s
        status.step = done

    def end(self, state: State, error: BaseException | None = None) -> None:
        self.status.state = state
        if error is not None:
            self.status.last_error = " ".join(str(error).split())[:2000] or type(error).__name__
            self.status.error_kind = type(error).__name__
        self._write()

    def _enter(self, name: str) -> None:
        self.status.phase, self.status.phase_since = name, time.time()
        self.mark_progress()

    def _watch(self) -> None:
        while not self._ended.wait(self._beat_s):
            self._write()
            if self._has_launcher and os.getppid() != self._parent:
                self.status.state, self.status.last_error = "failed", "the launcher of the ranks is gone"
                self._write()
                self._end_at_once("its launcher is gone")
            try:
                self._check()
            except ConfigError as error:  # the lock is lost: a second run writes into the folder now
                self._end_at_once(str(error))
            except Exception as error:  # any error: without this thread, the lock seems abandoned
                _complain(f"warning: {describe(error)}")

    def _check(self) -> None:
        if self.lock is not None:
            self.lock.beat()
        # The file names a start of the trainer: an old file does not stop a later start.
        with suppress(OSError):
            if self.ask is not None and stop_file(self._folder).read_text() == self.status.attempt:
                self.ask("megarl launch")
        if time.monotonic() - self._moved > self._hang_s and not self._hang_reported:
            self._report_hang()

    def _report_hang(self) -> None:
        self._hang_reported = True
        path = stacks_file(self._folder, self._rank)
        with path.open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self._where()}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        _complain(f"warning: {self._where()} and has made no progress for {self._hang_s:.0f} s; stacks are in {path}")

    def _where(self) -> str:
        status = self.status
        return f"rank {self._rank} on {status.host} is in phase {status.phase} after step {status.step}"

    def _end_at_once(self, reason: str) -> None:
        """End the process without cleaning up: checkpoints are always complete, and the main thread may hang."""
        _complain(f"error: rank {self._rank}: {reason}; ending")
        os._exit(_ORPHANED)

    def _write(self) -> None:
        """Write both files, without fsync: they describe the moment only."""
        self.status.updated = time.time()
        with self._file_lock:
            try:
                rank_file(self._folder, self._rank).parent.mkdir(parents=True, exist_ok=True)
                status = asdict(self.status)
                sign = {name: status[name] for name in ("host", "pid", "step", "phase", "phase_since", "attempt")}
                sign |= {"rank": self._rank, "beat": time.time(), "beat_s": self._beat_s, "error": status["last_error"]}
                write_atomically(rank_file(self._folder, self._rank), json.dumps(sign).encode(), durable=False)
                if self._rank == 0:
                    write_atomically(self._folder / "status.json", json.dumps(status).encode(), durable=False)
            except Exception as error:  # a full disk, for example, must not end a run
                _complain(f"warning: no status written: {describe(error)}")


def _complain(line: str) -> None:
    with suppress(OSError, ValueError):  # the reader of stderr may be gone, with the launcher
        print(f"megarl: {line}", file=sys.stderr, flush=True)
