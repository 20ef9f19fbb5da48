"""The steps of a job: commands on nodes under srun, or on this machine without Slurm.

Each server on a separate node is a step. The step writes ``server<INDEX>.json`` beside launch.json when the server
answers, and ends when ``server<INDEX>.end`` holds the name of the launch: srun passes SIGTERM on as SIGKILL, and a
killed server would leave files with keys behind.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from megarl.config import Config
from megarl.config.trust import safe_environment
from megarl.errors import ConfigError
from megarl.ops.launch.topology import Node, Topology

PYTHON = os.environ.get("MEGARL_STEP_PYTHON", sys.executable)
"""The Python of the steps; a container may have another Python."""
BAD_INPUT = 2
"""Exit code of a process whose restart would fail again."""
_GRACE_S = 30.0
_POLL_S = 0.2


class Step:
    """A process group that starts at once. Output goes to a file, or to the output of this process."""

    def __init__(self, name: str, words: Sequence[str], log: Path | None = None) -> None:
        self.name = name
        with nullcontext() if log is None else log.open("ab") as output:
            try:
                streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
                self._process = subprocess.Popen(words, **streams, env=safe_environment(), start_new_session=True)
            except OSError as error:
                raise ConfigError(f"{name}: {words[0]} could not be started: {error}") from error

    @property
    def code(self) -> int | None:
        """Exit code, or 128 + the number of a signal; None while the process runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL after ``grace_s``; return when the process has ended."""
        for number, timeout in ((signal.SIGTERM, grace_s), (signal.SIGKILL, None)):
            if self.code is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout)


def srun(nodes: Sequence[Node], *, het_group: int | None = None) -> list[str]:
    """Return the srun command that runs one task on each node, beside running steps.

    MEGARL_SRUN_ARGS adds words, for example for pyxis: ``--container-image=... --container-mounts=...``.
    """
    words = ["srun", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"]
    words += [f"--nodelist={','.join(node.name for node in nodes)}"]
    # Steps share all resources of a node (--overlap, --mem=0); one failed task ends the whole step.
    words += ["--overlap", "--mem=0", "--cpu-bind=none", "--kill-on-bad-exit=1", "--export=ALL"]
    if het_group is not None:
        words.append(f"--het-group={het_group}")
    extra = os.environ.get("MEGARL_SRUN_ARGS", "")
    try:
        return [*words, *shlex.split(extra)]
    except ValueError as error:
        raise ConfigError(f"MEGARL_SRUN_ARGS: found {extra!r}, expected words in shell syntax: {error}") from None


def ready_file(launch_file: Path, index: int) -> Path:
    """The file that exists when the server answers."""
    return launch_file.with_name(f"server{index}.json")


def end_file(launch_file: Path, index: int) -> Path:
    """The file with the name of the launch whose server must end; servers of a newer launch continue."""
    return launch_file.with_name(f"server{index}.end")


class ServerSteps:
    """The steps of all servers; no steps without server nodes."""

    def __init__(self, config: Config, launch_file: Path, logs: Path, tell: Callable[[str], None]) -> None:
        self._config, self._launch_file, self._logs, self._tell = config, launch_file, logs, tell
        self._steps: list[Step] = []
        self._restarts: list[int] = []

    def start(self, topology: Topology) -> None:
        self._topology = topology
        self._restarts = [0] * len(topology.server_ports)
        self._steps = [self._start_step(index) for index in range(len(topology.server_ports))]

    @property
    def num_restarts(self) -> int:
        return sum(self._restarts)

    def find(self) -> tuple[list[int], list[int]]:
        """Return (servers that have answered, servers in the first start)."""
        ready = [index for index in range(len(self._steps)) if ready_file(self._launch_file, index).exists()]
        loading = [index for index, step in enumerate(self._steps) if step.code is None and not self._restarts[index]]
        return ready, [index for index in loading if index not in ready]

    def restart_ended(self) -> bool:
        """Restart ended steps, each up to sglang.max_restarts times; return whether any step was restarted.

        After the last restart, the trainer decides whether to continue without the server.
        """
        restarted = False
        for index, step in enumerate(self._steps):
            if step.code is not None and self._restarts[index] < self._config.sglang.max_restarts:
                self._restarts[index] += 1
                self._tell(f"{step.name} ended with exit code {step.code}; starting it again")
                self._steps[index] = self._start_step(index)
                restarted = True
        return restarted

    def find_failed(self) -> list[str]:
        """Return a line for each step whose end came before the first answer; ConfigError for bad input."""
        failures = []
        for index, step in enumerate(self._steps):
            if step.code is not None and not ready_file(self._launch_file, index).exists():
                failures.append(
                    f"{step.name} ended with exit code {step.code} before it was ready, after {self._restarts[index]} "
                    f"restarts; see {self._log(index)}"
                )
                if step.code == BAD_INPUT:
                    raise ConfigError(failures[-1])
        return failures

    def stop(self) -> None:
        """Ask all steps to end, and kill late steps."""
        for index in range(len(self._steps)):
            with suppress(OSError):
                end_file(self._launch_file, index).write_text(self._logs.name)
        until = time.monotonic() + _GRACE_S
        while any(step.code is None for step in self._steps) and time.monotonic() < until:
            time.sleep(_POLL_S)
        for step in self._steps:
            step.stop(grace_s=1.0)
        self._steps = []

    def _start_step(self, index: int) -> Step:
        for file in (ready_file(self._launch_file, index), end_file(self._launch_file, index)):
            file.unlink(missing_ok=True)
        node = self._topology.server_node(index)
        words = [PYTHON, "-m", "megarl.ops.launch.serve", str(self._launch_file), str(index)]
        prefix = srun([node], het_group=1 if self._topology.het else None)
        return Step(f"server {index} on node {node.name}", [*prefix, *words], self._log(index))

    def _log(self, index: int) -> Path:
        return self._logs / f"server{index}.log"
