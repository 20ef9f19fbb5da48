"""One SGLang server process: its command line, its start, its health, and its end without leftovers.

The server runs in a process group of its own under ``reaper``. Three things see to its end: ``stop`` (SIGTERM,
then SIGKILL, then a look that nobody is left: SGLang's children outlive a SIGTERM to the launcher by many seconds), the
exit of this interpreter, and the reaper if this process is killed outright.

    with Server(ServerSpec("model", python=".venv-sglang/bin/python", dtype="float32", log_file="log")) as server:
        server.wait_ready(deadline_s=300)
        ...  # talk to server.url
"""

from __future__ import annotations

import atexit
import contextlib
import http.client
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

import psutil

from megarl.errors import ConfigError, RolloutError
from megarl.rollout.sglang.http import authorization, server_info
from megarl.rollout.sglang.versions import arguments_of, check_arguments

CPU_SHIM = Path(__file__).parent / "cpu"
PLUGIN = Path(__file__).parent / "plugin"
REAPER = Path(__file__).parent / "reaper.py"
LOG_TAIL_LINES = 30
KILL_WAIT_S = 30.0
"""How long the kernel may take to remove killed processes; a large memory image needs seconds."""
HEALTH_TIMEOUT_S = 30.0
"""SGLang's health check generates a token and itself gives up after 20 seconds."""
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "GROUP_WORLD_SIZE")
TORCHRUN_PREFIXES = ("LOCAL_", "ROLE_", "TORCHELASTIC_")
NOT_EXTRA = {
    "api_key": "every user of the host can read it there: set api_key",
    "config": "it could set anything behind the checks: give the arguments themselves",
    "weight_version": "a server that starts again must not pass off its old weights as the current ones",
    "model_path": "set model_path",
    "model": "set model_path",
    "host": "set host",
    "port": "set port",
    "tp_size": "set tp",
    "tensor_parallel_size": "set tp",
    "tp": "set tp",
}
"""Arguments that extra_args may not hold, and why."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """What is needed to start one server on this host."""

    model_path: str | Path
    """A local directory in Hugging Face format."""
    python: str | Path
    """Interpreter of the environment that SGLang is installed in, usually not megarl's own."""
    dtype: str
    """float32, bfloat16, float16 or auto."""
    log_file: str | Path
    """Everything the server prints is appended here. Only the owner may read it: SGLang logs its API key."""
    host: str = "127.0.0.1"
    """Loopback unless said otherwise: whoever reaches an SGLang server can replace its weights."""
    port: int = 0
    """0 chooses a free port; a server that is started again keeps it."""
    tp: int = 1
    """Tensor parallel size."""
    gpus: tuple[int, ...] | None = None
    """Device indices as nvidia-smi counts them; None serves on the CPU, without CUDA."""
    max_total_tokens: int | None = None
    """Size of the KV cache in tokens; None lets SGLang derive it from mem_fraction."""
    mem_fraction: float | None = None
    """Share of the memory for weights and KV cache; None is 0.1 on a CPU and SGLang's own choice on GPUs."""
    api_key: str | None = field(default=None, repr=False)
    """Every request but the health check must then carry it as a bearer token."""
    extra_args: tuple[str, ...] = ()
    """More arguments of sglang.launch_server; they come last and so win."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port is {self.port}, expected 0 (a free one) to 65535")
        if self.tp < 1 or (self.gpus is not None and len(self.gpus) != self.tp):
            raise ConfigError(
                f"tp is {self.tp} and gpus are {self.gpus}, expected tp >= 1 and one GPU per tensor parallel rank "
                "(None serves on the CPU)"
            )
        for name in arguments_of(self.extra_args):
            if name in NOT_EXTRA:
                raise ConfigError(f"extra_args hold --{name.replace('_', '-')}: {NOT_EXTRA[name]}")
        check_arguments(self.extra_args)


def command(spec: ServerSpec, config_file: Path | None = None) -> list[str]:
    """Returns the command line of the server.

    The API key is not in it: SGLang takes a key only as an argument, which every user of the host could read, or from
    the YAML file behind --config (see ``write_config``).
    """
    args = [str(spec.python), "-m", "sglang.launch_server"]
    if config_file is not None:
        args += ["--config", str(config_file)]
    args += ["--model-path", str(spec.model_path), "--host", spec.host, "--port", str(spec.port)]
    args += ["--dtype", spec.dtype, "--tp-size", str(spec.tp), "--enable-return-routed-experts"]
    # The warm-up sends English text, and a tokenizer that does not know a character of it ends the server. The health
    # check generates from a token id and tells as much.
    args += ["--skip-server-warmup", "--log-level-http", "warning"]
    if spec.gpus is None:
        args += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        args += ["--grammar-backend", "none"]
        args += ["--sleep-on-idle"]  # an idle scheduler otherwise keeps a core busy, and here the trainer needs it
    mem_fraction = 0.1 if spec.mem_fraction is None and spec.gpus is None else spec.mem_fraction
    if mem_fraction is not None:
        args += ["--mem-fraction-static", str(mem_fraction)]
    if spec.max_total_tokens is not None:
        args += ["--max-total-tokens", str(spec.max_total_tokens)]
    return [*args, *spec.extra_args]


def environment(spec: ServerSpec) -> dict[str, str]:
    """Returns the environment of the server: this process's without torchrun's ranks, plus what the device needs."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in TORCHRUN_VARIABLES and not name.startswith(TORCHRUN_PREFIXES)
    }
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    env.pop("SGLANG_RETURN_ORIGINAL_LOGPROB", None)  # log-probabilities without the temperature that was sampled with
    # A crashed server otherwise lives on for 65 seconds to dump its GPU state, without answering.
    env.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")
    env.setdefault("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "0")
    # How often a server looks whether the client of a request has gone; seconds. Requests are dropped as a habit here.
    env.setdefault("SGLANG_REQUEST_STATE_WAIT_TIMEOUT", "1")
    ours = [PLUGIN] if spec.gpus is not None else [CPU_SHIM, PLUGIN]
    env["PYTHONPATH"] = os.pathsep.join([*map(str, ours), *filter(None, [env.get("PYTHONPATH")])])
    if spec.gpus is not None:
        return env | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, spec.gpus))}
    env |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if spec.tp > 1:
        # SGLang wants one NUMA node per rank unless the cores of each rank are named.
        cores = sorted(os.sched_getaffinity(0))
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(spec.tp))
    return env


def write_config(spec: ServerSpec) -> Path | None:
    """Writes the API key into a YAML file that only the owner can read; None without a key. The caller removes it."""
    if spec.api_key is None:
        return None
    descriptor, name = tempfile.mkstemp(prefix="megarl-sglang-", suffix=".yaml")  # created with mode 0600
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f"api-key: {json.dumps(spec.api_key)}\n")  # a JSON string is a YAML string
    return Path(name)


def free_port(host: str) -> int:
    """Returns a port that nobody listens on.

    Below 32768, where no outgoing connection takes it before the server has bound it, or while the server restarts.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in random.SystemRandom().sample(range(20000, 30000), 100):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, port))
            return port
    raise RolloutError(f"found no free port between 20000 and 30000 on {host}: give one")


class Server:
    """Starts, watches and stops one server; may be started again after it has stopped or died."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._port = spec.port or free_port(spec.host)
        self._config_file: Path | None = None
        self._log_start = 0
        self._owner_pid = os.getpid()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Base address without a slash at the end; stays the same when the server is started again."""
        host = f"[{self.spec.host}]" if ":" in self.spec.host else self.spec.host
        return f"http://{host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process id of the reaper, which is the id of the server's process group; None while stopped."""
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs; says nothing about its health."""
        try:
            return self._process is not None and self._ended_with() is None
        except RolloutError:  # another thread has stopped it in between
            return False

    def start(self) -> None:
        """Starts the process and returns at once. Raises RolloutError if it already runs or cannot be started."""
        if self.alive:
            raise RolloutError(f"the SGLang server at {self.url} already runs: stop it before it is started again")
        self.kill()  # what a dead server has left
        if not Path(self.spec.python).exists():
            raise RolloutError(
                f"found no Python for SGLang at {self.spec.python}: run `make sglang-cpu`, or give the interpreter of "
                "an environment that has SGLang"
            )
        self._config_file = write_config(self.spec)
        server_command = command(replace(self.spec, port=self._port), self._config_file)
        reaper = [sys.executable, "-I", str(REAPER), str(os.getpid()), str(self._config_file or "")]
        log_file = Path(self.spec.log_file)
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
            os.fchmod(log.fileno(), 0o600)  # a file of an earlier run may be open to all
            log.write(f"megarl: starting {shlex.join(server_command)}\n".encode())
            log.flush()
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [*reaper, *server_command],
                env=environment(self.spec),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._owner_pid = os.getpid()
        atexit.register(self._stop_at_exit)

    def wait_ready(self, deadline_s: float, ended: threading.Event | None = None) -> None:
        """Returns when the server has generated a token; raises RolloutError with the end of its log if it does not.

        Setting ``ended`` from another thread ends the wait, with RolloutError too.
        """
        end = time.monotonic() + deadline_s
        while (code := self._ended_with()) is None:
            remaining = end - time.monotonic()
            if ended is not None and ended.is_set():
                raise RolloutError(f"the SGLang server at {self.url} is not needed any more")
            if remaining <= 0:
                raise RolloutError(
                    f"the SGLang server at {self.url} was not ready after {deadline_s:.0f} s: allow more time if it is "
                    f"still loading, else look into {self.spec.log_file}, whose end is\n{self.log_tail()}"
                )
            if self.healthy(timeout_s=min(HEALTH_TIMEOUT_S, remaining)):
                return
            time.sleep(min(0.2, remaining))
        raise RolloutError(
            f"the SGLang server at {self.url} ended with exit code {code} before it was ready: the reason is in "
            f"{self.spec.log_file}, whose end is\n{self.log_tail()}"
        )

    def healthy(self, timeout_s: float = HEALTH_TIMEOUT_S) -> bool:
        """Whether the server answers its health check (one generated token, unless it is busy generating) in time."""
        try:
            return self._get("/health", timeout_s)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    @property
    def version(self) -> str:
        """SGLang's version as the running server tells it, for example 0.5.23."""
        return str(server_info(self.url, self.spec.api_key)["version"])

    def stop(self, grace_s: float = 10.0) -> None:
        """Ends the server and all its processes; does nothing if it is stopped.

        SIGTERM to the group, SIGKILL after ``grace_s``. Raises RolloutError if processes of it are left after that.
        """
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        if not self._wait_gone(grace_s):
            self._end_by_force()
        self._forget()

    def kill(self) -> None:
        """Kills all processes of the server at once; ``start`` may follow."""
        if self._process is not None:
            self._end_by_force()
            self._forget()

    def members(self) -> list[psutil.Process]:
        """Returns the living processes of the server, reaper included, zombies not."""
        if self._process is None:
            return []
        # The leader is not reaped before the end, so nobody else can have got its id.
        return [process for process in psutil.process_iter() if _is_living_member(process, self._process.pid)]

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """Returns the last lines that the server has printed since its latest start."""
        with open(self.spec.log_file, "rb") as log:
            log.seek(self._log_start)
            text = "\n".join(log.read().decode("utf-8", errors="replace").splitlines()[-lines:])
        return text.replace(self.spec.api_key, "***") if self.spec.api_key else text  # SGLang prints its arguments

    def _get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        # No urllib: it would send a request to the loopback address through a proxy of the environment.
        headers = authorization(self.spec.api_key)
        connection = http.client.HTTPConnection(self.spec.host, self._port, timeout=timeout_s)
        try:
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _ended_with(self) -> int | None:
        """Exit code of the reaper, which is the server's; None while it runs. The zombie stays: see ``members``."""
        process = self._process  # another thread may stop the server meanwhile
        if process is None:
            raise RolloutError("the SGLang server was not started: call start() first")
        if process.returncode is None:
            with contextlib.suppress(ChildProcessError):
                ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                return None if ended is None else ended.si_status * (1 if ended.si_code == os.CLD_EXITED else -1)
        return process.wait()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):  # all are gone
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
        for process in self.members():  # of the session, but no longer of the group
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if not self._wait_gone(KILL_WAIT_S):
            left = ", ".join(f"{process.pid} ({' '.join(process.cmdline()[:3])})" for process in self.members())
            raise RolloutError(
                f"processes of the SGLang server at {self.url} are left {KILL_WAIT_S:.0f} s after SIGKILL: {left}; "
                "they probably hang in a driver call: end them before the next start"
            )

    def _forget(self) -> None:
        assert self._process is not None
        self._process.wait()
        self._process = None
        if self._config_file is not None:
            self._config_file.unlink(missing_ok=True)
            self._config_file = None
        atexit.unregister(self._stop_at_exit)

    def _stop_at_exit(self) -> None:
        if os.getpid() == self._owner_pid:  # not in a process forked from ours
            self.stop(grace_s=2.0)


def _is_living_member(process: psutil.Process, leader_pid: int) -> bool:
    """Whether the process belongs to the session that ``leader_pid`` has started, in whatever group it is."""
    try:
        return os.getsid(process.pid) == leader_pid and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess, PermissionError):
        return False
