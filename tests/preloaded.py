"""One process for the whole session that has imported the heavy packages, and forks whatever needs them.

An import of torch, Megatron and transformers costs seconds of a core, a fork milliseconds. ``megatron/ranks.py`` and
``train/forks.py`` run their ranks below it. A launch is a folder with a plan; what is in it is the worker's affair.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PATH = [str(HERE), str(HERE / "megatron"), str(HERE / "train")]
STUCK_S = 3600.0
"""Only a launch that hangs takes so long: the ranks have limits of their own."""


def launch(worker: str, folder: Path, log: Path) -> None:
    """Run ``worker.run_plan(folder)`` in a process of its own, in the parent of ``folder``. Wait until it has ended."""
    order = {
        "worker": worker,
        "folder": str(folder),
        "log": str(log),
        "environment": dict(os.environ),
        "path": sys.path,
    }
    _server().run(order)


@functools.cache
def _server() -> _Server:
    return _Server()


class _Server:
    """The process, started when it is first needed and again after a launch that hung."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        atexit.register(self.close)

    def run(self, order: dict[str, Any]) -> None:
        if self._process is not None and self._process.poll() is not None:  # a test may have ended all its children
            self._process = None
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        pid = self._answer(process)
        try:
            self._answer(process)
        except queue.Empty:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            self.close()

    def _start(self) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([*PATH, *filter(None, sys.path)]),
        }
        return subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _answer(self, process: subprocess.Popen[str]) -> int:
        assert process.stdout is not None
        answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=lambda: answers.put(process.stdout.readline()), daemon=True).start()
        answer = answers.get(timeout=STUCK_S)
        if not answer:
            self._process = None
            raise RuntimeError(f"the process that forks the ranks ended with exit code {process.wait()}")
        return int(answer)

    def close(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None


def _child(order: dict[str, Any]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(order["environment"], OMP_NUM_THREADS="1")
    sys.path[:] = [*PATH, *(path for path in order["path"] if path not in PATH)]
    os.chdir(Path(order["folder"]).parent)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    importlib.import_module(order["worker"]).run_plan(Path(order["folder"]))


def main() -> None:
    import torch
    from fast_files import skip_fsync

    import megarl.train.loop  # noqa: F401  (before the forks, so that it costs once)

    torch.set_num_threads(1)
    skip_fsync()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                _child(json.loads(line))
                status = 0
            finally:
                if status:
                    import traceback

                    traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        print(pid, file=answers)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers)


if __name__ == "__main__":
    main()
