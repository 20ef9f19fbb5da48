"""Python processes without the seconds that imports cost: forks of a process that lives as long as the session.

``Popen`` and ``run`` are those of ``subprocess``, for commands that start with this interpreter; what they start is a
child of this process like any other. zygote.py says how. ``launch`` runs a worker's plan: ``megatron/ranks.py`` and
``trainer/forks.py`` run their ranks below it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PATH = [str(HERE), str(HERE / "megatron"), str(HERE / "trainer")]
MODULES = ("megarl.trainer.loop", "megarl.cli", "torch.distributed.run")
STUCK_S = 3600.0
"""Only a launch that hangs takes so long: the ranks have limits of their own."""
PADDING = "-" * 4096
"""Room on the command line of a zygote for those of its forks."""
_PR_SET_CHILD_SUBREAPER = 36


class Zygote:
    """The process that forks others; started when it is first needed, and again if somebody has ended it."""

    def __init__(self, python: str, modules: Sequence[str], environment: Mapping[str, str], way: str = "") -> None:
        self._python, self._modules, self._environment, self._way = python, modules, environment, way
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._lock = threading.Lock()
        atexit.register(self.close)

    def fork(self, words: Sequence[str], streams: Sequence[int], keep: Sequence[int], **order: Any) -> int:
        """Start ``python WORDS``; the id of the process, a child of this one."""
        with self._lock:
            orders = self._orders_to_living()
            order |= {"words": words, "keep": list(keep), "parent": os.getpid()}
            _adopt_orphans(True)
            try:
                socket.send_fds(orders, [json.dumps(order).encode()], [*streams, *keep])
                return int(orders.recv(32))
            finally:
                _adopt_orphans(False)

    def close(self) -> None:
        """Also ends what it has forked and nobody else has."""
        if self._process and self._orders:
            self._orders.close()
            self._process.kill()
            self._process.wait()
        self._process = self._orders = None

    def _orders_to_living(self) -> socket.socket:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._start()
        assert self._orders is not None
        return self._orders

    def _start(self) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [self._python, str(HERE / "zygote.py"), str(theirs.fileno()), ",".join(self._modules), self._way]
        with theirs:
            self._process = subprocess.Popen(
                [*words, PADDING],
                executable=self._python,  # not a fork of this process, if it is one of a zygote
                env=self._environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        if self._orders.recv(32) != b"ready":
            raise RuntimeError(f"the process that forks others ended with exit code {self._process.wait()}")


def _adopt_orphans(yes: bool) -> None:
    """Whether a process whose parent ends becomes a child of this one: so does what a zygote forks for it."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


class ForkedPopen(subprocess.Popen):  # type: ignore[type-arg]
    """A ``subprocess.Popen`` whose process is a fork of a zygote."""

    def _zygote(self, words: Sequence[str], environment: Mapping[str, str]) -> Zygote:
        assert words[0] == sys.executable, words
        return _own_zygote()

    def _execute_child(self, words: Any, executable: Any, *settings: Any) -> None:
        preexec_fn, close_fds, pass_fds, cwd, env, _, _, shell, *pipes = settings[:14]
        words = [os.fspath(word) for word in words]
        environment = dict(os.environ if env is None else env)
        assert close_fds
        assert not any((preexec_fn, executable, shell))
        ends = (pipes[0], pipes[3], pipes[5])
        streams = [own if end < 0 else end for own, end in enumerate(ends)]
        cwd = os.getcwd() if cwd is None else os.fspath(cwd)
        self.pid = self._zygote(words, environment).fork(
            words[1:], streams, pass_fds, env=environment, cwd=cwd, session=settings[19]
        )
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


Popen = ForkedPopen


def run(
    words: Sequence[str | Path],
    *,
    timeout: float | None = None,
    start: type[subprocess.Popen[str]] = Popen,
    stderr: int = subprocess.PIPE,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run``, with the output as text."""
    with start(words, stdout=subprocess.PIPE, stderr=stderr, text=True, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


def launch(worker: str, folder: Path, log: Path) -> None:
    """Run ``worker.run_plan(folder)`` in a process of its own, in the parent of ``folder``. Wait until it has ended."""
    code = f"import pathlib, {worker}; {worker}.run_plan(pathlib.Path({str(folder)!r}))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([*PATH, *(path for path in sys.path if path and path not in PATH)])
    words = [sys.executable, "-c", code]
    with log.open("ab") as output:
        process = Popen(
            words,
            env=environment,
            cwd=folder.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        process.wait(STUCK_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def write_python(path: Path, python: str | Path, module: str, modules: Sequence[str], way: str = "") -> Path:
    """Write a program that is ``python``, but imports ``modules`` once for all processes of ``-m MODULE``."""
    words = shlex.join([str(python), str(HERE / "zygote.py"), "-", ",".join(modules), way, PADDING])
    path.write_text(
        f'#!/bin/sh\ncase "$2" in {module}) exec {words} "$@";; *) exec {shlex.quote(str(python))} "$@";; esac\n'
    )
    path.chmod(0o755)
    return path


@functools.cache
def _own_zygote() -> Zygote:
    """That of megarl's own environment."""
    path = os.pathsep.join([*PATH, *filter(None, sys.path)])
    return Zygote(sys.executable, MODULES, {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path})
