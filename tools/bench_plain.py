"""One update of megarl against a plain Megatron loop and against transformers, on the same sequences, in one run.

    python tools/bench_plain.py --model MODEL --prompts FILE.jsonl [--repeats 10] [--json FILE] [any --table.key value]

- megarl: ``TrainStep.update`` with R3, tripwires, statistics of the objective and of the gap between the engines.
- none: the same without replay.
- Megatron: its own schedule and loss (vocabulary-parallel cross-entropy, clipped surrogate, no metric), its optimizer,
  no hook of megarl on its routers; the same packed micro-batches.
- transformers: the same weights and sequences, padded on the right, log-softmax over the logits, torch's fused Adam.

An update is forward, backward and optimizer step over all responses of a step. The variants take turns on one thread,
and the clock is that of the process. The learning rate is negligible, so that all repetitions do the same work.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.config import Config
from megarl.core.types import Rollout
from megarl.engines.local.engine import LocalEngine
from megarl.megatron import distributed
from megarl.megatron.distributed import collect
from megarl.megatron.policy import DTYPES, Policy, schedule_of
from megarl.replay import RoutingReplay
from megarl.trainer.mini_batch import MiniBatch, StepPlan
from megarl.trainer.sampling.sampler import Sampler
from megarl.trainer.step import TrainStep

sys.path.insert(0, str(Path(__file__).parent))
from bench_rows import finish, ratio_row, take_json
from bench_step import configuration

Update = Callable[[], None]


def read_clock() -> float:
    """Seconds: of this process on a CPU, so that others do not count; on a GPU when all work on the GPU has ended."""
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def mini_batch(step: TrainStep, rollouts: list[Rollout], advantages: np.ndarray) -> MiniBatch:
    """A mini-batch after the old-log-prob pass."""
    return step.old_pass(StepPlan.of(step.config, done=1), step.prepare(rollouts, advantages))


def megarl_update(step: TrainStep, mini: MiniBatch) -> Update:
    """The second update of a step."""
    plan = StepPlan.of(step.config, done=1)

    def update() -> None:
        _, statistics = step.update(plan, [mini], 0)
        collect([statistics])

    return update


def surrogate(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    ratio = torch.exp(logprobs - old)
    return -(torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * mask).sum() / mask.sum()


def megatron_update(policy: Policy, mini: MiniBatch) -> Update:
    """What a loop on Megatron alone does with the packed micro-batches."""
    parts = []
    assert mini.first is not None
    for index, micro in enumerate(mini.micro_batches):
        device = micro.input_ids.device  # the columns of the batch may be on the host
        ahead = [
            torch.nn.functional.pad(column.to(device).float().roll(-1), (0, micro.num_slots - column.numel()))[None]
            for column in (micro.batch.loss_mask, micro.batch.advantages, mini.first.logprobs[index])
        ]
        parts.append((micro, *ahead))

    def forward_step(iterator, model):
        micro, mask, advantages, old = next(iterator)
        losses = model(
            input_ids=micro.input_ids,
            position_ids=torch.zeros_like(micro.input_ids),
            attention_mask=None,
            labels=micro.labels[None],
            packed_seq_params=micro.packing,
        )
        return losses, lambda found: (surrogate(-found, old, advantages, mask), {})

    def update() -> None:
        policy.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(parts),
            model=policy.chunks[0],
            num_microbatches=len(parts),
            seq_length=parts[0][0].num_slots,
            micro_batch_size=1,
            forward_only=False,
        )
        policy.optimizer.step()

    return update


def transformers_update(config: Config, rollouts: list[Rollout], advantages: np.ndarray) -> Update:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(
        config.model.path, dtype=torch.float32, experts_implementation="grouped_mm"
    ).to(device)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-12, fused=True)
    longest = max(r.num_tokens for r in rollouts)
    ids = torch.zeros(len(rollouts), longest, dtype=torch.int64)
    mask, old = torch.zeros(2, *ids.shape)
    for row, rollout in enumerate(rollouts):
        ids[row, : rollout.num_tokens] = torch.from_numpy(rollout.tokens)
        mask[row, : rollout.num_tokens] = torch.from_numpy(rollout.loss_mask).float()
        old[row, : rollout.num_tokens] = torch.from_numpy(rollout.rollout_logprobs)
    weights = torch.from_numpy(advantages).float()[:, None]
    ids, mask, old, weights = (column.to(device) for column in (ids, mask, old, weights))
    size = max(1, config.train.micro_batch_tokens // longest)

    def update() -> None:
        adam.zero_grad()
        for start in range(0, len(ids), size):
            part = slice(start, start + size)
            logits = model(input_ids=ids[part], use_cache=False).logits[:, :-1]
            logprobs = torch.log_softmax(logits.float(), -1).gather(2, ids[part, 1:, None]).squeeze(2)
            surrogate(logprobs, old[part, 1:], weights[part], mask[part, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()

    return update


def main() -> int:
    words, file = take_json(sys.argv[1:])
    config, repeats = configuration(words)
    torch.set_num_threads(1)
    distributed.initialize(config)
    policy, objective = Policy(config, schedule_of(config)), config.train.resolved_objective
    engine = LocalEngine(AutoConfig.from_pretrained(config.model.path), dtype=DTYPES["fp32"], fp8_rounding=True)
    engine.update_weights(policy.export(), version=0)
    found = Sampler(config, engine, objective).sample_step(0)
    rollouts = [rollout for part in found.mini_batches for rollout in part]
    advantages = np.random.default_rng(0).normal(size=len(rollouts))
    without = config.model_copy(update={"train": config.train.model_copy(update={"replay": "none"})})
    steps = {name: TrainStep(of, policy, objective) for name, of in (("megarl", config), ("none", without))}
    minis = {name: mini_batch(step, rollouts, advantages) for name, step in steps.items()}
    updates: dict[str, Update] = {name: megarl_update(step, minis[name]) for name, step in steps.items()}
    updates["Megatron"] = megatron_update(policy, minis["none"])
    updates["transformers"] = transformers_update(config, rollouts, advantages)
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    names = list(updates)
    for repeat in range(-2, repeats):  # two rounds to warm up
        for shift in range(len(names)):
            name = names[(repeat + shift) % len(names)]
            if plain := name == "Megatron" and policy.replay is not None:
                policy.replay.detach()
            started = read_clock()
            updates[name]()
            if repeat >= 0:
                seconds[name].append(read_clock() - started)
            if plain:
                policy.replay = RoutingReplay(policy.chunks)
    for name in names:
        print(f"{name:>13}: {1e3 * np.median(seconds[name]):8.1f} ms")

    def over(name: str, base: str) -> list[float]:
        return [a / b for a, b in zip(seconds[name], seconds[base], strict=True)]

    rows = [
        ratio_row(
            "update, none / plain Megatron",
            "without replay, with tripwires and metrics",
            over("none", "Megatron"),
            1.06,
        ),
        ratio_row("update, r3 / plain Megatron", "routing replay as well", over("megarl", "Megatron"), 1.10),
        ratio_row(
            "update, r3 / transformers", "the same weights and sequences, padded", over("megarl", "transformers")
        ),
    ]
    for row in rows:
        print(f"{row.name}: {row.value:.3f} ({row.low:.3f} to {row.high:.3f})")
    return finish(rows, file)


if __name__ == "__main__":
    sys.exit(main())
