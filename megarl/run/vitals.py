"""Signs of life of a run: what each rank is doing, a file for ``megarl status``, and stacks of a rank that hangs.

    <run>/status.json        the run as a whole, by the main rank
    <run>/ranks/<rank>.json  step and phase of each rank, touched every few seconds
    <run>/ranks/<rank>.stacks.txt  stacks of all threads of a rank without progress for log.hang_s

A thread of each rank writes them with every beat, and after a new phase within a quarter of one: no step waits for the
file system. It also ends the rank if torchrun is gone, because then nothing else would.
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
from typing import Any, Literal, Self

from megarl.errors import ConfigError, describe
from megarl.files.writing import write_atomically
from megarl.run.lock import RunLock
from megarl.run.status import rank_file, stacks_file, stop_file

State = Literal["starting", "running", "finished", "stopped", "failed"]
BETWEEN = "between phases"
_ORPHANED = 70
"""Exit code of a rank that has lost its launcher or its lock (EX_SOFTWARE)."""
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
    started: float = field(default_factory=time.time)
    updated: float = 0.0
    step_s: float | None = None
    """Wall-clock seconds, work between steps included; mean of the last 20."""
    tokens_per_s: float | None = None
    eta_s: float | None = None
    k3: float | None = None
    """Of the latest step, as ``native_flip``: how far the training engine is from the engine that sampled."""
    native_flip: float | None = None
    dropped: float | None = None
    """Responses of the latest step that the tripwires have dropped; None if they are off."""
    unjudged: str | None = None
    """How many responses of the latest step have a reward, and the first failure; None if all have one."""
    health: list[dict[str, Any]] | None = None
    """The verdicts after the latest step, worst first; None before the first one."""
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
    """The signs of life of one rank; a context manager around the thread that writes them."""

    def __init__(
        self, folder: Path, rank: int, ranks: int, *, steps: int, hang_s: float, beat_s: float | None = None
    ) -> None:
        """hang_s: seconds without progress before stacks are written; beat_s: seconds between two signs."""
        self._folder, self._rank, self._hang_s = folder, rank, hang_s
        self._beat_s = beat_s or max(2.0, ranks / 50)  # of all ranks 50 a second; 200 while phases change
        self._parent = os.getppid()
        # Without torchrun the parent is a shell, which may end before the run (nohup).
        self._has_launcher = "TORCHELASTIC_RUN_ID" in os.environ
        self.lock: RunLock | None = None
        """Touched with every sign. The rank ends if another run has taken it."""
        self.ask: Callable[[str], None] | None = None
        """Called when ``megarl launch`` leaves a request to stop in the run folder."""
        self._moved, self._hang_reported = time.monotonic(), False
        self._ends: deque[float] = deque(maxlen=_SPEED_STEPS + 1)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="vitals", daemon=True)
        self._file_lock = threading.Lock()
        self.status = RunStatus(steps=steps, ranks=ranks)
        self._written = self._place

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
        self._enter(outer)  # not after an error, whose message names the phase

    def mark_progress(self) -> None:
        """The rank does not hang: a response is complete, or a micro-batch is trained."""
        self._moved, self._hang_reported = time.monotonic(), False

    def begin(self, done: int) -> None:
        """The run begins its steps, ``done`` of which are finished already."""
        self.status.state, self.status.step = "running", done
        self._ends.append(time.monotonic())
        self._write()

    def finish_step(self, done: int) -> None:
        """A step has ended; update speed and remaining time, which the thread writes."""
        status = self.status
        self._ends.append(time.monotonic())
        if len(self._ends) > 1:  # the first entry is the begin of the run
            status.step_s = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
            status.eta_s = (status.steps - done) * status.step_s
        status.step = done  # last, because the thread writes when it changes

    def end(self, state: State, error: BaseException | None = None) -> None:
        self.status.state = state
        if error is not None:
            self.status.last_error = " ".join(str(error).split())[:2000] or type(error).__name__
            self.status.error_kind = type(error).__name__
        self._write()

    @property
    def _place(self) -> tuple[int, str, float]:
        return self.status.step, self.status.phase, self.status.phase_since

    def _enter(self, name: str) -> None:
        self.status.phase, self.status.phase_since = name, time.time()
        self.mark_progress()

    def _watch(self) -> None:
        beaten = time.monotonic()
        while not self._ended.wait(self._beat_s / 4):  # a new phase is written sooner than the next sign is due
            is_due = time.monotonic() - beaten >= self._beat_s
            if is_due or self._written != self._place:
                self._write()
            if not is_due:
                continue
            beaten = time.monotonic()
            if self._has_launcher and os.getppid() != self._parent:
                self.status.state, self.status.last_error = "failed", "the launcher of the ranks is gone"
                self._write()
                self._end_at_once("its launcher is gone")
            try:
                self._check()
            except ConfigError as error:  # the lock is lost: another run writes into this folder now
                self._end_at_once(str(error))
            except Exception as error:  # also one that nobody foresaw: without this thread, the lock seems abandoned
                _complain(f"warning: {describe(error)}")

    def _check(self) -> None:
        if self.lock is not None:
            self.lock.beat()
        # The file names a start of the trainer, so that an old file does not stop a later start.
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

    def _end_at_once(self, why: str) -> None:
        """At once, without cleaning up: checkpoints are complete at any moment, and the main thread may hang."""
        _complain(f"error: rank {self._rank}: {why}; ending")
        os._exit(_ORPHANED)

    def _write(self) -> None:
        """Write both files. They need not be durable: they describe this moment only."""
        self.status.updated = time.time()
        self._written = self._place  # read before what is written, so that no change is lost
        with self._file_lock:
            try:
                rank_file(self._folder, self._rank).parent.mkdir(parents=True, exist_ok=True)
                own = {"rank": self._rank, "host": self.status.host, "pid": self.status.pid, "step": self.status.step}
                own |= {"phase": self.status.phase, "phase_since": self.status.phase_since, "beat": time.time()}
                own |= {"beat_s": self._beat_s, "error": self.status.last_error, "attempt": self.status.attempt}
                write_atomically(rank_file(self._folder, self._rank), json.dumps(own).encode(), durable=False)
                if self._rank == 0:
                    status = json.dumps(asdict(self.status)).encode()
                    write_atomically(self._folder / "status.json", status, durable=False)
            except Exception as error:  # such as a full disk, which must not end a run
                _complain(f"warning: no status written: {describe(error)}")


def _complain(line: str) -> None:
    with suppress(OSError, ValueError):  # what reads stderr may be gone, with the launcher
        print(f"megarl: {line}", file=sys.stderr, flush=True)
