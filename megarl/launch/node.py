"""The process of a trainer node, ``python -m megarl.launch.node LAUNCH_JSON [NODE]``: it becomes torchrun.

The node's number is SLURM_NODEID if it is not given. launch.json has everything else, and no secrets.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from megarl.launch.topology import read_topology

_PR_SET_PDEATHSIG = 1


def torchrun(launch: Mapping[str, Any], node: int) -> list[str]:
    """The command line of torchrun on a node. Each rank writes its own files; the first rank also writes to stdout."""
    topology = read_topology(launch)
    logs = Path(launch["logs"]) / f"node{node}"
    words = [sys.executable, "-m", "torch.distributed.run"]
    words += ["--nnodes", str(len(topology.trainers)), "--node-rank", str(node)]
    words += ["--nproc-per-node", str(topology.ranks_per_node), "--max-restarts", "0"]
    words += ["--master-addr", topology.trainers[0].address, "--master-port", str(topology.master_port)]
    words += ["--log-dir", str(logs), "--redirects", "3", *(["--tee", "0:3"] if node == 0 else [])]
    return [*words, "--module", "megarl.cli", *launch["command"]]


def environment(launch: Mapping[str, Any], node: int) -> dict[str, str]:
    """Environment variables that torchrun and its ranks also need: log lines without a prefix, and the interface with
    this node's address, because host names need not resolve."""
    address = read_topology(launch).trainers[node].address
    addresses = {name: {each.address.split("%")[0] for each in found} for name, found in psutil.net_if_addrs().items()}
    interface = next((name for name, found in addresses.items() if address in found), None)
    wanted = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": " ", "OMP_NUM_THREADS": "1"}
    if interface is not None and len(launch["topology"]["trainers"]) > 1:
        wanted |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}  # NCCL takes prefixes
    return {name: value for name, value in wanted.items() if name not in os.environ}


def main(words: list[str]) -> None:
    launch = json.loads(Path(words[0]).read_text())
    node = int(words[1] if len(words) > 1 else os.environ["SLURM_NODEID"])
    # SIGUSR1 asks the ranks to stop; it must not end torchrun.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if launch["topology"]["job"] is None:  # without Slurm, the kernel ends this process with its parent
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.environ.update(environment(launch, node))
    command = torchrun(launch, node)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
