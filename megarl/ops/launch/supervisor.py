"""The launcher: starts the steps of a run, watches the steps, and decides after an end.

    servers on separate nodes -> their URLs -> trainer -> finished | stopped: requeue | died: start again

The trainer's status file, not the exit code of torchrun or srun, says how the trainer ended. A new trainer continues
from the newest checkpoint and repeats the steps since. ``megarl eval`` and ``megarl sft`` under the launcher write no
status, and begin anew: exit code 0 means done, and a request to stop ends the ranks at once.
"""

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from megarl.config import Config
from megarl.errors import ConfigError, RolloutError, printable, refusal
from megarl.files.outputs import free_name
from megarl.files.writing import read_record, write_atomically
from megarl.ops.launch import steps
from megarl.ops.launch.steps import BAD_INPUT, PYTHON, ServerSteps, Step, Topology, srun
from megarl.run.lock import BEAT_S, RunLock
from megarl.run.signals import drop_lost_outputs, take_stop_signals
from megarl.run.status import FAILURE_VARIABLE, describe_ranks, newest_checkpoint, read_signs, stop_file

FINISHED, FAILED, STOPPED = 0, 1, 75
KEY_VARIABLE = "MEGARL_API_KEY"
ATTEMPT_VARIABLE = "MEGARL_ATTEMPT"
"""Environment variable with the name of this start of the trainer; the trainer's status file repeats the name."""
_POLL_S = 0.5
_FULL_DISK_S, _END_S = 60.0, 40.0
_NAMES = {"train": "trainer", "eval": "evaluation", "sft": "cold start"}
_BAD_INPUT = ("ConfigError", "DataError", "CheckpointError", "RewardError")
"""Errors of the input or of the user's code, which would end the next start too."""


class Supervisor:
    """One launch of a run: ``run`` returns the exit code."""

    def __init__(self, config: Config, command: Sequence[str]) -> None:
        """command: the words after ``megarl`` on each rank: train, eval or sft; path of the configuration; the rest."""
        self.config, self.command, stage = config, list(command), command[0]
        self.name, self._trains = _NAMES[stage], stage == "train"
        self.folder = config.run_dir.absolute() / ("" if self._trains else stage)  # beside the files of a trainer
        self._stop_signal: signal.Signals | None = None
        self._attempt, self._stop_asked_at, self._beaten = 0, 0.0, 0.0
        self._lock = RunLock(self.folder / "launch.lock", self._tell)

    def run(self) -> int:
        """Start everything and wait for the end of the run: 0 finished, 1 given up, 2 bad input, 75 stopped."""
        take_stop_signals(self._on_signal)
        with self._lock:
            job = os.environ.get("SLURM_JOB_ID", time.strftime("%Y%m%d-%H%M%S"))
            again = os.environ.get("SLURM_RESTART_COUNT", "0")
            self.logs = free_name(self.folder / "logs" / f"{job}-{again}")  # one Slurm job may launch a run twice
            self.logs.mkdir(parents=True)
            self.launch_file = self.folder / "launch.json"
            self._servers = ServerSteps(self.config, self.launch_file, self.logs, self._tell)
            try:
                code = self._run()
            except RolloutError as error:
                self._tell(f"error: {error}")
                code = FAILED
            finally:
                self._servers.stop()
            self._write_status({FINISHED: "finished", STOPPED: "stopped"}.get(code, "gave up"))
        if code == STOPPED and self._stop_signal == signal.SIGUSR1:
            self._requeue()
        return code

    def _run(self) -> int:
        self._set_topology(steps.find(self.config, os.environ))
        if sys.executable == PYTHON and not os.environ.get("MEGARL_SRUN_ARGS") and find_spec("torch") is None:
            raise ConfigError(refusal("no_torch_to_launch", python=PYTHON))
        self._write("starting the servers")
        self._servers.start(self.topology)
        fruitless = 0
        while True:
            if not self._wait_for_servers(first=self._attempt == 0):
                return STOPPED
            checkpoint = newest_checkpoint(self.folder) or ""
            code = self._train()
            record = read_record(self.folder / "status.json")  # none of this start if a rank died early
            state = None if self._trains else {0: "finished", 128 + signal.SIGTERM: "stopped"}.get(code)
            status = record if record.get("attempt") == os.environ[ATTEMPT_VARIABLE] else {"state": state}
            if status.get("state") == "finished":
                return FINISHED
            if self._stop_signal is not None:
                saved = "saved itself" if self._trains and status.get("state") == "stopped" else "was killed"
                self._tell(f"asked to stop by {self._stop_signal.name}; the {self.name} {saved}")
                return STOPPED
            # If a node's process was killed, Slurm, not the user, asks the remaining ranks to stop.
            if status.get("state") == "stopped" and code != 128 + signal.SIGKILL:
                self._wait_for_slurm()
                return STOPPED
            failure = read_record(self._failure_file)
            signs = read_signs(self.folder, self.config.launch.ranks, os.environ[ATTEMPT_VARIABLE])
            cause = failure.get("message") or status.get("last_error") or f"exit code {code}"
            if self._trains and failure.get("kind") in (None, "MegarlError"):  # a killed rank has written no error
                # Where the cause is known, leave out further errors.
                places = [sign | {"error": None} for sign in signs] if failure else signs
                cause += f"; last seen: {describe_ranks(places, now=None)}"
                if not failure and not any(sign["beat"] for sign in signs):
                    cause += refusal("no_rank_began", python=PYTHON)
            if failure.get("kind") in _BAD_INPUT:
                self._tell(f"the {self.name} cannot go on: {cause}")
                return BAD_INPUT
            if failure.get("kind") == "DamageError":  # a restart would find the same damage
                self._tell(f"given up: {cause}")
                return FAILED
            fruitless = 0 if (newest_checkpoint(self.folder) or "") > checkpoint else fruitless + 1
            if fruitless > self.config.launch.max_restarts:
                times = f"{fruitless} times" + " without a new checkpoint" * self._trains
                self._tell(f"the {self.name} died {times} and is given up: {cause}")
                return FAILED
            self._tell(f"the {self.name} died ({cause}); starting it again")

    def _set_topology(self, topology_found: Topology) -> None:
        samples = self.command[0] != "sft"
        self.topology = topology_found if samples else replace(topology_found, servers=(), server_ports=())
        if self.topology.servers and self.config.sglang.api_key_env is None:
            # Whoever reaches a server can replace the weights. The key is passed in the environment only, in no file.
            os.environ.setdefault(KEY_VARIABLE, secrets.token_hex(16))

    def _write(self, says: str) -> None:
        """Write launch.json for all processes of the launch."""
        key, of_trainer = [], []
        if self.topology.servers:
            of_trainer = ["--sglang.urls", json.dumps(self.topology.urls), "--sglang.gpus", "[]"]
            key = ["--sglang.api_key_env", KEY_VARIABLE] if self.config.sglang.api_key_env is None else []
        if self._attempt:
            says += f", {self._attempt} starts of the {self.name}, {sum(self._servers.restarts)} restarts of servers"
        launch = {
            "launch": self.logs.name,
            "topology": asdict(self.topology),
            "command": [*self.command, *key, *of_trainer],
            "server_command": [*self.command, *key],
            "logs": str(self.logs / f"attempt{self._attempt}"),
            "says": says,
        }
        write_atomically(self.launch_file, json.dumps(launch, indent=1).encode())

    def _write_status(self, says: str) -> None:
        try:
            self._write(says)
        except OSError as error:
            # For example a full disk. Only `megarl status` reads the file, so a failure must not end a trainer or a
            # requeue.
            self._tell(f"warning: {self.launch_file} is not up to date: {error}")

    def _write_for_ranks(self) -> None:
        """Write launch.json for the ranks of this start; RolloutError if writing fails for a minute."""
        until = time.monotonic() + _FULL_DISK_S
        while self._stop_signal is None:
            try:
                self._failure_file.parent.mkdir(parents=True, exist_ok=True)
                return self._write("running")
            except OSError as error:
                if time.monotonic() > until:
                    raise RolloutError(f"{self.launch_file} cannot be written: {error}") from error
                self._tell(f"warning: {self.launch_file} cannot be written: {error}; trying again")
            self._wait(min(5.0, _FULL_DISK_S / 10))
        return None

    def _train(self) -> int:
        """Start the trainer and wait for the end; return the exit code."""
        self._attempt += 1
        if self._attempt > 1:  # another port: ranks of the last start may still hold the old port
            port = steps.free_ports(1, int(os.environ.get("SLURM_JOB_ID", os.getpid())), self._attempt)[0]
            self.topology = replace(self.topology, master_port=port)
        os.environ[ATTEMPT_VARIABLE] = f"{self.logs.name}-{self._attempt}"
        self._failure_file = self.logs / f"attempt{self._attempt}" / "failure.json"
        os.environ[FAILURE_VARIABLE] = str(self._failure_file)
        self._write_for_ranks()
        if self._stop_signal is not None:
            return STOPPED
        step = Step(self.name, self._trainer_words())
        try:
            while step.code is None:
                self._wait()
                self._restart_servers()
                if self._stop_signal is not None:
                    self._stop_trainer(step)
            return step.code
        finally:
            step.stop(grace_s=1.0)

    def _stop_trainer(self, step: Step) -> None:
        """Ask the ranks to stop, and kill them after launch.stop_grace_s. An evaluation or a cold start has nothing to
        save: end it."""
        if not self._trains:
            return step.stop(_END_S)
        grace_s = self.config.launch.stop_grace_s
        # By a file: a signal would also end servers and reward workers, and miss starting ranks.
        with suppress(OSError):
            stop_file(self.folder).write_text(os.environ[ATTEMPT_VARIABLE])
        if time.monotonic() > self._stop_asked_at + grace_s:
            self._tell(f"the trainer has not stopped within {grace_s:.0f} s: killed")
            step.stop(grace_s=1.0)

    def _trainer_words(self) -> list[str]:
        words = [PYTHON, "-m", "megarl.ops.launch.node", str(self.launch_file)]
        if self.topology.job is None:
            return [*words, "0"]
        return [*srun(self.topology.trainers, het_group=0 if self.topology.het else None), *words]

    def _wait_for_servers(self, *, first: bool) -> bool:
        """Wait until each server answers or has failed; return False after a request to stop.

        Failed servers are restarted, and the trainer begins with the answering servers. RolloutError if no server
        answers in time, or if all servers fail at the first start.
        """
        number, deadline_s = len(self.topology.server_ports), self.config.sglang.start_deadline_s
        until = time.monotonic() + deadline_s
        while self._stop_signal is None:
            ready, loading = self._servers.find()
            failed = self._servers.find_failed()
            if (ready or not first) and self._restart_servers():
                failed = []
            is_late = time.monotonic() > until
            if len(ready) == number or (ready and (is_late or not loading)):
                if len(ready) < number:
                    self._tell(f"warning: {len(ready)} of {number} servers answer; the trainer begins with them")
                return True
            if is_late or len(failed) == number:
                cause = f"none of {number} servers was ready after sglang.start_deadline_s = {deadline_s:.0f} s"
                failed[2:] = [f"and {len(failed) - 2} more"] if failed[2:] else []
                raise RolloutError("; ".join(failed or [f"{cause}; see {self.logs}, or raise it"]))
            self._wait()
        return False

    def _wait_for_slurm(self) -> None:
        """Wait for Slurm, which has stopped the ranks and now ends or requeues this script."""
        until = time.monotonic() + self.config.launch.stop_grace_s
        while self.topology.job is not None and self._stop_signal is None and time.monotonic() < until:
            self._wait()

    def _restart_servers(self) -> bool:
        """Whether any server was started again."""
        restarted = self._stop_signal is None and self._servers.restart_ended()
        if restarted:
            self._write_status("running")
        return restarted

    def _requeue(self) -> None:
        """Put the job back into Slurm's queue; Slurm then ends this script."""
        job = os.environ.get("SLURM_JOB_ID")
        if job is not None:
            self._tell(f"job {job} is requeued")
            try:
                steps.ask_slurm(["scontrol", "requeue", job])
            except ConfigError as error:
                return self._tell(f"error: {error}; submit the job again to continue")
            time.sleep(60.0)  # Slurm ends this script; an exit code would count as the job's end

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1 and not self._trains:
            return  # near the time limit, and nothing to save: it may still end in time
        if self._stop_signal is None:
            self._stop_signal, self._stop_asked_at = signal.Signals(number), time.monotonic()
            return
        if number == signal.SIGINT:
            # Do not requeue after Ctrl-C. A SIGTERM may be Slurm's, which follows SIGUSR1.
            self._stop_signal = signal.SIGINT
        if number != signal.SIGUSR1 and time.monotonic() - self._stop_asked_at > 1.0:
            self._stop_asked_at = -self.config.launch.stop_grace_s  # asked twice: do not wait for the trainer

    def _wait(self, seconds: float = _POLL_S) -> None:
        """Sleep, and keep the lock."""
        time.sleep(seconds)
        if time.monotonic() - self._beaten > BEAT_S:
            self._beaten = time.monotonic()
            with suppress(OSError):
                self._lock.beat()

    def _tell(self, line: str) -> None:
        try:
            print(f"megarl: {printable(line)}", file=sys.stderr, flush=True)
        except OSError:
            if not drop_lost_outputs():
                raise


def launch(config: Config, command: Sequence[str]) -> int:
    """``megarl launch``; see ``Supervisor``. ConfigError under torchrun."""
    if config.launch.layout != "local":
        command = [command[0], str(Path(command[1]).absolute()), *command[2:]]
    if os.environ.get("RANK") is not None:
        raise ConfigError("megarl launch starts torchrun itself; run it once, without torchrun")
    return Supervisor(config, command).run()
