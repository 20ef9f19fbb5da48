"""Which nodes, addresses and ports a job has: found once, written to <run>/launch.json, and read by everybody else."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megarl.config import Config
from megarl.errors import ConfigError

FIRST_PORT, LAST_PORT = 20000, 30000
"""Below the ports that a system gives to outgoing connections."""
Ask = Callable[[Sequence[str]], str]
"""Runs a command and returns what it prints."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the job."""

    name: str
    """As Slurm calls it."""
    address: str
    """IP address by which the other nodes reach it."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Who runs where."""

    trainers: tuple[Node, ...]
    servers: tuple[Node, ...]
    """Nodes with servers and nothing else."""
    ranks_per_node: int
    master_port: int
    """On the first trainer node."""
    server_ports: tuple[int, ...]
    """Of each server, those of the first server node first. No two are equal: in a test, nodes share an address."""
    het: bool = False
    """Server nodes are the second component of a heterogeneous job."""
    job: str | None = None
    """Of Slurm; None without it."""

    @property
    def master_address(self) -> str:
        return self.trainers[0].address

    @property
    def per_node(self) -> int:
        """Servers of each server node."""
        return len(self.server_ports) // max(1, len(self.servers))

    def server_node(self, index: int) -> Node:
        """The node of a server."""
        return self.servers[index // self.per_node]

    @property
    def urls(self) -> list[str]:
        """All servers on nodes of their own."""
        return [
            f"http://{in_url(self.server_node(index).address)}:{port}" for index, port in enumerate(self.server_ports)
        ]

    def plain(self) -> dict[str, Any]:
        """For JSON; ``from_plain`` reads it."""
        return asdict(self)


def from_plain(data: Mapping[str, Any]) -> Topology:
    """Inverse of ``Topology.plain``."""
    nodes = {key: tuple(Node(**node) for node in data[key]) for key in ("trainers", "servers")}
    return Topology(**{**data, **nodes, "server_ports": tuple(data["server_ports"])})


def find(config: Config, env: Mapping[str, str], ask: Ask | None = None) -> Topology:
    """The nodes of this Slurm job, or this machine alone.

    ConfigError if the job has not the nodes that [launch] says.
    """
    launch, ask = config.launch, ask or ask_slurm
    if launch.layout == "local":
        ports = free_ports(1, os.getpid())
        here = Node(socket.gethostname(), "127.0.0.1")
        return Topology((here,), (), launch.ranks_per_node, ports[0], ())
    if "SLURM_JOB_ID" not in env:
        raise ConfigError(
            f'launch.layout: found "{launch.layout}" outside of a Slurm job; submit launch/{launch.layout}.sbatch, or '
            'set launch.layout = "local"'
        )
    het = launch.layout == "heterogeneous"
    trainers, servers = _het_nodes(env, ask) if het else _job_nodes(env, ask, launch.nodes)
    for what, found, expected in (("nodes", trainers, launch.nodes), ("server_nodes", servers, launch.server_nodes)):
        if len(found) != expected:
            raise ConfigError(
                f"launch.{what}: found {len(found)} in Slurm job {env['SLURM_JOB_ID']} ({' '.join(found) or 'none'}), "
                f"expected {expected}; submit with other --nodes, or change the configuration"
            )
    addresses = addresses_of([*trainers, *servers], env, ask)
    wanted = launch.server_nodes * config.sglang.servers
    ports = free_ports(1 + wanted, int(env["SLURM_JOB_ID"]))
    return Topology(
        tuple(Node(name, addresses[name]) for name in trainers),
        tuple(Node(name, addresses[name]) for name in servers),
        launch.ranks_per_node,
        ports[0],
        tuple(ports[1:]),
        het,
        env["SLURM_JOB_ID"],
    )


def _job_nodes(env: Mapping[str, str], ask: Ask, trainers: int) -> tuple[list[str], list[str]]:
    names = _hostnames(env["SLURM_JOB_NODELIST"], ask)
    return names[:trainers], names[trainers:]


def _het_nodes(env: Mapping[str, str], ask: Ask) -> tuple[list[str], list[str]]:
    if env.get("SLURM_HET_SIZE") != "2":
        raise ConfigError(
            f"found a Slurm job of {env.get('SLURM_HET_SIZE', '1')} components, expected 2, trainer nodes and server "
            "nodes; submit launch/heterogeneous.sbatch"
        )
    first, second = (_hostnames(env[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"], ask) for group in (0, 1))
    return first, second


def _hostnames(nodes: str, ask: Ask) -> list[str]:
    return ask(["scontrol", "show", "hostnames", nodes]).split()


def addresses_of(names: Sequence[str], env: Mapping[str, str], ask: Ask) -> dict[str, str]:
    """The IP address of each node: from MEGARL_ADDRESSES ("n1=10.0.0.1,n2=10.0.0.2"), else what Slurm has.

    Slurm's NodeAddr need not be a name that resolves. ConfigError if a node has no address, or a loopback address that
    is of no use to the others.
    """
    given = dict(pair.split("=", 1) for pair in env.get("MEGARL_ADDRESSES", "").split(",") if "=" in pair)
    told = {name: given.get(name) or _slurm_address(name, ask) for name in names}
    found = {name: _resolved(name, address) for name, address in told.items()}
    others = [address for address in found.values() if not ipaddress.ip_address(address).is_loopback]
    for name, address in found.items():
        if ipaddress.ip_address(address).is_loopback and others:
            # A node often takes its own name for the loopback address: how do the others see it?
            found[name] = _own_address(others[0])
    return found


def _slurm_address(name: str, ask: Ask) -> str:
    match = re.search(r"\bNodeAddr=(\S+)", ask(["scontrol", "--oneliner", "show", "node", name]))
    return match[1] if match else name


def _resolved(name: str, address: str) -> str:
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        pass
    try:
        return str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"node {name} has the address {address}, which does not resolve ({error}); set MEGARL_ADDRESSES, e.g. "
            f'"{name}=10.0.0.1,..." for all nodes'
        ) from None


def _own_address(towards: str) -> str:
    """The address that packets to ``towards`` leave from; none are sent."""
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        return str(probe.getsockname()[0])


def free_ports(count: int, job: int, attempt: int = 0) -> list[int]:
    """Ports that nobody on this node listens on; those of different jobs begin at different places."""
    span = LAST_PORT - FIRST_PORT
    start = (job * 61 + attempt * 997) % span
    found: list[int] = []
    for offset in range(span):
        port = FIRST_PORT + (start + offset) % span
        if _is_free(port):
            found.append(port)
        if len(found) == count:
            return found
    raise ConfigError(f"found {len(found)} free ports from {FIRST_PORT} to {LAST_PORT}, expected {count}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that a connection has just left is free
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def in_url(address: str) -> str:
    """An address as it is written in a URL."""
    return f"[{address}]" if ":" in address else address


def ask_slurm(words: Sequence[str]) -> str:
    """What a command of Slurm prints; ConfigError if it is missing or fails."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
    except FileNotFoundError:
        raise ConfigError(f"found a Slurm job but no command {words[0]}; add Slurm's commands to PATH") from None
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = (error.stderr or str(error)) if isinstance(error.stderr, str) else str(error)
        raise ConfigError(f"{' '.join(words)} failed: {said.strip()}") from None
