"""What routing replay and the tripwires cost: training steps with and without them, paired in one run.

    python tools/bench_step.py --model MODEL --prompts FILE.jsonl [--repeats 10] [--json FILE] [any --table.key value]
    torchrun --nproc-per-node 2 tools/bench_step.py ... --parallel.ep 2

Both variants train on the same rollouts with the same model object, alternating, so that other load on the machine
affects both equally. A step is everything after sampling: checks, packing, old log-probabilities, N updates. The
learning rate is negligible, so every repetition does the same work. "unwatched" is r3 without tripwires. "unhooked" is
Megatron with no megarl hook on its routers, and without tripwires. The last line compares the gradient norms of single
samples (GVM) with a training pass over them: preparation, forward and backward pass, without the optimizer.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from megarl.config import Config
from megarl.config.file import parse, split_overrides
from megarl.engines.local.engine import LocalEngine
from megarl.megatron import distributed
from megarl.megatron.policy import DTYPES, Policy, schedule_of
from megarl.replay import RoutingReplay
from megarl.replay.hooks import Hook
from megarl.trainer.mini_batch import StepPlan
from megarl.trainer.sampling.gradient_norms import gradient_norms
from megarl.trainer.sampling.sampler import Sampler
from megarl.trainer.sampling.step_rollouts import StepRollouts
from megarl.trainer.step import TrainStep

sys.path.insert(0, str(Path(__file__).parent))
from bench_rows import Row, finish, interval_of_median, ratio_row, take_json

VARIANTS = ("r3", "unwatched", "r2", "none", "unhooked")
_clock = time.perf_counter if torch.cuda.is_available() else time.process_time
"""On a CPU the time of this process, so that others do not count."""
PHASES = ("prepare", "old_logprobs", "train")
PARTS = ("optimizer", "routers")
"""Shares of the phases: the optimizer's step, and the time inside the replay hook (top-k included)."""


def configuration(words: list[str]) -> tuple[Config, int]:
    """The benchmark's run from the command line, and the number of repetitions."""
    rest, overrides = split_overrides(words)
    flags = dict(zip(rest[::2], rest[1::2], strict=True))
    table = {
        "run": {"name": "bench", "steps": 1},
        "model": {"path": flags["--model"], "dtype": "fp32"},
        "data": {"train": flags["--prompts"], "max_prompt_tokens": 16},
        "rollout": {
            "prompts_per_step": 32,
            "group_size": 8,
            "max_response_tokens": 10,
            "fp8_rounding": True,
            "dtype": "fp32",
        },
        "train": {"mini_batches": 2, "micro_batch_tokens": 4096, "replay": "r3"},
        "optim": {"lr": 1e-12},
    }
    return parse(table, overrides), int(flags.get("--repeats", "10"))


class Bench:
    def __init__(self, config: Config) -> None:
        self.policy = Policy(config, schedule_of(config))
        self.objective = config.train.resolved_objective
        engine = LocalEngine(
            AutoConfig.from_pretrained(config.model.path),
            dtype=DTYPES[config.rollout.dtype],
            fp8_rounding=config.rollout.fp8_rounding,
        )
        engine.update_weights(self.policy.export(), version=0)
        self.rollouts: StepRollouts = Sampler(config, engine, self.objective).sample_step(0)
        self.steps = {name: TrainStep(_of_variant(config, name), self.policy, self.objective) for name in VARIANTS}
        self.seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.parts: dict[str, float] = defaultdict(float)
        self.policy.optimizer_step = self._measured("optimizer", self.policy.optimizer_step)
        Hook.get_replay_topk = self._measured("routers", Hook.get_replay_topk)

    def _measured(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = _clock()
            result = function(*args, **kwargs)
            self.parts[part] += _clock() - started
            return result

        return timed

    def once(self, variant: str, keep: bool) -> None:
        step = self.steps[variant]
        hooked, self.policy.replay = self.policy.replay, None if variant == "unhooked" else self.policy.replay
        if variant == "unhooked" and hooked:
            hooked.detach()
        spent: dict[str, float] = {}
        self.parts.clear()
        with _timed(spent, "prepare"):
            minis = [
                step.prepare(r, a) for r, a in zip(self.rollouts.mini_batches, self.rollouts.advantages, strict=True)
            ]
        plan = StepPlan.of(step.config, done=1)
        with _timed(spent, "old_logprobs"):
            minis = step.look(plan, minis)
        with _timed(spent, "train"):
            for index in range(len(minis)):
                minis, _ = step.update(plan, minis, index)
        if variant == "unhooked":
            self.policy.replay = RoutingReplay(self.policy.chunks)
        if keep:
            for phase, value in {**spent, **{part: self.parts[part] for part in PARTS}}.items():
                self.seconds[variant, phase].append(value)

    def norms(self, repeats: int) -> str:
        """Gradient norms of all samples against a training pass over them: medians of ratios of paired times."""
        step, rollouts = self.steps["none"], [r for part in self.rollouts.mini_batches for r in part]
        ratios: dict[str, list[float]] = defaultdict(list)
        for repeat in range(-1, repeats):
            for block in ("embedding", "output_layer"):
                spent: dict[str, float] = {}
                with _timed(spent, "pass"):
                    mini = step.prepare(rollouts, np.ones(len(rollouts)))
                    step.backward(StepPlan.of(step.config, done=1), [mini], 0)
                with _timed(spent, "norms"):
                    gradient_norms(step, rollouts, block)
                if repeat >= 0:
                    ratios[block].append(spent["norms"] / spent["pass"])
        found = [f"{block} {statistics.median(values):.2f}" for block, values in ratios.items()]
        return f"gradient norms of {len(rollouts)} samples / a training pass over them: {', '.join(found)}"

    def report(self) -> str:
        totals = self.totals()
        columns = "".join(f"{name + ' ms':>17}" for name in (*PHASES, *PARTS))
        lines = [f"{'variant':>9} {columns}{'step ms':>12}{'step / none':>13}{'95 % interval':>18}"]
        for variant in VARIANTS:
            ratios = [a / b for a, b in zip(totals[variant], totals["none"], strict=True)]
            low, high = interval_of_median(ratios)
            medians = [statistics.median(self.seconds[variant, p]) * 1e3 for p in (*PHASES, *PARTS)]
            total = statistics.median(totals[variant]) * 1e3
            lines.append(
                f"{variant:>9} "
                + "".join(f"{m:17.1f}" for m in medians)
                + f"{total:12.1f}{statistics.median(ratios):13.3f}{f'{low:.3f} to {high:.3f}':>18}"
            )
        lines += [f"{row.name}: {row.value:.3f}, 95 % {row.low:.3f} to {row.high:.3f}" for row in self.rows(totals)]
        return "\n".join(lines)

    def totals(self) -> dict[str, list[float]]:
        """Seconds of each step, by variant."""
        return {v: [sum(parts) for parts in zip(*(self.seconds[v, p] for p in PHASES), strict=True)] for v in VARIANTS}

    def rows(self, totals: dict[str, list[float]]) -> list[Row]:
        pairs = (("r3", "none", 1.1), ("r2", "none", 1.1), ("r3", "unwatched", 1.05), ("none", "unhooked", 1.05))
        ratios = {(a, b): [x / y for x, y in zip(totals[a], totals[b], strict=True)] for a, b, _ in pairs}
        return [ratio_row(f"{a} / {b}", "a step after sampling", ratios[a, b], limit) for a, b, limit in pairs]


@contextmanager
def _timed(spent: dict[str, float], phase: str) -> Iterator[None]:
    started = _clock()
    yield
    spent[phase] = _clock() - started


def _of_variant(config: Config, variant: str) -> Config:
    changed: dict[str, Any] = {"replay": {"unwatched": "r3", "unhooked": "none"}.get(variant, variant)}
    if variant in ("unwatched", "unhooked"):
        changed |= {"max_k3": "off", "max_native_flip": "off"}
    return config.model_copy(update={"train": config.train.model_copy(update=changed)})


def main() -> int:
    words, file = take_json(sys.argv[1:])
    config, repeats = configuration(words)
    distributed.initialize(config)
    bench = Bench(config)
    for repeat in range(-2, repeats):  # two rounds to warm up
        # the order turns, so that no variant always follows the same one
        for shift in range(len(VARIANTS)):
            bench.once(VARIANTS[(repeat + shift) % len(VARIANTS)], keep=repeat >= 0)
    norms = bench.norms(repeats)
    tokens = sum(len(r.tokens) for part in bench.rollouts.mini_batches for r in part)
    if not distributed.is_main_rank():
        return 0
    print(f"{tokens} tokens on this rank, {config.train.mini_batches} mini-batches, median of {repeats} paired steps")
    print(bench.report())
    print(norms)
    return finish(bench.rows(bench.totals()), file)


if __name__ == "__main__":
    sys.exit(main())
