"""What runs on each server node: it starts the node's SGLang servers, and starts those again that die.

``python -m megarl.launch.serve LAUNCH_JSON NODE``. When all answer, it writes ``servers<NODE>.json`` beside the logs.
The trainer sends the weights, also to a server that is back.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from megarl.config import Config
from megarl.config import file as config_file
from megarl.config.flags import split_overrides
from megarl.data.files import write_atomically
from megarl.errors import ConfigError, MegarlError, RolloutError
from megarl.launch.files import end_file, ready_file
from megarl.launch.topology import from_plain
from megarl.rollout.sglang.fleet import Fleet, FleetSettings
from megarl.rollout.sglang.http import key_named
from megarl.train.engines import server_specs


def serve(config: Config, launch_file: Path, node: int) -> None:
    """Run the servers of a node until they are to end. MegarlError if one cannot be started."""
    launch = json.loads(launch_file.read_text())
    topology = from_plain(launch["topology"])
    urls, host = topology.urls_of(node), topology.servers[node].address
    folder = config.run_dir / "sglang" / f"servers{node}"
    specs = server_specs(config, host, key_named(config.sglang.api_key_env), folder)
    ended = threading.Event()
    parent = os.getppid()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the trainer's
    settings = FleetSettings(
        config.sglang.start_deadline_s,
        hang_s=math.inf,  # a server that takes new weights is silent, and here nobody knows when
        max_restarts=config.sglang.max_restarts,
    )
    fleet = Fleet(
        specs=[replace(spec, port=int(url.rsplit(":", 1)[1])) for spec, url in zip(specs, urls, strict=True)],
        tp=config.sglang.tp,
        api_key=key_named(config.sglang.api_key_env),
        settings=settings,
        tell=lambda line: print(f"servers of node {node}: {line}", file=sys.stderr, flush=True),
    )

    def watch() -> None:
        while not ended.wait(1.0):
            with suppress(OSError):  # there is no such file, or no file system for a moment
                if os.getppid() != parent or end_file(launch_file, node).read_text() == launch["launch"]:
                    ended.set()

    threading.Thread(target=watch, daemon=True).start()
    try:
        fleet.start(ended)
        write_atomically(ready_file(launch_file, node), json.dumps({"urls": urls, "pid": os.getpid()}).encode())
        while not ended.wait(1.0):
            if fleet.given_up:
                raise RolloutError(f"a server died more than {config.sglang.max_restarts} times; see {folder}")
    finally:
        fleet.close()


def main(words: list[str]) -> int:
    launch_file, node = Path(words[0]), int(words[1])
    rest, overrides = split_overrides(json.loads(launch_file.read_text())["server_command"])
    try:
        serve(config_file.load(Path(rest[-1]), overrides), launch_file, node)
    except MegarlError as error:
        print(f"megarl: error: servers of node {node}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
