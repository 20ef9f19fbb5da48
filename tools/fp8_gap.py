"""The table of docs/fp8.md: what the local engine's FP8 does to the gap, with and without R3, over several seeds.

    megarl quickstart --out runs/quickstart
    python tools/fp8_gap.py [--quickstart runs/quickstart] [--out runs/fp8_gap] [--seeds 5] [--prompts 256]

Each cell is one step of ``megarl train`` on one rank, in bf16, from the quickstart's model after its cold start; seeds
differ in ``run.seed``, that is in prompts and samples. Printed are medians, and the least and the largest. Finished
runs in OUT are not made again.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.run.metrics_log import read_metrics

ROWS = {
    "no FP8": ("--rollout.fp8_rounding", "false"),
    "FP8 weights": (),
    "and activations": ("--rollout.fp8_activations", "true"),
    "and keys and values": ("--rollout.fp8_activations", "true", "--rollout.fp8_kv_cache", "true"),
    "keys and values alone": ("--rollout.fp8_rounding", "false", "--rollout.fp8_kv_cache", "true"),
}
COMMON = ("--run.steps", "1", "--eval.every", "0", "--parallel.ep", "1")
BF16 = ("--model.dtype", "bf16", "--rollout.dtype", "bf16")


def measure(folder: Path, config: Path, words: Sequence[str]) -> dict[str, float]:
    """The metrics of one step."""
    if not (folder / "metrics.jsonl").exists():
        command = [sys.executable, "-m", "megarl.cli", "train", str(config), "--run.dir", str(folder)]
        subprocess.run([*command, *COMMON, *BF16, *words], check=True, stdout=subprocess.DEVNULL)
    return next(record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "step")


def interval(values: Sequence[float], form: str) -> str:
    """Median, least and largest."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quickstart", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--out", type=Path, default=Path("runs/fp8_gap"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=256)
    arguments = parser.parse_args()
    size = ("--rollout.prompts_per_step", str(arguments.prompts))
    print("| engine, bf16 | mean k3 without replay | with R3 | native flip: pairs | tokens |\n|---|---|---|---|---|")
    for number, (name, row) in enumerate(ROWS.items()):
        found = {
            replay: [
                measure(
                    arguments.out / f"row{number}-{replay}-seed{seed}",
                    arguments.quickstart / "quickstart.toml",
                    [*row, *size, "--train.replay", replay, "--run.seed", str(seed)],
                )
                for seed in range(arguments.seeds)
            ]
            for replay in ("none", "r3")
        }
        cells = [interval([one["rollout/k3"] for one in ones], ".1e") for ones in found.values()]
        for metric in ("flip", "token_any"):
            cells.append(f"{interval([100 * one[f'router/native/{metric}'] for one in found['none']], '.1f')} %")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
