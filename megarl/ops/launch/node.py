"""The process of a trainer node, ``python -m megarl.ops.launch.node LAUNCH_JSON [NODE]``, which runs torchrun.

The number of the node defaults to SLURM_NODEID. The rest is in launch.json, without secrets.
"""

import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from megarl.errors import MegarlError, describe
from megarl.files.bounded_process import signal_after_parent
from megarl.files.writing import read_record
from megarl.ops.launch.steps import read_topology
from megarl.run.status import rank_file, write_failure

_GRACE_S = 20
"""Less than torchrun's time between SIGTERM and SIGKILL."""


def torchrun(launch: Mapping[str, Any], node: int) -> list[str]:
    """The words for torchrun on a node. Each rank writes log files; the first rank also writes to stdout."""
    topology = read_topology(launch)
    logs = Path(launch["logs"]) / f"node{node}"
    words = ["--nnodes", str(len(topology.trainers)), "--node-rank", str(node)]
    words += ["--nproc-per-node", str(topology.ranks_per_node), "--max-restarts", "0"]
    words += ["--master-addr", topology.trainers[0].address, "--master-port", str(topology.master_port)]
    words += ["--log-dir", str(logs), "--redirects", "3", *(["--tee", "0:3"] if node == 0 else [])]
    return [*words, "--module", "megarl.cli", *launch["command"]]


def environment(launch: Mapping[str, Any], node: int) -> dict[str, str]:
    """Return environment variables for torchrun and ranks: log lines without a prefix, and the interface with this
    node's address, because host names need not resolve."""
    address = read_topology(launch).trainers[node].address
    entries = ((name, entry.address) for name, values in psutil.net_if_addrs().items() for entry in values)
    interface = next((name for name, ip in entries if ip.split("%")[0] == address), None)
    variables = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": " ", "OMP_NUM_THREADS": "1"}
    if interface is not None and len(launch["topology"]["trainers"]) > 1:
        variables |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}  # NCCL takes prefixes
    return {name: value for name, value in variables.items() if name not in os.environ}


def run_ranks(words: Sequence[str], log: Path, folder: Path) -> int:
    """Run torchrun in this process; return the exit code. Output goes to ``log``: 45 lines for a dead rank."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    log.parent.mkdir(parents=True, exist_ok=True)
    logging.root.addHandler(_LogFile(log))
    for logger in logging.root.manager.loggerDict.values():
        kinds = {type(handler) for handler in getattr(logger, "handlers", ())}
        if isinstance(logger, logging.Logger) and logging.StreamHandler in kinds:
            logger.handlers = [_LogFile(log)]
    try:
        run.run(run.parse_args(words))
    except ChildFailedError as error:
        logging.error("%s", error)
        rank = find_cause(error.failures)
        _write_cause(rank, error.failures[rank].exitcode, folder)
    except SignalException as error:
        return 128 + error.sigval
    except Exception as error:  # of torch's rendezvous
        logging.exception("torchrun failed")
        print(f"megarl: error: torchrun failed: {describe(error)}; see {log}", file=sys.stderr, flush=True)
    else:
        return 0
    return 1


class _LogFile(logging.Handler):
    """Appends to a file without holding the file open: a fork of this process may have closed all files."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError), self._path.open("a") as file:
            print(time.strftime("%H:%M:%S"), self.format(record), file=file)


def find_cause(failures: Mapping[int, Any]) -> int:
    """Return the rank that died first.

    Ranks ended by torchrun (SIGTERM, later SIGKILL) come last, and a killed rank comes before a failed rank. failures:
    torch's ProcessFailure by rank, times in whole seconds.
    """
    begin = min(failure.timestamp for failure in failures.values())

    def order(rank: int) -> tuple[bool, bool, int]:
        failure = failures[rank]
        ended_by_torchrun = failure.exitcode == -signal.SIGTERM or failure.timestamp > begin + _GRACE_S
        return ended_by_torchrun, failure.exitcode >= 0, failure.timestamp

    return min(failures, key=order)


def _write_cause(rank: int, exit_code: int, folder: Path) -> None:
    """Write the end of the first rank for the launcher.

    A killed rank can write no error, and the remaining ranks only report the loss.
    """
    place = f"rank {rank} on {socket.gethostname()}"
    if exit_code < 0:
        write_failure(MegarlError(f"{place} was killed by {signal.Signals(-exit_code).name}"), is_cause=True)
    elif exit_code == 1:  # an error outside of megarl
        sign = read_record(rank_file(folder, rank))
        error = sign.get("error") if sign.get("attempt") == os.environ.get("MEGARL_ATTEMPT") else None
        write_failure(MegarlError(f"{place} ended with exit code 1" + (f": {error}" if error else "")))


def main(words: list[str]) -> int:
    path = Path(words[0])
    launch = json.loads(path.read_text())
    node = int(words[1] if len(words) > 1 else os.environ["SLURM_NODEID"])
    # SIGUSR1 asks the ranks to stop, and must not end torchrun.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if launch["topology"]["job"] is None:  # without Slurm, the kernel ends this process with its parent
        signal_after_parent(signal.SIGTERM)
    os.environ.update(environment(launch, node))
    code = run_ranks(torchrun(launch, node), Path(launch["logs"]) / f"node{node}" / "torchrun.log", path.parent)
    # A trainer that was stopped on request has not failed: its status has the outcome.
    return 0 if launch["command"][0] == "train" and code > 128 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
