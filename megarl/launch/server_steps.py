"""The SGLang servers on nodes of their own: one step of the job for each, watched and started again here.

A step writes ``server<INDEX>.json`` beside launch.json when its server answers. It ends when ``server<INDEX>.end``
holds the name of its launch: srun passes SIGTERM on as SIGKILL, and a killed server would leave files with keys behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megarl.config import Config
from megarl.errors import ConfigError, RolloutError
from megarl.launch.steps import PYTHON, Step, srun
from megarl.launch.topology import Topology

_BAD_INPUT = 2
_GRACE_S = 30.0
_POLL_S = 0.5


def ready_file(launch_file: Path, index: int) -> Path:
    """Exists when the server answers."""
    return launch_file.with_name(f"server{index}.json")


def end_file(launch_file: Path, index: int) -> Path:
    """Holds the name of the launch whose server is to end; a server of another launch goes on."""
    return launch_file.with_name(f"server{index}.end")


class ServerSteps:
    """The steps of all servers; without server nodes there are none, and all methods do nothing."""

    def __init__(self, config: Config, launch_file: Path, logs: Path, tell: Callable[[str], None]) -> None:
        self._config, self._launch_file, self._logs, self._tell = config, launch_file, logs, tell
        self._steps: list[Step] = []
        self._restarts: list[int] = []

    def start(self, topology: Topology) -> None:
        """Start a step for each server."""
        self._topology = topology
        self._restarts = [0] * len(topology.server_ports)
        self._steps = [self._start_step(index) for index in range(len(topology.server_ports))]

    @property
    def num_restarts(self) -> int:
        """Restarts of all servers."""
        return sum(self._restarts)

    @property
    def all_ready(self) -> bool:
        """Whether every server has answered."""
        return all(ready_file(self._launch_file, index).exists() for index in range(len(self._steps)))

    def require_first_start(self) -> None:
        """Raise if a step has ended before its server answered: ConfigError for bad input, else RolloutError."""
        for index, step in enumerate(self._steps):
            if step.code is not None:
                refusal = ConfigError if step.code == _BAD_INPUT else RolloutError
                raise refusal(
                    f"{step.name} ended with exit code {step.code} before it was ready; see {self._log(index)}"
                )

    def restart_ended(self) -> bool:
        """Start the steps that have ended again, each up to sglang.max_restarts times; returns whether there were any.

        A server that is given up is left to the trainer, which finds out whether it can go on without it.
        """
        found = False
        for index, step in enumerate(self._steps):
            if step.code is None or self._restarts[index] >= self._config.sglang.max_restarts:
                continue
            self._restarts[index] += 1
            self._tell(f"{step.name} ended with exit code {step.code}; starting it again")
            self._steps[index] = self._start_step(index)
            found = True
        return found

    def require_alive(self) -> None:
        """RolloutError if a server that has not answered is given up."""
        for index, step in enumerate(self._steps):
            if step.code is not None and not ready_file(self._launch_file, index).exists():
                raise RolloutError(
                    f"{step.name} has ended and was started again sglang.max_restarts = "
                    f"{self._config.sglang.max_restarts} times; see {self._log(index)}"
                )

    def stop(self) -> None:
        """Ask all steps to end, and kill those that do not."""
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
        words = [PYTHON, "-m", "megarl.launch.serve", str(self._launch_file), str(index)]
        prefix = srun([node], het_group=1 if self._topology.het else None)
        return Step(f"server {index} on node {node.name}", [*prefix, *words], self._log(index))

    def _log(self, index: int) -> Path:
        return self._logs / f"server{index}.log"
