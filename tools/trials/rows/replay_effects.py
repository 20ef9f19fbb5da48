"""What routing replay does to the policy that an update differentiates, measured in megarl's own trainer on the CPU.

A tiny Megatron model trains one step of four mini-batches on rollouts of an engine whose weights are rounded to fp8.
Just before each update, the mini-batch runs with the routes that the update will replay, and with the routers' own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from megarl.config import Config
    from megarl.core.types import Rollout
    from megarl.trainer.mini_batch import MiniBatch
    from megarl.trainer.passes import PassOutput
    from megarl.trainer.step import TrainStep

NUM_MINI_BATCHES, RESPONSES_PER_MINI_BATCH, LENGTH, TOP_K = 4, 8, 12, 2
SIZES = {"hidden_size": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "num_experts": 8, "expert_width": 16}


@dataclass(frozen=True, slots=True)
class ReplayEffect:
    """How the policy with replayed routes differs from the same weights with their own routes, on one mini-batch."""

    largest_gap: float
    """The largest ``|log pi(replayed) - log pi(own)|`` of a loss token."""
    flip: float
    """The share of (token, layer) pairs with another set of experts."""
    repeat_gap: float
    """``largest_gap`` of two passes with own routes: 0 if the engine repeats itself to the bit."""


def replay_effects(mode: str, seed: int) -> list[ReplayEffect]:
    """Return the effect of replay on each mini-batch of a step of megarl's trainer."""
    size, effects = RESPONSES_PER_MINI_BATCH, []
    with tiny_trainer(mode, seed) as (step, rollouts):
        from megarl.trainer.mini_batch import StepPlan

        advantages = np.random.default_rng(seed).normal(size=len(rollouts))
        starts = range(0, len(rollouts), size)
        minis = [step.prepare(rollouts[i : i + size], advantages[i : i + size]) for i in starts]
        # The pass over the first mini-batch is made too, so that R2 replays recorded routes there.
        plan = replace(StepPlan.of(step.config, 1), old_passes=NUM_MINI_BATCHES)
        minis = step.look(plan, minis)
        for index in range(NUM_MINI_BATCHES):
            effects.append(compare_replayed(step, minis[index]))
            minis, _ = step.update(plan, minis, index)
    return effects


def compare_replayed(step: TrainStep, mini: MiniBatch) -> ReplayEffect:
    """Run a mini-batch with the routes that its update will replay, and twice with the routers' own choice."""
    from megarl.routes import Disagreement
    from megarl.trainer import passes

    replay, routes = step.policy.replay, mini.replayed
    assert replay is not None, "the model has routers"
    assert routes is not None, "the first pass has been"
    replayed = passes.run_pass(step.policy, mini)
    native, again = (passes.run_pass(step.policy, mini, replay.record(compared=routes)) for _ in range(2))
    masks = [micro.batch.loss_mask for micro in mini.micro_batches]

    def largest_gap(first: PassOutput, second: PassOutput) -> float:
        triples = zip(first.logprobs, second.logprobs, masks, strict=True)
        return max(float((one - two).abs()[mask].max()) for one, two, mask in triples)

    assert native.recording is not None, "record() returns one"
    num_shared = torch.cat(native.recording.shared).numpy()
    flip = Disagreement.of(num_shared, TOP_K).flip
    return ReplayEffect(largest_gap(replayed, native), flip, largest_gap(native, again))


@contextmanager
def tiny_trainer(mode: str, seed: int) -> Iterator[tuple[TrainStep, list[Rollout]]]:
    """Yield megarl's training step on a tiny Megatron model on the CPU, and rollouts of an engine with fp8 weights."""
    import megarl

    megarl.enable_cpu()
    from megarl.data.tiny import write_tiny_model
    from megarl.megatron import distributed
    from megarl.megatron.policy import Policy, schedule_of
    from megarl.trainer.step import TrainStep

    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(
            Path(folder) / "model", seed=seed, top_k=TOP_K, max_positions=64, initializer_range=0.15, **SIZES
        )
        settings = replay_settings(model, mode, seed)
        distributed.initialize(settings)
        try:
            policy = Policy(settings, schedule_of(settings))
            yield TrainStep(settings, policy, settings.train.resolved_objective), sample_rollouts(model, seed)
        finally:
            distributed.shutdown()


def replay_settings(model: Path, mode: str, seed: int) -> Config:
    """Return MiniRL's settings with the replay mode; the tripwires are off, they would drop what is to be seen."""
    from megarl.config.file import parse

    train = {"mini_batches": NUM_MINI_BATCHES, "micro_batch_tokens": 256, "replay": mode, "min_route_agreement": 0.0}
    train |= {"max_k3": "off", "max_native_flip": 0.999, "max_bad_steps": 0}
    table = {
        "run": {"steps": 1, "seed": seed},
        "model": {"path": str(model), "dtype": "fp32"},
        "data": {"train": "unused.jsonl", "max_prompt_tokens": 8},
        "rollout": {"prompts_per_step": 8, "group_size": 4, "max_response_tokens": LENGTH, "fp8_rounding": True},
        "train": train,
        "optim": {"lr": 1e-3},
        "log": {"sinks": []},
    }
    return parse(table, {})


def sample_rollouts(model: Path, seed: int) -> list[Rollout]:
    """Return responses of 12 tokens to random prompts, with the routes of the engine."""
    from megarl.core.types import SampleRequest
    from megarl.data.tiny import EOS_ID
    from megarl.engines.local.engine import LocalEngine
    from megarl.engines.protocol import SamplingParams
    from megarl.engines.weights import read_model_config
    from megarl.models.hf_files import HFCheckpoint

    engine, generator = LocalEngine(read_model_config(model), fp8_rounding=True), np.random.default_rng(seed)
    with HFCheckpoint(model) as checkpoint:
        engine.update_weights(((name, checkpoint.read(name)) for name in checkpoint.names_of_text()), 0)
    prompts = generator.integers(2, 32, (NUM_MINI_BATCHES * RESPONSES_PER_MINI_BATCH, 6)).astype(np.int32)
    requests = [SampleRequest(prompt, n // 4, n % 4, seed=n) for n, prompt in enumerate(prompts)]
    rollouts = engine.generate(
        requests, SamplingParams(1.0, 1.0, LENGTH, (EOS_ID,), True, None, return_gate_weights=True)
    )
    engine.close()
    return rollouts
