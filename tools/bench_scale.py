"""Costs of a run that must grow no faster than their work: 512 ranks and 1e6 prompts, simulated in one process.

    python tools/bench_scale.py [--repeats 3] [--scale 1.0] [--json FILE]

Each cost is measured at three sizes, of which each is four times the one before. The exponent is that of the power law
through them; 1 is linear. Times are CPU seconds, the least of the repetitions, which visit the sizes in turn. The last
column is the cost of a million units at the rate of the largest size. Ends with 1 if an exponent is above its budget.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.config.tables.data import DataConfig
from megarl.core.choices.credit import Credit
from megarl.core.choices.stopping import Uniform
from megarl.core.metrics import Stat, merge
from megarl.core.packing import partition, select
from megarl.core.sampling.credit_assignment import assign
from megarl.core.types import TrainBatch
from megarl.data.prompts import PromptOrder, load_prompts
from megarl.routes import RoutingTrace
from megarl.run.metrics_log import MetricsLog
from megarl.run.samples import record_step
from megarl.trainer.sampling.assignment import PromptAssignment, RankCoordinates

sys.path.insert(0, str(Path(__file__).parent))
from bench_rows import Row, add_json, finish

RANKS, GROUP = 512, 8
FACTOR = 4
LINEAR, FLAT = 1.15, 0.35

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Cost:
    name: str
    unit: str
    largest: int
    prepare: Callable[[int, Path], Run]
    """(size, scratch folder) -> what is timed."""
    budget: float = LINEAR


def rewards_of(number: int) -> dict[tuple[int, int], float | None]:
    """8 samples of each prompt, half of the prompts with contrast."""
    draws = np.random.default_rng(0).random((number // GROUP, GROUP))
    rates = np.random.default_rng(1).choice([0.0, 0.5, 1.0], (number // GROUP, 1), p=[0.2, 0.6, 0.2])
    rewards = (draws < rates).astype(float).tolist()
    return {(prompt, sample): reward for prompt, row in enumerate(rewards) for sample, reward in enumerate(row)}


def assignment_of(number: int, ranks: int) -> PromptAssignment:
    at = RankCoordinates(1, ranks // 2, 1, 2)
    prompts = number // GROUP
    return PromptAssignment(Uniform(GROUP), prompts // 2, 4, at, max_prompts=prompts)


def selection(number: int, _: Path, ranks: int = RANKS) -> Run:
    rewards = rewards_of(number)

    def run() -> object:
        assignment = assignment_of(number, ranks)
        return assignment.keys_of(assignment.select(rewards))

    return run


def selection_by_ranks(ranks: int, folder: Path) -> Run:
    return selection(GROUP * 16384, folder, ranks)


def credit(number: int, _: Path) -> Run:
    selected = assignment_of(number, RANKS).select(rewards_of(number))
    return lambda: assign(Credit(weigh="prompt"), selected)


def audit(number: int, folder: Path) -> Run:
    prompts, samples = np.divmod(np.arange(number), GROUP)
    keys = np.stack([prompts, samples], 1)
    return lambda: record_step(folder, 1, 0, keys, {})


def packing(number: int, _: Path) -> Run:
    lengths = np.random.default_rng(0).integers(1, 8193, number).tolist()
    return lambda: partition(lengths, 16384)


def splitting(number: int, _: Path) -> Run:
    """A mini-batch of short sequences, taken apart into micro-batches of 64."""
    tokens = torch.zeros(4 * number)
    batch = TrainBatch(tokens.long(), torch.arange(number + 1) * 4, tokens.bool(), tokens, tokens, None, tokens.int())
    bins = [list(range(first, first + 64)) for first in range(0, number, 64)]
    return lambda: [select(batch, indices) for indices in bins]


def prompt_file(number: int, folder: Path) -> Callable[[], object]:
    """A file of prompts of about 90 characters, and the call that a rank makes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: index for index, letter in enumerate([*letters, "<e>"])}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    path = folder / f"{number}.jsonl"
    if not path.exists():
        words = np.random.default_rng(0).choice(["find", "all", "integers", "below", "that", "divide"], (number, 15))
        lines = (
            json.dumps({"prompt": " ".join(row), "answer": str(index)}) for index, row in enumerate(words.tolist())
        )
        path.write_text("\n".join(lines) + "\n")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>")
    return lambda: load_prompts(DataConfig(train=str(path)), fast)


def ordering(number: int, _: Path) -> Run:
    """A hundred steps of one epoch of a data set."""
    seeds = iter(range(1000))

    def run() -> object:
        order = PromptOrder(number, next(seeds))
        return [order.take(step * 64, 64) for step in range(100)]

    return run


def metrics(number: int, _: Path) -> Run:
    """What a rank does for its part of the metrics, and the main rank with the whole."""
    values = torch.rand(64)
    stats = {f"layer/{index}": Stat.summary(values, values > 0.5) for index in range(number)}

    def run() -> object:
        return merge([pickle.loads(pickle.dumps(stats))])

    return run


def resuming(number: int, folder: Path) -> Run:
    """Open the log of a long run, and drop its last step."""
    path = folder / f"run-{number}" / "metrics.jsonl"
    path.parent.mkdir(exist_ok=True)
    record: dict[str, Any] = {"kind": "step", "step": 0, "minibatch": None, "wall_s": 1.0}
    record |= {f"metric/{index}": 0.5 for index in range(40)}
    path.write_text("".join(json.dumps(record | {"step": step}) + "\n" for step in range(number)))
    last = iter(range(number - 2, 0, -1))

    def run() -> object:
        with MetricsLog(path.parent) as log:
            return log.truncate_after(next(last))

    return run


def checking(number: int, _: Path) -> Run:
    """Routes of one sequence in 48 layers, 8 of 128 experts."""
    rows = np.random.default_rng(0).random((number // 48, 48, 128), np.float32).argsort(2)[:, :, :8].astype(np.uint8)
    return lambda: RoutingTrace(rows, 128)


COSTS = (
    Cost("selection, 512 ranks", "rewards", 1 << 20, selection),
    Cost("selection, 131072 rewards", "ranks", RANKS, selection_by_ranks, 1.0),
    Cost("weights per prompt", "responses", 1 << 20, credit),
    Cost("record of what trained", "responses", 1 << 18, audit),
    Cost("packing", "sequences", 1 << 17, packing, 1.2),  # n log^2 n
    Cost("taking micro-batches", "sequences", 1 << 16, splitting),
    Cost("tokenizing", "prompts", 1 << 15, prompt_file),
    Cost("order of 100 steps", "prompts", 1 << 20, ordering),
    Cost("metrics", "statistics", 1 << 14, metrics),
    Cost("resuming", "records", 65_536, resuming, FLAT),
    Cost("checking routes", "rows", 196_608, checking),
)


def measure(repeats: int, scale: float) -> Iterator[tuple[Cost, list[int], list[list[float]]]]:
    """Yield for each cost its sizes, and by repetition the seconds at each."""
    with tempfile.TemporaryDirectory() as name:
        for cost in COSTS:
            largest = cost.largest if cost.unit == "ranks" else max(int(cost.largest * scale) // 1024, 1) * 1024
            sizes = [largest // FACTOR**power for power in (2, 1, 0)]
            runs = [cost.prepare(size, Path(name)) for size in sizes]
            yield cost, sizes, [[seconds(run) for run in runs] for _ in range(repeats)]


def seconds(run: Run) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def exponent(sizes: list[int], times: np.ndarray) -> float:
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(times, 1e-6)), 1)[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the sizes")
    add_json(parser)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"{'':>34} {'sizes':>28} {'CPU seconds':>24} {'exponent':>9} {'budget':>7}  seconds per 1e6")
    for cost, sizes, times in measure(args.repeats, args.scale):
        best = np.min(times, axis=0)
        power, rate = exponent(sizes, best), best[-1] / sizes[-1] * 1e6
        spread = [exponent(sizes, np.array(each)) for each in times]
        row = {"name": f"scale: {cost.name}", "low": min(spread), "high": max(spread)}
        what = f"{cost.name}: exponent of {cost.unit}, {sizes[0]:,} to {sizes[-1]:,}"
        rows.append(row | {"what": what, "value": power, "unit": "", "budget": cost.budget, "kind": "at_most"})
        per_million = {"name": f"scale: {cost.name}, cost", "what": f"{cost.name}, of 1e6 {cost.unit}", "value": rate}
        low, high = (float(each) / sizes[-1] * 1e6 for each in (min(t[-1] for t in times), max(t[-1] for t in times)))
        rows.append(per_million | {"unit": "CPU s", "low": low, "high": high, "budget": None, "kind": None})
        listed = " ".join(f"{second:7.3f}" for second in best)
        print(f"{cost.name:>34} {' '.join(map(str, sizes)):>28} {listed:>24} {power:9.2f} {cost.budget:7.2f}", end="  ")
        print(f"{rate:.3g} ({cost.unit})", flush=True)
    return finish([Row(**row) for row in rows], args.json)


if __name__ == "__main__":
    sys.exit(main())
