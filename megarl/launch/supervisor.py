"""Starts the steps of a run, watches them, and decides what follows from how they end.

    servers on their own nodes -> their URLs -> trainer -> finished | stopped: requeue | died: start it again

The trainer's status file says how it ended; exit codes of torchrun and srun do not. Everything that is lost with a
trainer is drawn or computed again from its newest checkpoint.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from megarl.config import Config
from megarl.data.files import write_atomically
from megarl.errors import ConfigError, RolloutError
from megarl.launch import topology
from megarl.launch.files import end_file, ready_file
from megarl.launch.steps import Step, srun
from megarl.launch.topology import Topology
from megarl.run import failure
from megarl.run.lock import BEAT_S, RunLock
from megarl.run.status import newest_checkpoint
from megarl.run.vitals import read_signs, stop_file, whereabouts

FINISHED, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 75
PYTHON = os.environ.get("MEGARL_STEP_PYTHON", sys.executable)
"""The Python of the steps; in a container it may be another one than here."""
KEY_VARIABLE = "MEGARL_API_KEY"
ATTEMPT_VARIABLE = "MEGARL_ATTEMPT"
"""Names a start of the trainer in its status file."""
_POLL_S = 0.5
_SERVER_GRACE_S = 30.0
_FULL_DISK_S = 60.0
_BAD_INPUT = ("ConfigError", "DataError", "CheckpointError")
"""Errors that another start would meet again."""


class Supervisor:
    """One launch of a run: ``run`` returns its exit code."""

    def __init__(self, config: Config, command: Sequence[str]) -> None:
        """command: what follows ``megarl`` on each rank, the configuration's path last."""
        self.config, self.command = config, list(command)
        self.folder = config.run_dir.absolute()
        self._asked: signal.Signals | None = None
        self._asked_at = 0.0
        self._servers: list[Step] = []
        self._server_restarts = 0
        self._attempt = 0
        self._lock = RunLock(self.folder / "launch.lock", self._tell)
        self._beaten = 0.0

    def run(self) -> int:
        """Start everything and stay until the run has ended: 0 finished, 1 given up, 2 bad input, 75 stopped."""
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._heard)
        with self._lock:
            job = os.environ.get("SLURM_JOB_ID", time.strftime("%Y%m%d-%H%M%S"))
            again = os.environ.get("SLURM_RESTART_COUNT", "0")
            self.logs = _new_folder(self.folder / "logs", f"{job}-{again}")
            self.launch_file = self.folder / "launch.json"
            try:
                code = self._run()
            except RolloutError as error:
                self._tell(f"error: {error}")
                code = FAILED
            finally:
                self._stop_servers()
            self._says({0: "finished", 75: "stopped"}.get(code, "gave up"))
        if code == STOPPED and self._asked == signal.SIGUSR1:
            self._requeue()
        return code

    def _run(self) -> int:
        self._set_topology(topology.find(self.config, os.environ))
        self._write("starting the servers")
        self._servers = [self._server_step(node) for node in range(len(self.topology.servers))]
        fruitless = 0
        while True:
            if not self._await_servers(give_up=self._attempt == 0) or self._asked is not None:
                return STOPPED
            before = self._progress()
            code = self._train()
            status = self._status()
            if status.get("state") == "finished":
                return FINISHED
            if self._asked is not None:
                saved = "saved itself" if status.get("state") == "stopped" else "was killed"
                self._tell(f"asked to stop by {self._asked.name}; the trainer {saved}")
                return STOPPED
            if status.get("state") == "stopped":
                self._await_the_end()
                return STOPPED
            found = failure.read_failure(self._logs_of_attempt / "failure.json")
            why = found.get("message") or status.get("last_error") or f"exit code {code}; {self._last_seen()}"
            if found.get("kind") in _BAD_INPUT:
                self._tell(f"the trainer cannot go on: {why}")
                return BAD_INPUT
            fruitless = 0 if self._progress() > before else fruitless + 1
            if fruitless > self.config.launch.max_restarts:
                self._tell(f"the trainer died {fruitless} times without a new checkpoint and is given up: {why}")
                return FAILED
            self._tell(f"the trainer died ({why}); starting it again")

    def _set_topology(self, found: Topology) -> None:
        self.topology = found
        if found.servers and self.config.sglang.api_key_env is None:
            # Whoever reaches a server can replace its weights. The key travels in the environment alone.
            os.environ.setdefault(KEY_VARIABLE, secrets.token_hex(16))

    def _write(self, says: str) -> None:
        key, of_trainer = [], []
        if self.topology.servers:
            of_trainer = ["--sglang.urls", json.dumps(self.topology.urls), "--sglang.gpus", "[]"]
            if self.config.sglang.api_key_env is None:
                key = ["--sglang.api_key_env", KEY_VARIABLE]
        *words, path = self.command
        launch = {
            "launch": self.logs.name,
            "topology": self.topology.plain(),
            "command": [*words, *key, *of_trainer, path],
            "server_command": [*words, *key, path],
            "logs": str(self._logs_of_attempt),
            "says": says,
        }
        write_atomically(self.launch_file, json.dumps(launch, indent=1).encode())

    def _write_with_starts(self, text: str) -> None:
        restarts = f", {self._server_restarts} restarts of server nodes" if self._server_restarts else ""
        self._write(f"{text}, {self._attempt} starts of the trainer{restarts}")

    def _says(self, text: str) -> None:
        try:
            self._write_with_starts(text)
        except OSError as error:
            # Of a full disk: what is only said must not end a trainer, or keep a job from its queue.
            self._tell(f"warning: {self.launch_file} is not up to date: {error}")

    def _announce(self) -> None:
        """What the ranks of this start are to read; RolloutError if it cannot be written for a minute."""
        until = time.monotonic() + _FULL_DISK_S
        while self._asked is None:
            try:
                self._logs_of_attempt.mkdir(parents=True, exist_ok=True)
                return self._write_with_starts("running")
            except OSError as error:
                if time.monotonic() > until:
                    raise RolloutError(f"{self.launch_file} cannot be written: {error}") from error
                self._tell(f"warning: {self.launch_file} cannot be written: {error}; trying again")
            time.sleep(min(5.0, _FULL_DISK_S / 10))
            self._beat()
        return None

    def _train(self) -> int:
        """Start the trainer and stay until it has ended; its exit code."""
        self._attempt += 1
        if self._attempt > 1:  # the trainer meets at a port that nobody may still hold; all else stays
            number = int(os.environ.get("SLURM_JOB_ID", os.getpid()))
            port = topology.free_ports(1, number, self._attempt)[0]
            self.topology = replace(self.topology, master_port=port)
        os.environ[ATTEMPT_VARIABLE] = f"{self.logs.name}-{self._attempt}"
        os.environ[failure.VARIABLE] = str(self._logs_of_attempt / "failure.json")
        self._announce()
        if self._asked is not None:
            return STOPPED
        step = Step("trainer", self._trainer_words())
        try:
            while step.code is None:
                time.sleep(_POLL_S)
                self._beat()
                self._revive_servers()
                if self._asked is not None:
                    # No signal: it would reach servers and reward workers too, and no rank that is still starting.
                    with suppress(OSError):
                        stop_file(self.folder).write_text(os.environ[ATTEMPT_VARIABLE])
                if self._asked is not None and time.monotonic() > self._asked_at + self.config.launch.stop_grace_s:
                    self._tell(f"the trainer has not stopped within {self.config.launch.stop_grace_s:.0f} s: killed")
                    step.stop(grace_s=1.0)
            return step.code
        finally:
            step.stop(grace_s=1.0)

    def _trainer_words(self) -> list[str]:
        words = [PYTHON, "-m", "megarl.launch.node", str(self.launch_file)]
        if self.topology.job is None:
            return [*words, "0"]
        return [*srun(self.topology.trainers, het_group=0 if self.topology.het else None), *words]

    def _await_servers(self, *, give_up: bool) -> bool:
        """Wait until the servers of all nodes answer; False if asked to stop meanwhile.

        RolloutError if they do not in time, and with ``give_up`` as soon as those of a node end."""
        until = time.monotonic() + self.config.sglang.start_deadline_s
        if not give_up:
            self._revive_servers()
        while not all(self._ready_file(node).exists() for node in range(len(self._servers))):
            time.sleep(_POLL_S)
            self._beat()
            if self._asked is not None:
                return False
            for node, step in enumerate(self._servers):
                if give_up and step.code is not None:
                    refusal = ConfigError if step.code == BAD_INPUT else RolloutError
                    raise refusal(
                        f"the servers of node {self.topology.servers[node].name} ended with exit code {step.code} "
                        f"before they were ready; see {self._server_log(node)}"
                    )
            self._revive_servers()
            gone = [node for node, step in enumerate(self._servers) if step.code is not None]
            if self._asked is None and any(not self._ready_file(node).exists() for node in gone):
                raise RolloutError(
                    f"the servers of {len(gone)} nodes have ended and were started sglang.max_restarts = "
                    f"{self.config.sglang.max_restarts} times; see {self._server_log(gone[0])}"
                )
            if time.monotonic() > until:
                raise RolloutError(
                    f"the servers were not ready after {self.config.sglang.start_deadline_s:.0f} s; see "
                    f"{self._server_log(0).parent}, or raise sglang.start_deadline_s"
                )
        return True

    def _await_the_end(self) -> None:
        """Ranks that somebody else has stopped: in a job that is Slurm, which ends or requeues this script too."""
        until = time.monotonic() + self.config.launch.stop_grace_s
        while self.topology.job is not None and self._asked is None and time.monotonic() < until:
            time.sleep(_POLL_S)
            self._beat()

    def _server_step(self, node: int) -> Step:
        for file in (self._ready_file(node), end_file(self.launch_file, node)):
            file.unlink(missing_ok=True)
        words = [PYTHON, "-m", "megarl.launch.serve", str(self.launch_file), str(node)]
        begin = srun([self.topology.servers[node]], het_group=1 if self.topology.het else None)
        return Step(f"servers of node {node}", [*begin, *words], self._server_log(node))

    def _revive_servers(self) -> None:
        for node, step in enumerate(self._servers):
            if step.code is None or self._asked is not None:
                continue
            if self._server_restarts >= self.config.sglang.max_restarts:
                continue  # the trainer finds out how it goes without
            self._server_restarts += 1
            name = self.topology.servers[node].name
            self._tell(f"the servers of node {name} ended with exit code {step.code}; starting them again")
            self._servers[node] = self._server_step(node)
            self._says("running")

    def _stop_servers(self) -> None:
        """Through a file: srun passes SIGTERM on as SIGKILL, and servers would leave files with keys behind."""
        for node in range(len(self._servers)):
            with suppress(OSError):
                end_file(self.launch_file, node).write_text(self.logs.name)
        until = time.monotonic() + _SERVER_GRACE_S
        while any(step.code is None for step in self._servers) and time.monotonic() < until:
            time.sleep(_POLL_S)
        for step in self._servers:
            step.stop(grace_s=1.0)
        self._servers = []

    def _server_log(self, node: int) -> Path:
        return self.logs / f"servers{node}.log"

    def _ready_file(self, node: int) -> Path:
        return ready_file(self.launch_file, node)

    @property
    def _logs_of_attempt(self) -> Path:
        return self.logs / f"attempt{self._attempt}"

    def _status(self) -> Mapping[str, Any]:
        """What the trainer's main rank has said last; empty if it did not come so far."""
        found = _read(self.folder / "status.json")
        return found if found.get("attempt") == os.environ[ATTEMPT_VARIABLE] else {}

    def _last_seen(self) -> str:
        """Where the ranks were that have left no word: killed, or ended by NCCL, which aborts them on a time-out."""
        signs = read_signs(self.folder, self.config.launch.ranks, os.environ[ATTEMPT_VARIABLE])
        return f"last seen: {whereabouts(signs, now=None)}"

    def _progress(self) -> str:
        return newest_checkpoint(self.folder) or ""

    def _requeue(self) -> None:
        """The job goes back into Slurm's queue, and this script is ended by it."""
        job = os.environ.get("SLURM_JOB_ID")
        if job is not None:
            self._tell(f"job {job} is requeued")
            try:
                topology.ask_slurm(["scontrol", "requeue", job])
            except ConfigError as error:
                return self._tell(f"error: {error}; submit the job again to continue")
            time.sleep(60.0)  # Slurm ends this script; an exit code of its own would count as the job's end

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self._asked is None:
            self._asked, self._asked_at = signal.Signals(number), time.monotonic()
            return
        if number == signal.SIGINT:
            # Who is at the keyboard wants no job to come back. A TERM may be Slurm's, which follows its USR1.
            self._asked = signal.SIGINT
        if number != signal.SIGUSR1 and time.monotonic() - self._asked_at > 1.0:
            self._asked_at = -self.config.launch.stop_grace_s  # asked twice: no more patience

    def _beat(self) -> None:
        if time.monotonic() - self._beaten > BEAT_S:
            self._beaten = time.monotonic()
            with suppress(OSError):
                self._lock.beat()

    def _tell(self, line: str) -> None:
        print(f"megarl: {line}", file=sys.stderr, flush=True)


def _new_folder(parent: Path, name: str) -> Path:
    """One that was not there: starts of the trainer are named after it, and a Slurm job may launch a run twice."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            path.mkdir()
            break
    return path


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is none."""
    with suppress(OSError, ValueError):
        return dict(json.loads(path.read_text()))
    return {}


def launch(config: Config, command: Sequence[str]) -> int:
    """``megarl launch``; see ``Supervisor``."""
    if config.launch.layout != "local" and not Path(command[-1]).is_absolute():
        command = [*command[:-1], str(Path(command[-1]).absolute())]
    if os.environ.get("RANK") is not None:
        raise ConfigError("megarl launch starts torchrun itself; run it once, without torchrun")
    config.check_world_size(config.launch.ranks)
    return Supervisor(config, command).run()
