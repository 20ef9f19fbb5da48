"""The step of a server, ``python -m megarl.ops.launch.serve LAUNCH_JSON INDEX``, which starts one SGLang server.

The launcher watches and restarts the step. The trainer sends the weights, also to a restarted server.
"""

import json
import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from megarl.config import Config
from megarl.config import file as config_file
from megarl.engines.sglang.http import key_named
from megarl.engines.sglang.server import Server
from megarl.errors import ConfigError, MegarlError, RolloutError, printable
from megarl.files.writing import write_atomically
from megarl.ops.launch.steps import end_file, read_topology, ready_file
from megarl.trainer.engines import server_specs


def serve(config: Config, launch_file: Path, index: int) -> None:
    """Run a server until a request to end. RolloutError if the server does not start, or ends without a request."""
    launch = json.loads(launch_file.read_text())
    topology = read_topology(launch)
    # One folder per server, because two servers of a node would write files of equal names at the same time.
    folder = launch_file.parent / "sglang" / f"server{index}"
    specs = server_specs(config, topology.server_node(index).address, key_named(config.sglang.api_key_env), folder)
    spec = replace(specs[index % topology.per_node], port=topology.server_ports[index])
    ended = _listen_for_end(end_file(launch_file, index), launch["launch"])
    with Server(spec) as server:
        server.wait_ready(config.sglang.start_deadline_s, ended)
        record = {"url": topology.urls[index], "pid": os.getpid()}
        write_atomically(ready_file(launch_file, index), json.dumps(record).encode())
        while server.alive and not ended.wait(1.0):
            pass
        if not ended.is_set():
            raise RolloutError(f"the server has ended; see {spec.log_file}, which ends with\n{server.log_tail()}")


def _listen_for_end(file: Path, launch: str) -> threading.Event:
    """Return an event set by SIGTERM, by a file with the name of this launch, or by the end of the parent process."""
    ended = threading.Event()
    parent = os.getppid()

    def look() -> None:
        while not ended.wait(1.0):
            with suppress(OSError):  # no file, or no answer of the file system for a moment
                if os.getppid() != parent or file.read_text() == launch:
                    ended.set()

    signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # meant for the trainer
    threading.Thread(target=look, daemon=True).start()
    return ended


def main(words: list[str]) -> int:
    """The step; returns its exit code: 0, 1 if the server failed, 2 for bad input."""
    launch_file, index = Path(words[0]), int(words[1])
    words_left, overrides = config_file.split_overrides(json.loads(launch_file.read_text())["server_command"])
    try:
        serve(config_file.load(Path(words_left[1]), overrides, trust="--trust" in words_left), launch_file, index)
    except MegarlError as error:
        print(f"megarl: error: server {index}: {printable(' '.join(str(error).split()))}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
