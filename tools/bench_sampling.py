"""Ada-Seq-Balance against uniform sampling on a hard mixture, at equal numbers of drawn responses.

    .venv/bin/python tools/bench_sampling.py OUT [--seeds 5] [--samples 16384]

The problems are those of the quickstart (sort six digits), but the cold start solves those with a first digit of 0 or 1
nearly always and those with 7 or more almost never. Every arm starts from the same weights, draws 32 prompts per
step, takes one optimizer step on them, and stops after the first step that reaches ``--samples`` responses. Figures
are medians over seeds, with minimum and maximum. The seed changes prompts and noise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from megarl.data.tiny import write_sort_task, write_tiny_model
from megarl.ops.quickstart import config_text
from megarl.run.metrics_log import read_metrics

WRONG_SHARES = (0.02, 0.02, 0.5, 0.7, 0.9, 0.9, 0.95, 0.98, 0.98, 0.98)
PROMPTS = 32
ARMS: dict[str, tuple[str, ...]] = {
    "grpo, 4 each": ("--rollout.group_size", "4", "--train.objective", "grpo"),
    "grpo, 16 each": ("--rollout.group_size", "16", "--train.objective", "grpo"),
    "ada_seq_balance, 4 of up to 32": (
        "--rollout.group_size", "4", "--train.objective", "grpo", "--sampling.rule", "ada_seq_balance",
        "--credit.scale", "std",
    ),
}  # fmt: skip
"""The last one with the pool's mean and standard deviation: GRPO's advantage from all that was drawn."""


def main() -> None:
    """Train every arm with every seed, skip runs that are complete, then print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=16384)
    options = parser.parse_args()
    out: Path = options.out.resolve()
    prepare(out)
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for seed in range(options.seeds):
        for index, (arm, words) in enumerate(ARMS.items()):
            run = out / f"run-{index}-{seed}"
            if not run.exists():
                train(out / "quickstart.toml", run, seed, steps(arm, options.samples), words)
            found[arm].append(figures(list(read_metrics(run / "metrics.jsonl")), options.samples))
    (out / "table.json").write_text(json.dumps(found, indent=1))
    show(found, options.samples)


def prepare(out: Path) -> None:
    """Task and cold start, once."""
    config = out / "quickstart.toml"
    if (out / "model" / "config.json").exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    config.write_text(
        config_text("qwen3_moe", config=config, **{name: out / name for name in ("run", "model", "task")})
    )
    write_tiny_model(out / "untrained")
    write_sort_task(out / "task", wrong_share=WRONG_SHARES)
    megarl("sft", config, "--model.path", str(out / "untrained"), "--parallel.ep", "1")


def steps(arm: str, samples: int) -> int:
    """Return enough steps to draw ``samples`` responses. The adaptive arm draws at least 8 per prompt."""
    each = {"grpo, 4 each": 4, "grpo, 16 each": 16}.get(arm, 8)
    return -(-samples // (PROMPTS * each))


def train(config: Path, run: Path, seed: int, steps: int, words: tuple[str, ...]) -> None:
    """Train one run. Its folder appears when the run is complete."""
    partial = run.with_name(run.name + ".partial")
    subprocess.run(["rm", "-rf", str(partial)], check=True)
    megarl(
        "train", config, "--run.dir", str(partial), "--run.seed", str(seed), "--run.steps", str(steps),
        "--parallel.ep", "1", "--rollout.prompts_per_step", str(PROMPTS), "--train.mini_batches", "1",
        "--eval.every", str(max(1, steps // 32)), "--optim.decay_style", "constant", "--checkpoint.at_end", "false",
        *words,
    )  # fmt: skip
    partial.rename(run)


def megarl(command: str, config: Path, *words: str) -> None:
    """Run a command of megarl on one rank; ends the script if it fails."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.run(
        [*launcher, "-m", "megarl.cli", command, str(config), *words],
        env=environment, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if process.returncode:
        sys.exit(process.stdout[-3000:])


def figures(records: list[dict[str, Any]], samples: int) -> dict[str, float]:
    """Return the figures of a run after a number of drawn responses."""
    drawn: dict[int, float] = {0: 0.0}
    rewards, effective, tried = 0.0, [], []
    total = 0.0
    for record in records:
        if record["kind"] != "step" or total >= samples:
            continue
        number = record["sampling/samples"]
        total += number
        drawn[record["step"]] = total
        rewards += record["reward/mean"] * number
        effective.append(record["prompts/effective_ratio"])
        tried.append(number / PROMPTS)
    rates = [(drawn[r["step"]], r["eval/pass_rate"]) for r in records if r["kind"] == "eval" and r["step"] in drawn]
    at, values = np.array(sorted(rates)).T
    grid = np.linspace(0, samples, 65)
    return {
        "steps": len(effective),
        "samples per prompt": float(np.mean(tried)),
        "effective prompts": float(np.mean(effective)),
        "reward per sample": rewards / total,
        "held out, first": float(values[0]),
        "held out, last": float(np.interp(samples, at, values)),
        "held out, mean over samples": float(np.interp(grid, at, values).mean()),
    }


def show(found: dict[str, list[dict[str, float]]], samples: int) -> None:
    """A Markdown table."""
    names = list(next(iter(found.values()))[0])
    print(f"{samples} responses, {len(next(iter(found.values())))} seeds: median (least to largest)\n")
    print("| arm | " + " | ".join(names) + " |\n|---" * 1 + "|---" * len(names) + "|")
    for arm, runs in found.items():
        cells = [np.array([run[name] for run in runs]) for name in names]
        print(f"| {arm} | " + " | ".join(f"{np.median(c):.3g} ({c.min():.3g} to {c.max():.3g})" for c in cells) + " |")


if __name__ == "__main__":
    main()
