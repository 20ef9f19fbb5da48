"""The nodes, addresses and ports of a job. The launcher finds the topology; all other processes read
<run>/launch.json."""

import errno
import ipaddress
import os
import re
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pydantic import TypeAdapter

from megarl.config import Config
from megarl.config.addresses import url_host
from megarl.errors import ConfigError

FIRST_PORT, LAST_PORT = 20000, 30000  # runs a command and returns the output
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
        raise ConfigError(
            f'launch.layout: found "{launch.layout}" outside of a Slurm job; submit '
            f'{launch.layout}.sbatch (megarl recipes), or set launch.layout = "local"'
        )
    het = launch.layout == "heterogeneous"
    if het and env.get("SLURM_HET_SIZE") != "2":
        raise ConfigError(
            f"found a Slurm job of {env.get('SLURM_HET_SIZE', '1')} components, expected 2, trainer nodes and server "
            "nodes; submit heterogeneous.sbatch (megarl recipes)"
        )
    lists = ["_HET_GROUP_0", "_HET_GROUP_1"] if het else [""]
    hostnames = [ask(["scontrol", "show", "hostnames", env[f"SLURM_JOB_NODELIST{group}"]]).split() for group in lists]
    trainers, servers = hostnames if het else (hostnames[0][: launch.nodes], hostnames[0][launch.nodes :])
    for key, nodes, expected in (("nodes", trainers, launch.nodes), ("server_nodes", servers, launch.server_nodes)):
        if len(nodes) != expected:
            raise ConfigError(
                f"launch.{key}: found {len(nodes)} in Slurm job {env['SLURM_JOB_ID']} ({' '.join(nodes) or 'none'}), "
                f"expected {expected}; submit with other --nodes, or change the configuration"
            )
    addresses = addresses_of([*trainers, *servers], env, ask)
    job = env["SLURM_JOB_ID"]
    port, *server_ports = free_ports(1 + launch.server_nodes * config.sglang.servers, int(job))
    of_trainers, of_servers = (tuple(Node(name, addresses[name]) for name in names) for names in (trainers, servers))
    return Topology(of_trainers, of_servers, launch.ranks_per_node, port, tuple(server_ports), het, job)


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
            family = socket.AF_INET6 if ":" in remote[0] else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((remote[0], 9))  # sends nothing
                addresses[name] = str(probe.getsockname()[0])
    return addresses


def _resolve(name: str, address: str) -> str:
    try:
        return str(socket.getaddrinfo(address.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"node {name} has the address {address}, which does not resolve ({error}); set MEGARL_ADDRESSES, e.g. "
            f'"{name}=10.0.0.1,..." for all nodes'
        ) from None


def free_ports(count: int, job: int, attempt: int = 0) -> list[int]:
    """Return free ports of this machine. Each job, and each attempt, begins the search at a different port."""
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
