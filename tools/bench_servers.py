"""What partial rollouts save where SGLang servers differ in speed: runs with rollout.max_staleness = 0, 1 and 4.

    python tools/bench_servers.py --out FOLDER [--steps 8] [--staleness 0 1 4] [--stopped 0.6]

The model and settings of the quickstart, on two real servers of this machine's CPUs (``make sglang-cpu``). Prompts have
3, 6 or 16 digits to sort, so that a step waits for few long responses. The second server is stopped for a share of the
time, in cycles of 0.2 s: it is slower, and answers late.

- tokens/s: response tokens of all steps per second of the run, without the first step.
- idle: share of the servers' slots without a request (``rollout/idle_fraction``); stale: share of stale tokens.
- reward: mean pass rate of the last half of the steps; k3: their mean.

A finished run in FOLDER is read and not repeated.
"""

from __future__ import annotations

import argparse
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
from bench_staleness import cold_start, in_process

from megarl import enable_cpu
from megarl.config.file import load
from megarl.data.tiny import write_sort_task, write_tiny_model
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec
from megarl.ops.quickstart import config_text
from megarl.run.metrics_log import read_metrics

CYCLE_S = 0.2
SIZES = {3: (200, 500), 6: (600, 6000), 16: (600, 6000)}
"""By number of digits: prompts to train on, and demonstrations."""


def write_task(folder: Path) -> None:
    folder.mkdir(parents=True)
    lines: dict[str, list[str]] = {}
    for number, (num_train, num_demonstrations) in SIZES.items():
        part, sizes = folder / str(number), {"num_train": num_train, "num_demonstrations": num_demonstrations}
        write_sort_task(part, digits=number, num_heldout=16, **sizes)
        for file in part.glob("*.jsonl"):
            lines.setdefault(file.name, []).extend(file.read_text().splitlines(True))
    for name, of_file in lines.items():
        random.Random(0).shuffle(of_file)
        (folder / name).write_text("".join(of_file))


@contextmanager
def stopped_in_part(server: Server, share: float) -> Iterator[None]:
    """Stop the server's processes for a share of the time."""
    ended = threading.Event()

    def keep_stopping() -> None:
        members = server.members()
        while not ended.wait((1 - share) * CYCLE_S):
            for act in ("suspend", "resume"):
                for process in members:
                    with suppress(psutil.Error):
                        getattr(process, act)()
                if act == "suspend":
                    ended.wait(share * CYCLE_S)

    thread = threading.Thread(target=keep_stopping)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def run_training(path: Path, overrides: dict[str, Any]) -> None:
    from megarl.trainer.loop import train

    train(load(path, overrides))


def summarize(run: Path, staleness: int) -> dict[str, Any]:
    """Return the row of a finished run."""
    steps = [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "step"]
    later, late = steps[1:], steps[len(steps) // 2 :]
    tokens = sum(step["response/length_mean"] * step["reward/responses"] for step in later)
    return {
        "k": staleness,
        "tokens/s": tokens / (steps[-1]["wall_s"] - steps[0]["wall_s"]),
        "idle": mean(step["rollout/idle_fraction"] for step in later),
        "stale": mean(step["rollout/stale_tokens_fraction"] for step in later),
        "oldest": max(step["rollout/staleness_max"] for step in steps),
        "paused": mean(step.get("rollout/paused", 0.0) for step in later),
        "lost parts": sum(step["rollout/lost_parts"] for step in steps),
        "reward": mean(step["reward/pass_rate"] for step in late),
        "k3": mean(step["rollout/k3"] for step in late),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--stopped", type=float, default=0.6, help="share of the time, of the second server")
    options = parser.parse_args()
    enable_cpu()
    folder = options.out.resolve()
    path, model, untrained = folder / "run.toml", folder / "model", folder / "untrained"
    if not path.exists():
        write_task(folder / "task")
        write_tiny_model(untrained)
        path.write_text(config_text("qwen3_moe", config=path, run=folder, model=model, task=folder / "task"))
    common = {"parallel.ep": 1, "launch.ranks_per_node": 1, "rollout.max_response_tokens": 24}
    common |= {"data.max_prompt_tokens": 24, "run.steps": options.steps, "log.sinks": [], "eval.every": 0}
    if not (model / "config.json").exists():
        in_process(cold_start, path, {**common, "model.path": str(untrained)})
    common |= {"rollout.engine": "sglang", "rollout.fp8_rounding": False, "rollout.dtype": "fp32"}
    common |= {"rollout.fp8_activations": False, "rollout.prompts_per_step": 16, "sglang.concurrency": 32}
    rows = []
    for staleness in options.staleness:
        run = folder / f"k{staleness}"
        if not (run / "done").exists():
            with ExitStack() as stack:
                python = Path(".venv-sglang/bin/python").absolute()
                specs = [
                    ServerSpec(model, python, "float32", folder / f"server{i}.log", max_total_tokens=16384)
                    for i in range(2)
                ]
                servers = [stack.enter_context(Server(spec)) for spec in specs]
                for server in servers:
                    server.wait_ready(1200.0)
                stack.enter_context(stopped_in_part(servers[1], options.stopped))
                overrides = {"run.dir": str(run), "rollout.max_staleness": staleness}
                overrides["sglang.urls"] = [server.url for server in servers]
                in_process(run_training, path, {**common, **overrides})
                (run / "done").touch()
        rows.append(summarize(run, staleness))
    print(f"{options.steps} steps, the second server stopped for {options.stopped:.0%} of the time")
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(f"{x:.3g}" if isinstance(x, float) else str(x) for x in row.values()) + " |")


if __name__ == "__main__":
    main()
