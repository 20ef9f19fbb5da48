"""A process of an SGLang server: start, health, and an end without leftovers.

The server runs in a session of its own under ``reaper``. Two events end the server:

- ``stop``: SIGTERM, then SIGKILL, then a check for surviving processes: SGLang's children outlive a SIGTERM by many
  seconds;
- the reaper, when the starting process has ended or was killed.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self

import httpx
import psutil

from megarl.config import Config
from megarl.config.addresses import url_host
from megarl.engines.sglang.http import authorization, key_named, server_info
from megarl.engines.sglang.spec import SERVER_DTYPES, ServerSpec, command, environment, free_port, write_config
from megarl.engines.sglang.versions import check_server, installed_release, parse_arguments, require_own
from megarl.errors import ConfigError, MegarlError, RolloutError, refusal
from megarl.models.fit import servers_record

REAPER = Path(__file__).parent / "reaper.py"
LOG_TAIL_LINES = 30
KILL_WAIT_S = 30.0
"""How long the kernel may take to remove killed processes; a large process needs seconds."""
HEALTH_TIMEOUT_S = 30.0
"""SGLang's health check generates a token, and gives up after 20 seconds."""


class Server:
    """Starts, checks and stops a server; a stopped or dead server may be started again."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._changing = threading.RLock()  # two threads may start and stop at once
        self._port = spec.port or free_port(spec.host)
        self._config_file: Path | None = None
        self._log_start = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Base address without a slash at the end; a restart keeps the address."""
        return f"http://{url_host(self.spec.host)}:{self._port}"

    @property
    def alive(self) -> bool:
        """Whether the process runs; the server may still be unhealthy."""
        try:
            return self._process is not None and self._exit_code() is None
        except RolloutError:  # a second thread has just stopped the server
            return False

    def start(self) -> None:
        """Start the process and return at once; RolloutError if it runs already, ConfigError without an interpreter."""
        with self._changing:
            if self.alive:
                raise RolloutError(f"the SGLang server at {self.url} already runs: stop it first")
            self.kill()  # processes left by a dead server
            if not Path(self.spec.python).exists():
                raise ConfigError(f"found no Python at {self.spec.python}: set sglang.python (docs/sglang.md)")
            require_own(Path(self.spec.python))
            self._config_file = write_config(self.spec)
            server_command = command(replace(self.spec, port=self._port), self._config_file)
            reaper = [sys.executable, "-I", str(REAPER), str(os.getpid()), str(self._config_file or "")]
            log_file = Path(self.spec.log_file)
            log_file.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
                os.fchmod(log.fileno(), 0o600)  # an earlier run may have left the file readable to all
                log.write(f"megarl: starting {shlex.join(server_command)}\n".encode())
                log.flush()
                self._log_start = log.tell()
                words, env = [*reaper, *server_command], environment(self.spec)
                self._process = subprocess.Popen(
                    words, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )

    def wait_ready(self, deadline_s: float, ended: threading.Event | None = None) -> None:
        """Return when the server has generated a token; RolloutError with the end of the log at the deadline, or if
        another thread sets ``ended``."""
        end = time.monotonic() + deadline_s
        log = f"{self.spec.log_file}, whose end is\n"
        while True:
            if ended is not None and ended.is_set():
                raise RolloutError(f"the SGLang server at {self.url} is not needed any more")
            remaining, problem = end - time.monotonic(), None
            if (code := self._exit_code()) is not None:
                problem = f"ended with exit code {code} before it was ready: the reason is in"
            elif remaining <= 0:
                problem = f"was not ready after {deadline_s:.0f} s: allow more time if it still loads, else look into"
            if problem is not None:
                raise RolloutError(f"the SGLang server at {self.url} {problem} {log}{self.log_tail()}")
            if self.healthy(timeout_s=min(HEALTH_TIMEOUT_S, remaining)):
                return
            time.sleep(min(0.2, remaining))

    def healthy(self, timeout_s: float = HEALTH_TIMEOUT_S) -> bool:
        """Whether the server passes its health check in time: a generated token, or a generation in progress."""
        headers = authorization(self.spec.api_key)
        try:  # verify: loading certificates takes longer than a plain HTTP request
            answer = httpx.get(f"{self.url}/health", headers=headers, timeout=timeout_s, trust_env=False, verify=False)
        except httpx.HTTPError:
            return False
        return answer.status_code == 200

    def stop(self, grace_s: float = 10.0) -> None:
        """End the server and all processes: SIGTERM to the group, SIGKILL after ``grace_s``.

        Does nothing for a stopped server; ``start`` may follow. RolloutError if processes survive.
        """
        with self._changing:
            if self._process is None:
                return
            if grace_s:
                self._signal(signal.SIGTERM)
            if not grace_s or not self._wait_gone(grace_s):
                self._end_by_force()
            self._process.wait()
            self._process = None
            if self._config_file is not None:
                self._config_file.unlink(missing_ok=True)
                self._config_file = None

    def kill(self) -> None:
        """Kills all processes of the server at once."""
        self.stop(grace_s=0.0)

    def members(self) -> list[psutil.Process]:
        """Returns the server's processes, with the reaper and without zombies."""
        if self._process is None:
            return []
        # The leader stays a zombie until the end, which reserves the process id.
        return [process for process in psutil.process_iter() if _is_living_member(process, self._process.pid)]

    def log_tail(self) -> str:
        """Return the last lines of the server's output since its start."""
        with open(self.spec.log_file, "rb") as log:
            log.seek(self._log_start)
            text = "\n".join(log.read().decode("utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:])
        return text.replace(self.spec.api_key, "***") if self.spec.api_key else text  # SGLang prints its arguments

    def _exit_code(self) -> int | None:
        """Exit code of the reaper, equal to the server's; None while it runs. Leaves the zombie, see ``members``."""
        process = self._process  # a second thread may stop the server meanwhile
        if process is None:
            raise RolloutError("the SGLang server was not started: call start() first")
        if process.returncode is None:
            with contextlib.suppress(ChildProcessError):
                ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                return None if ended is None else ended.si_status * (1 if ended.si_code == os.CLD_EXITED else -1)
        return process.wait()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):  # none is left
            os.killpg(self._process.pid, number)

    def _wait_gone(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while self.members():
            if time.monotonic() >= end:
                return False
            time.sleep(0.1)
        return True

    def _end_by_force(self) -> None:
        self._signal(signal.SIGKILL)
        for process in self.members():  # processes may have left the group, though not the session
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if not self._wait_gone(KILL_WAIT_S):
            survivors = ", ".join(f"{process.pid} ({' '.join(process.cmdline()[:3])})" for process in self.members())
            raise RolloutError(refusal("left_after_kill", url=self.url, kill_wait_s=KILL_WAIT_S, survivors=survivors))


def _is_living_member(process: psutil.Process, leader_pid: int) -> bool:
    """Whether the process is in the session of ``leader_pid``, in whatever group."""
    try:
        return os.getsid(process.pid) == leader_pid and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess, PermissionError):
        return False


ASK_S = 20.0


def examine(config: Config) -> Iterator[tuple[str, Literal["ok", "warning", "failed"], str]]:
    """Yield (interpreter or URL, status, text) of the servers in sglang.urls, or of sglang.python; starts no server."""
    settings, routes = config.sglang, servers_record(config)
    for place in settings.urls or [str(settings.python)]:
        try:
            if settings.urls:
                info = server_info(place, key_named(settings.api_key_env), ASK_S)
            else:
                gpus, arguments = tuple(settings.gpus[: settings.tp]) or None, tuple(settings.arguments)
                programs = config.model.path, place, SERVER_DTYPES[config.rollout.dtype], os.devnull
                spec = ServerSpec(*programs, tp=settings.tp, gpus=gpus, routes=routes, extra_args=arguments)
                # Servers started by megarl have a key, which is not on the command line.
                expected = {"api_key": True, "version": installed_release(Path(place)), "model_path": None}
                info = {**parse_arguments(command(spec)), **expected}
            info = {**info, "checksums": settings.checksums}
            source = Path(config.model.path)
            _, warnings = check_server(info, settings.tp, routes, config.rollout.top_p < 1, source, settings.fp8)
        except MegarlError as error:
            yield place, "failed", str(error)
            continue
        for warning in warnings:
            yield place, "warning", warning
        yield place, "ok", f"SGLang {info['version']}"
