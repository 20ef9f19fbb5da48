"""What partial rollouts cost and save: runs of a tiny MoE with rollout.max_staleness = 0, 1 and 4, on two tasks.

    python tools/bench_staleness.py --out FOLDER [--steps 30] [--staleness 0 1 4] [--tasks short mixed]

The quickstart's model, settings and seeds, on one rank with the local engine. ``short`` is the quickstart's task: six
digits, so that responses are of one length. ``mixed`` sorts 3, 5, 8 or 16 digits: a step waits for the longest.

- passes: forward passes of the engine for all steps, prompts included; rows: their mean number of rows.
- tokens/s: response tokens per CPU second of the engine; less noisy than the clock on a shared machine.
- reward: held-out, of the last evaluation; k3: mean of the last half of the steps.

A finished run in FOLDER is read and not repeated.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from torch import multiprocessing

from megarl import enable_cpu
from megarl.config.file import load
from megarl.data.tiny import write_sort_task, write_tiny_model
from megarl.engines.local import decode
from megarl.engines.local.engine import LocalEngine
from megarl.ops.quickstart import config_text
from megarl.run.metrics_log import read_metrics

DIGITS = {"short": (6,), "mixed": (3, 5, 8, 16)}
LONGEST = {"short": 10, "mixed": 24}


def write_task(folder: Path, digits: tuple[int, ...]) -> None:
    """Write a sorting task with a share of each number of digits."""
    folder.mkdir(parents=True)
    sizes = {"num_train": 4096, "num_heldout": 256, "num_demonstrations": 38400}
    lines: dict[str, list[str]] = {}
    for number in digits:
        # There are 900 numbers of three digits, and no prompt comes twice.
        fewer = {name: min(size // len(digits), 250 if number == 3 else size) for name, size in sizes.items()}
        write_sort_task(folder / str(number), digits=number, **fewer)
        for file in (folder / str(number)).glob("*.jsonl"):
            lines.setdefault(file.name, []).extend(file.read_text().splitlines(True))
        shutil.rmtree(folder / str(number))
    for name, of_file in lines.items():
        random.Random(0).shuffle(of_file)
        (folder / name).write_text("".join(of_file))


def in_process(work: Callable[..., None], *arguments: Any) -> None:
    """Run the work in a fork: a process has one run."""
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{work.__name__} ended with exit code {process.exitcode}; its messages are above")


def cold_start(path: Path, overrides: dict[str, Any]) -> None:
    from megarl.trainer.sft import sft

    sft(load(path, overrides))


def train_counted(path: Path, overrides: dict[str, Any], counts_file: Path) -> None:
    """Train, and write how the engine worked in training rollouts."""
    from megarl.trainer.loop import train

    counts = {"passes": 0, "rows": 0, "cpu_s": 0.0}
    reader_class: Any = decode.Reader
    engine_class: Any = LocalEngine
    forward, converse = reader_class._forward, engine_class.converse

    def counted_forward(reader: Any, ids: Any, positions: Any) -> Any:
        counts["passes"] += 1
        counts["rows"] += len(ids)
        return forward(reader, ids, positions)

    def counted_converse(engine: LocalEngine, begin: Any, params: Any, *words: Any) -> None:
        before, started = dict(counts), time.process_time()
        converse(engine, begin, params, *words)
        counts["cpu_s"] += time.process_time() - started
        if not params.return_routed_experts:  # an evaluation
            counts.update(before)

    reader_class._forward, engine_class.converse = counted_forward, counted_converse
    train(load(path, overrides))
    counts_file.write_text(json.dumps(counts))


def summarize(run: Path, staleness: int) -> dict[str, Any]:
    """Return the row of a finished run."""
    records, counts = read_metrics(run / "metrics.jsonl"), json.loads((run / "counts.json").read_text())
    steps = [record for record in records if record["kind"] == "step"]
    evals = [record for record in records if record["kind"] == "eval"]
    tokens = sum(step["response/length_mean"] * step["reward/responses"] for step in steps)
    return {
        "k": staleness,
        "reward": evals[-1]["eval/pass_rate"],
        "k3": mean(step["rollout/k3"] for step in steps[len(steps) // 2 :]),
        "stale": mean(step["rollout/stale_tokens_fraction"] for step in steps),
        "age": mean(step["rollout/staleness_mean"] for step in steps),
        "oldest": max(step["rollout/staleness_max"] for step in steps),
        "paused": mean(step.get("rollout/paused", 0.0) for step in steps),
        "passed over": mean(step.get("rollout/passed_over", 0.0) for step in steps),
        "passes": counts["passes"],
        "rows": counts["rows"] / counts["passes"],
        "tokens/s": tokens / counts["cpu_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--tasks", nargs="+", choices=DIGITS, default=[*DIGITS])
    options = parser.parse_args()
    enable_cpu()
    for task in options.tasks:
        folder = options.out / task
        path, model, untrained = folder / "run.toml", folder / "model", folder / "untrained"
        if not path.exists():
            write_task(folder / "task", DIGITS[task])
            write_tiny_model(untrained)
            path.write_text(config_text("qwen3_moe", config=path, run=folder, model=model, task=folder / "task"))
        common = {"parallel.ep": 1, "launch.ranks_per_node": 1, "rollout.max_response_tokens": LONGEST[task]}
        common |= {"data.max_prompt_tokens": 24, "run.steps": options.steps, "log.sinks": []}
        if not (model / "config.json").exists():
            in_process(cold_start, path, {**common, "model.path": str(untrained)})
        rows = []
        for staleness in options.staleness:
            run = folder / f"k{staleness}"
            if not (run / "counts.json").exists():
                overrides = {**common, "run.dir": str(run), "rollout.max_staleness": staleness}
                in_process(train_counted, path, overrides, run / "counts.json")
            rows.append(summarize(run, staleness))
        print(f"{task}, {options.steps} steps")
        print("| " + " | ".join(rows[0]) + " |")
        print("|" + "---|" * len(rows[0]))
        for row in rows:
            print(
                "| "
                + " | ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values())
                + " |"
            )


if __name__ == "__main__":
    main()
