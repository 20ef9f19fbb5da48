"""What the old-log-prob pass costs: a step with it over all mini-batches, over all but the first, and over none.

    python tools/bench_old_pass.py --model MODEL --prompts FILE.jsonl [--repeats 10] [--json FILE]
                                   [any --table.key value]

For N = 1, 2 and 4 mini-batches, on the same rollouts with the same model object. The three variants alternate, and the
clock is the process's own, so that other load on the machine affects them alike. A step is everything after sampling;
the learning rate is negligible, so every repetition does the same work.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from transformers import AutoConfig

from megarl.config import Config
from megarl.engines.local.engine import LocalEngine
from megarl.megatron import distributed
from megarl.megatron.policy import DTYPES, Policy, schedule_of
from megarl.trainer.mini_batch import StepPlan
from megarl.trainer.sampling.sampler import Sampler
from megarl.trainer.sampling.step_rollouts import StepRollouts
from megarl.trainer.step import TrainStep

sys.path.insert(0, str(Path(__file__).parent))
from bench_rows import finish, ratio_row, take_json
from bench_step import configuration

VARIANTS = ("all", "all but first", "rollout")


def of(config: Config, mini_batches: int, variant: str) -> Config:
    changed = {"mini_batches": mini_batches, "old_logprobs": "rollout" if variant == "rollout" else "recomputed"}
    return config.model_copy(update={"train": config.train.model_copy(update=changed)})


def take_step(step: TrainStep, rollouts: StepRollouts, over_all: bool) -> float:
    """Return the seconds of this process."""
    started = time.process_time()
    parts = zip(rollouts.mini_batches, rollouts.advantages, strict=True)
    minis = [step.prepare(of_mini, advantages) for of_mini, advantages in parts]
    plan = StepPlan.of(step.config, done=1)
    minis = step.look(replace(plan, old_passes=len(minis)) if over_all else plan, minis)
    for index in range(len(minis)):
        minis, _ = step.update(plan, minis, index)
    return time.process_time() - started


def main() -> int:
    words, file = take_json(sys.argv[1:])
    config, repeats = configuration(words)
    distributed.initialize(config)
    policy, objective = Policy(config, schedule_of(config)), config.train.resolved_objective
    dtype, fp8 = DTYPES[config.rollout.dtype], config.rollout.fp8_rounding
    engine = LocalEngine(AutoConfig.from_pretrained(config.model.path), dtype=dtype, fp8_rounding=fp8)
    engine.update_weights(policy.export(), version=0)
    rows = []
    lines = [f"{'N':>2} {'pass over':>14}{'step ms':>10}{'step / all':>12}{'95 % interval':>18}"]
    for mini_batches in (1, 2, 4):
        rollouts = Sampler(of(config, mini_batches, "all"), engine, objective).sample_step(0)
        steps = {name: TrainStep(of(config, mini_batches, name), policy, objective) for name in VARIANTS}
        seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
        for repeat in range(-2, repeats):  # two rounds to warm up
            for shift in range(len(VARIANTS)):
                name = VARIANTS[(repeat + shift) % len(VARIANTS)]
                spent = take_step(steps[name], rollouts, over_all=name == "all")
                if repeat >= 0:
                    seconds[name].append(spent)
        for name in VARIANTS:
            ratios = [a / b for a, b in zip(seconds[name], seconds["all"], strict=True)]
            shown = "none (rollout)" if name == "rollout" else name
            if name == "all":
                continue
            row = ratio_row(
                f"old pass over {shown}, N = {mini_batches}", "a step / one with the pass over all", ratios, 1.02
            )
            rows.append(row)
            lines.append(
                f"{mini_batches:2} {shown:>14}{statistics.median(seconds[name]) * 1e3:10.1f}"
                f"{row.value:12.3f}{f'{row.low:.3f} to {row.high:.3f}':>18}"
            )
    if not distributed.is_main_rank():
        return 0
    print("\n".join(lines))
    return finish(rows, file)


if __name__ == "__main__":
    sys.exit(main())
