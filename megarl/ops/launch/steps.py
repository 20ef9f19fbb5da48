"""The steps of a job: commands on nodes under srun, or on this machine without Slurm.

Each server on a separate node is a step. The step writes ``server<INDEX>.json`` beside launch.json when the server
answers, and ends when ``server<INDEX>.end`` holds the name of the launch: srun passes SIGTERM on as SIGKILL, and a
killed server would leave files with keys behind.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from megarl.config import Config
from megarl.config.addresses import url_host
from megarl.config.trust import safe_environment
from megarl.errors import ConfigError, refusal, reworded

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
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            with reworded(OSError, ConfigError, f"{name}: {words[0]} could not be started: "):
                self._process = subprocess.Popen(words, **streams, env=safe_environment(), start_new_session=True)

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
    ConfigError if they are not in shell syntax.
    """
    words = ["srun", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"]
    words += [f"--nodelist={','.join(node.name for node in nodes)}"]
    # Steps share all resources of a node (--overlap, --mem=0); one failed task ends the whole step.
    words += ["--overlap", "--mem=0", "--cpu-bind=none", "--kill-on-bad-exit=1", "--export=ALL"]
    if het_group is not None:
        words.append(f"--het-group={het_group}")
    extra = os.environ.get("MEGARL_SRUN_ARGS", "")
    with reworded(ValueError, ConfigError, f"MEGARL_SRUN_ARGS: found {extra!r}, expected words in shell syntax: "):
        return [*words, *shlex.split(extra)]


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
        self.restarts: list[int] = []
        """Of each server."""

    def start(self, topology: Topology) -> None:
        self._topology = topology
        self.restarts = [0] * len(topology.server_ports)
        self._steps = [self._start_step(index) for index in range(len(topology.server_ports))]

    def find(self) -> tuple[list[int], list[int]]:
        """Return (servers that have answered, servers in the first start)."""
        ready = [index for index in range(len(self._steps)) if ready_file(self._launch_file, index).exists()]
        loading = [index for index, step in enumerate(self._steps) if step.code is None and not self.restarts[index]]
        return ready, [index for index in loading if index not in ready]

    def restart_ended(self) -> bool:
        """Restart ended steps, each up to sglang.max_restarts times; return whether any step was restarted.

        After the last restart, the trainer decides whether to continue without the server.
        """
        ended = [(index, step) for index, step in enumerate(self._steps) if step.code is not None]
        ended = [pair for pair in ended if self.restarts[pair[0]] < self._config.sglang.max_restarts]
        for index, step in ended:
            self.restarts[index] += 1
            self._tell(f"{step.name} ended with exit code {step.code}; starting it again")
            self._steps[index] = self._start_step(index)
        return bool(ended)

    def find_failed(self) -> list[str]:
        """Return a line for each step whose end came before the first answer; ConfigError for bad input."""
        failures = []
        for index, step in enumerate(self._steps):
            if step.code is not None and not ready_file(self._launch_file, index).exists():
                log = self._log(index)
                lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
                last = [line for line in lines if not line.startswith("srun:")][-1:]
                facts = {"step": step, "restarts": self.restarts[index], "log": log, "last": "".join(last)}
                failures.append(refusal("server_ended", python=PYTHON, **facts))
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


FIRST_PORT, LAST_PORT = 20000, 30000
Ask = Callable[[Sequence[str]], str]  # runs a command and returns the output


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    """Slurm's name."""
    address: str
    """IP address for connections from other nodes."""


@dataclass(frozen=True, slots=True)
class Topology:
    trainers: tuple[Node, ...]
    servers: tuple[Node, ...]
    """Nodes that hold only servers."""
    ranks_per_node: int
    master_port: int
    """On the first trainer node."""
    server_ports: tuple[int, ...]
    """One port per server, node by node. All ports differ, because nodes share an address in tests."""
    het: bool = False
    """Server nodes are the second component of a heterogeneous job."""
    job: str | None = None
    """Slurm's job number; None without Slurm."""

    @property
    def per_node(self) -> int:
        """Servers of each server node."""
        return len(self.server_ports) // max(1, len(self.servers))

    def server_node(self, index: int) -> Node:
        return self.servers[index // self.per_node]

    @property
    def urls(self) -> list[str]:
        ports = enumerate(self.server_ports)
        return [f"http://{url_host(self.server_node(index).address)}:{port}" for index, port in ports]


def read_topology(launch: Mapping[str, Any]) -> Topology:
    """The topology in the contents of launch.json."""
    return TypeAdapter(Topology).validate_python(launch["topology"])


def find(config: Config, env: Mapping[str, str], ask: Ask | None = None) -> Topology:
    """Return the nodes of this Slurm job, or this machine alone; ConfigError if [launch] expects other nodes."""
    launch, ask = config.launch, ask or ask_slurm
    if launch.layout == "local":
        machine = Node(socket.gethostname(), "127.0.0.1")
        return Topology((machine,), (), launch.ranks_per_node, free_ports(1, os.getpid())[0], ())
    if "SLURM_JOB_ID" not in env:
        raise ConfigError(refusal("no_slurm_job", layout=launch.layout))
    het = launch.layout == "heterogeneous"
    if het and env.get("SLURM_HET_SIZE") != "2":
        raise ConfigError(refusal("het_components", num=env.get("SLURM_HET_SIZE", "1")))
    lists = ["_HET_GROUP_0", "_HET_GROUP_1"] if het else [""]
    hostnames = [ask(["scontrol", "show", "hostnames", env[f"SLURM_JOB_NODELIST{group}"]]).split() for group in lists]
    trainers, servers = hostnames if het else (hostnames[0][: launch.nodes], hostnames[0][launch.nodes :])
    if (len(trainers), len(servers)) != (launch.nodes, launch.server_nodes):
        facts = {"num": len(trainers + servers), "job": env["SLURM_JOB_ID"], "names": " ".join(trainers + servers)}
        facts |= {"nodes": launch.nodes, "servers": launch.server_nodes, "sum": launch.nodes + launch.server_nodes}
        raise ConfigError(refusal("slurm_nodes", **facts))
    addresses = addresses_of([*trainers, *servers], env, ask)
    port, *server_ports = free_ports(1 + launch.server_nodes * config.sglang.servers, int(env["SLURM_JOB_ID"]))
    of_trainers, of_servers = (tuple(Node(name, addresses[name]) for name in names) for names in (trainers, servers))
    return Topology(of_trainers, of_servers, launch.ranks_per_node, port, tuple(server_ports), het, env["SLURM_JOB_ID"])


def addresses_of(names: Sequence[str], env: Mapping[str, str], ask: Ask) -> dict[str, str]:
    """Return the IP address of each node: from MEGARL_ADDRESSES ("n1=10.0.0.1,n2=10.0.0.2"), or Slurm's NodeAddr.

    ConfigError if an address does not resolve.
    """
    configured = dict(pair.split("=", 1) for pair in env.get("MEGARL_ADDRESSES", "").split(",") if "=" in pair)
    addresses: dict[str, str] = {}
    for name in names:
        slurm = "" if name in configured else ask(["scontrol", "--oneliner", "show", "node", name])
        match = re.search(r"\bNodeAddr=(\S+)", slurm)
        addresses[name] = _resolve(name, configured.get(name) or (match[1] if match else name))
    remote = [address for address in addresses.values() if not ipaddress.ip_address(address).is_loopback]
    for name, address in addresses.items():
        if ipaddress.ip_address(address).is_loopback and remote:
            # A node often resolves its own name to loopback: take the source address of packets to the remote nodes.
            with socket.socket(socket.AF_INET6 if ":" in remote[0] else socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((remote[0], 9))  # sends nothing
                addresses[name] = str(probe.getsockname()[0])
    return addresses


def _resolve(name: str, address: str) -> str:
    advice = f'); set MEGARL_ADDRESSES, e.g. "{name}=10.0.0.1,..." for all nodes'
    with reworded(OSError, ConfigError, f"node {name} has the address {address}, which does not resolve (", advice):
        return str(socket.getaddrinfo(address.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0])


def free_ports(count: int, job: int, attempt: int = 0) -> list[int]:
    """Return free ports of this machine. Each job, and each attempt, begins the search at a different port.

    ConfigError if too few are free.
    """
    span = LAST_PORT - FIRST_PORT
    start = job * 61 + attempt * 997
    ports = list(islice(filter(_is_free, (FIRST_PORT + (start + offset) % span for offset in range(span))), count))
    if len(ports) < count:
        raise ConfigError(f"found {len(ports)} free ports from {FIRST_PORT} to {LAST_PORT}, expected {count}")
    return ports


def _is_free(port: int) -> bool:
    """Whether no process listens on the port: over IPv4, and over IPv6 if the kernel has IPv6."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.create_server(("", port), family=family).close()
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                return False
    return True


def ask_slurm(words: Sequence[str]) -> str:
    """The output of a Slurm command; ConfigError if the command is missing or fails."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
    except FileNotFoundError:
        raise ConfigError(f"found a Slurm job but no command {words[0]}; add Slurm's commands to PATH") from None
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{' '.join(words)} failed: {str(error.stderr or error).strip()}") from None
