"""One step of a job: a command on some of its nodes, under srun, or on this machine without Slurm."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megarl.errors import ConfigError
from megarl.launch.topology import Node

PYTHON = os.environ.get("MEGARL_STEP_PYTHON", sys.executable)
"""The Python of the steps; in a container it may be another one than here."""
_POLL_S = 0.2


class Step:
    """A process group that starts at once; its output goes to that of this process, or to a file."""

    def __init__(self, name: str, words: Sequence[str], log: Path | None = None) -> None:
        self.name = name
        output = None if log is None else log.open("ab")
        try:
            self._process = subprocess.Popen(
                list(words), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        except OSError as error:
            raise ConfigError(f"{name}: {words[0]} could not be started: {error}") from error
        finally:
            if output is not None:
                output.close()

    @property
    def code(self) -> int | None:
        """Exit code, for a signal 128 + its number; None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL after ``grace_s``; returns when the process is gone."""
        if self.code is None:
            self._signal(signal.SIGTERM)
        until = time.monotonic() + grace_s
        while self.code is None and time.monotonic() < until:
            time.sleep(_POLL_S)
        if self.code is None:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def srun(nodes: Sequence[Node], *, het_group: int | None = None) -> list[str]:
    """The first words of a command line that runs one task on each of these nodes, beside what else runs there.

    MEGARL_SRUN_ARGS adds words, e.g. those of pyxis: ``--container-image=... --container-mounts=...``.
    """
    words = ["srun", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"]
    words += [f"--nodelist={','.join(node.name for node in nodes)}"]
    # Steps share all resources of a node (--overlap, --mem=0); one failed task ends the whole step.
    words += ["--overlap", "--mem=0", "--cpu-bind=none", "--kill-on-bad-exit=1", "--export=ALL"]
    if het_group is not None:
        words.append(f"--het-group={het_group}")
    more = os.environ.get("MEGARL_SRUN_ARGS", "")
    try:
        return [*words, *shlex.split(more)]
    except ValueError as error:
        raise ConfigError(
            f"MEGARL_SRUN_ARGS: found {more!r}, words as a shell reads them are expected: {error}"
        ) from None
