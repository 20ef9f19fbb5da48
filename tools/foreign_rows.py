"""What the test for foreign rows finds, and how often it is wrong (docs/tripwires.md).

    python tools/foreign_rows.py curve [--rows 32000]
    python tools/foreign_rows.py measure WORK [--layers 4] [--experts 32] [--topk 4] [--replay none]

``curve`` simulates: honest rows lose one expert in a share of (token, layer) pairs that varies between tokens, foreign
rows are drawn by chance. It prints the chance that a run of n rows is found in a response of so many rows.

``measure`` samples with the local engine in bf16, with FP8 weights, FP8 activations and FP8 keys and values, and
compares with Megatron in bf16, on a random tiny model made in WORK. For real honest rows it prints the largest score,
and the exponent theta > 0 with E exp(theta S) = 1 for sums S of blocks of 1, 8 and 32 rows: from a given row on, a sum
beyond h then has at most the probability exp(-theta h) (Lundberg), so theta >= 1 keeps the stated rate; inf: no block
had a positive sum. For real foreign rows it prints the longest run that 500 places needed to be found in 128,000 rows.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.core.types import SampleRequest, TrainBatch
from megarl.watch.foreign_rows import SHARES, find_foreign, row_scores
from megarl.watch.limits import TRIPWIRES

SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
AROUND, TRIES, LONGEST = 64, 400, 128_000
ENGINES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "FP8 weights": {"fp8_rounding": True},
    "and activations": {"fp8_rounding": True, "fp8_activations": True},
    "and keys and values": {"fp8_rounding": True, "fp8_activations": True, "fp8_kv_cache": True},
}


def batch_of(lengths: list[int]) -> TrainBatch:
    column, mask = torch.zeros(sum(lengths)), torch.ones(sum(lengths), dtype=torch.bool)
    return TrainBatch(column, torch.tensor([0, *np.cumsum(lengths)]), mask, column, column, routed_mask=mask)


def curve(rows: int) -> None:
    rng = np.random.default_rng(0)
    print(f"run of n foreign rows in a response of {rows} rows, chance to be found")
    print(f"{'layers, top-k of E':<20}{'flips':>6}" + "".join(f"{size:>6}" for size in SIZES))
    for num_layers, topk, experts in ((48, 8, 128), (4, 8, 128), (4, 2, 8)):
        for flip in (0.01, 0.06, 0.15):
            found = [_chance(rng, num_layers, topk, experts, flip, size, rows) for size in SIZES]
            name = f"{num_layers}, top-{topk} of {experts}"
            print(f"{name:<20}{flip:>6.0%}" + "".join(f"{one:>6.0%}" for one in found))


def _chance(
    rng: np.random.Generator, num_layers: int, topk: int, experts: int, flip: float, size: int, rows: int
) -> float:
    total = 2 * AROUND + size
    rate = rng.beta(30 * flip, 30 * (1 - flip), (TRIES, total, 1))
    shared = (topk - (rng.random((TRIES, total, num_layers)) < rate)).astype(np.uint8)
    foreign = rng.hypergeometric(topk, experts - topk, topk, (TRIES, size, num_layers))
    shared[:, AROUND : AROUND + size] = foreign
    evidence = find_foreign(shared.reshape(-1, num_layers), topk, batch_of([total] * TRIES))[:, 0]
    return float(
        (evidence > TRIPWIRES.evidence + np.log(rows / total)).mean()
    )  # that of a long response is less by this


def measure(work: Path, layers: int, experts: int, topk: int, replay: str) -> None:
    from transformers import AutoConfig

    from megarl.config.file import parse
    from megarl.data.tiny import write_sort_task, write_tiny_model
    from megarl.engines.local.engine import LocalEngine
    from megarl.engines.protocol import SamplingParams
    from megarl.megatron import distributed
    from megarl.megatron.policy import Policy, schedule_of
    from megarl.trainer.mini_batch import StepPlan
    from megarl.trainer.step import TrainStep

    model, task = work / "model", work / "task"
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_layers": layers,
        "num_experts": experts,
        "top_k": topk,
        "expert_width": 32,
    }
    write_tiny_model(model, initializer_range=0.05, max_positions=1024, expert_width=32, **sizes)
    write_sort_task(task, num_train=64, num_heldout=16, num_demonstrations=256)
    table: dict[str, Any] = {
        "run": {"steps": 1},
        "model": {"path": str(model), "dtype": "bf16"},
        "data": {"train": str(task / "train.jsonl"), "max_prompt_tokens": 16},
        "rollout": {"prompts_per_step": 8, "group_size": 4, "max_response_tokens": 250},
        "train": {"mini_batches": 1, "micro_batch_tokens": 4096, "replay": replay, "max_bad_steps": 0},
        "optim": {"lr": 1e-6},
    }
    config = parse(table, {})
    distributed.initialize(config)
    policy = Policy(config, schedule_of(config))
    step = TrainStep(config, policy, config.train.resolved_objective)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 32, rng.integers(8, 64)).astype(np.int32) for _ in range(32)]
    requests = [SampleRequest(prompt, s // 4, s % 4, seed=s) for s, prompt in enumerate(prompts)]
    print(
        f"{'engine':<20}{'rows':>7}{'flips':>7}{'largest score':>15}{'theta 1, 8, 32':>18}  longest run needed, foreign"
    )
    for name, options in ENGINES.items():
        engine = LocalEngine(AutoConfig.from_pretrained(model), dtype=torch.bfloat16, **options)
        engine.update_weights(policy.export(), version=0)
        rollouts = engine.generate(requests, SamplingParams(1.0, 1.0, 250, (), True, None))
        plan = replace(StepPlan.of(config, 1), writes_traces=True)
        mini = step.old_pass(plan, step.prepare(rollouts, np.ones(len(rollouts))))
        assert mini.first is not None
        assert mini.first.native_routes is not None
        assert mini.engine_routes is not None
        masks = [np.ones(len(r.experts), bool) if r.present is None else r.present.numpy() for r in mini.engine_routes]
        own, theirs = (
            np.concatenate([r.experts.numpy()[mask] for r, mask in zip(routes, masks, strict=True)]).astype(np.int16)
            for routes in (mini.first.native_routes, mini.engine_routes)
        )
        _report(name, own, theirs)


def _report(name: str, own: np.ndarray, theirs: np.ndarray) -> None:
    """Routes [T, L, K] of neighbouring tokens, of all responses in a row."""
    num_layers, topk = own.shape[1:]
    scores = row_scores(num_layers, topk)[0]

    def score(rows: np.ndarray) -> np.ndarray:
        return scores[num_layers * topk - (own[:, :, :, None] == rows[:, :, None, :]).sum((1, 2, 3))]

    honest = score(theirs)
    flips = ((own[:, :, :, None] == theirs[:, :, None, :]).sum((2, 3)) < topk).mean()
    theta = [_lundberg(honest[: len(honest) // size * size].reshape(-1, size).sum(1)) for size in (1, 8, 32)]
    kinds = {"response": np.roll(theirs, 333, 0), "late": np.roll(theirs, 1, 0), "layer": np.roll(theirs, 1, 1)}
    kinds["zeros"] = np.broadcast_to(np.arange(topk), theirs.shape)
    needed = TRIPWIRES.evidence + np.log(len(SHARES) * LONGEST)
    longest = {kind: _longest(score(rows), needed) for kind, rows in kinds.items()}
    shown = ", ".join(f"{kind} {size}" for kind, size in longest.items())
    print(
        f"{name:<20}{len(own):>7}{flips:>7.1%}{honest.max():>15.2f}{'/'.join(f'{t:.1f}' for t in theta):>18}  {shown}"
    )


def _longest(scores: np.ndarray, needed: float) -> int:
    starts = np.linspace(0, len(scores) - 200, 500).astype(int)
    found = [np.cumsum(scores[start : start + 200]) > needed for start in starts]
    return max(int(one.argmax()) + 1 if one.any() else 200 for one in found)


def _lundberg(sums: np.ndarray) -> float:
    if sums.max() <= 0:
        return float("inf")
    low, high = 0.0, 64.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.exp(middle * sums).mean() < 1 else (low, middle)
    return low


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("curve").add_argument("--rows", type=int, default=32_000)
    measured = commands.add_parser("measure")
    measured.add_argument("work", type=Path)
    for name, default in (("layers", 4), ("experts", 32), ("topk", 4)):
        measured.add_argument(f"--{name}", type=int, default=default)
    measured.add_argument("--replay", choices=("none", "r3"), default="none")
    arguments = vars(parser.parse_args())
    {"curve": curve, "measure": measure}[arguments.pop("command")](**arguments)


if __name__ == "__main__":
    main()
