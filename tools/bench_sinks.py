"""Measures what a step costs with each sink of metrics: in the trainer, and in the sink's process.

    python tools/bench_sinks.py --out FOLDER [--steps 200]

A step has 160 metrics and 4 responses of 2,000 characters. MLflow writes files below FOLDER, wandb is offline.
"""

import argparse
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from environments import sinks_release

from megarl.config.file import parse
from megarl.run import feed
from megarl.run.feed import Feed


def measure(folder: Path, sinks: list[str], steps: int) -> tuple[float, float]:
    """Return milliseconds per step (in the trainer, of the processor in the sink's process, its start included)."""
    tables: Any = {"run": {"steps": 1, "dir": str(folder)}, "model": {"path": "m"}, "optim": {"lr": 1e-3}}
    tables |= {"data": {"train": "t", "max_prompt_tokens": 16}, "log": {"sinks": sinks}}
    tables |= {"rollout": {"prompts_per_step": 32, "group_size": 8, "max_response_tokens": 10}}
    folder.mkdir(parents=True)
    in_trainer, before = 0.0, resource.getrusage(resource.RUSAGE_CHILDREN)
    with Feed(parse(tables), print, enabled=True) as sink:
        sink.begin("bench", 0, evaluated=False)
        for step in range(1, steps + 1):
            started = time.perf_counter()
            sink.add({f"group_{index // 20}/metric_{index}": index / 3 for index in range(160)})
            sink.samples = [{"step": step, "prompt": "1+1=", "response": "2 " * 1000, "reward": 1.0}] * 4
            sink.publish(step)
            sink.look()
            in_trainer += time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    in_sink = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return 1e3 * in_trainer / steps, 1e3 * in_sink / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    sys.path.append(str(sinks_release()))
    os.environ |= {
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_TRACKING_URI": (options.out / "mlruns").resolve().as_uri(),
    }
    os.environ |= {"WANDB_MODE": "offline"}
    feed._DEADLINE_S = 600.0
    for sink in ("tensorboard", "wandb", "mlflow"):
        idle = measure(options.out / f"{sink}-idle", [sink], 1)[1]
        trainer, total = measure(options.out / sink, [sink], options.steps)
        own = f"{total - idle / options.steps:.1f} ms in its process, whose start takes {idle / 1e3:.1f} s"
        print(f"{sink}: {trainer:.2f} ms in the trainer, {own}")


if __name__ == "__main__":
    main()
