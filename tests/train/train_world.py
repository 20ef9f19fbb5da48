"""What the trainer's tests share: a tiny model with its task, settings, fixed rollouts, and a step taken on them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from transformers import AutoConfig, AutoTokenizer

from megarl.config import Config
from megarl.config_file import parse
from megarl.core.metrics import Stat, finalize
from megarl.core.types import Rollout, SampleRequest
from megarl.data.prompts import load_prompts
from megarl.data.tiny import write_sort_task, write_tiny_model
from megarl.megatron import distributed
from megarl.megatron.policy import Policy, schedule_of
from megarl.rollout.engine import SamplingParams
from megarl.rollout.local import LocalEngine
from megarl.train.loop import objective_of
from megarl.train.sampler import owned_sequences
from megarl.train.step import MiniBatch, TrainStep, collect

NUM_GROUPS, GROUP_SIZE, MAX_RESPONSE = 8, 4, 8
NUM_SEQUENCES = NUM_GROUPS * GROUP_SIZE
NUM_MOE_LAYERS, NUM_EXPERTS, TOP_K = 3, 8, 2


@dataclass(frozen=True)
class World:
    """A folder with ``model`` (4 layers, the second dense), ``task``, and rollouts of both kinds of engine."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def settings(self, **overrides: Any) -> Config:
        """A configuration of this world; ``overrides`` are dotted keys with ``__`` for the dot."""
        return parse(self.table(), {key.replace("__", "."): value for key, value in overrides.items()})

    def table(self) -> dict[str, Any]:
        task = self.folder / "task"
        return {
            "run": {"steps": 2, "seed": 3, "dir": str(self.folder / "unused")},
            "model": {"path": str(self.model), "dtype": "fp32"},
            "data": {
                "train": str(task / "train.jsonl"),
                "heldout": str(task / "heldout.jsonl"),
                "max_prompt_tokens": 8,
            },
            "reward": {"function": "train_rewards:digit_share"},
            "rollout": {
                "prompts_per_step": NUM_GROUPS,
                "group_size": GROUP_SIZE,
                "max_response_tokens": MAX_RESPONSE,
                "fp8_rounding": True,
                "dtype": "fp32",
            },
            "train": {"mini_batches": 2, "micro_batch_tokens": 64},
            "optim": {"lr": 1e-3},
            "log": {"tensorboard": False},
        }

    def rollouts(self, engine: str = "fp8") -> list[Rollout]:
        """The fixed batch, ``engine`` is "fp8" or "fp32": a full step in the order of the sequences."""
        return pickle.loads((self.folder / f"{engine}.pkl").read_bytes())


def make_world(folder: Path) -> World:
    world = World(folder)
    write_tiny_model(
        world.model,
        hidden_size=32,
        num_layers=NUM_MOE_LAYERS + 1,
        num_heads=4,
        num_kv_heads=2,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        expert_width=16,
        dense_layers=(1,),
        max_positions=64,
        initializer_range=0.15,
    )
    write_sort_task(folder / "task", num_train=64, num_heldout=16, num_demonstrations=256, digits=3)
    for name in ("fp8", "fp32"):
        made = sample(world, fp8_rounding=name == "fp8")
        (folder / f"{name}.pkl").write_bytes(pickle.dumps(made))
    return world


def sample(
    world: World,
    *,
    fp8_rounding: bool = False,
    temperature: float = 1.0,
    top_p: float = 1.0,
    max_response_tokens: int = MAX_RESPONSE,
) -> list[Rollout]:
    """A step's rollouts from the local engine."""
    engine = LocalEngine.from_pretrained(world.model, fp8_rounding=fp8_rounding)
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    prompts = load_prompts(
        world.folder / "task" / "train.jsonl",
        tokenizer=tokenizer,
        prompt_field="prompt",
        answer_field="answer",
        chat_template=False,
        max_prompt_tokens=8,
        limit=NUM_GROUPS,
    )
    requests = [
        SampleRequest(prompts[s // GROUP_SIZE].tokens, s // GROUP_SIZE, s % GROUP_SIZE, seed=s)
        for s in range(NUM_SEQUENCES)
    ]
    params = SamplingParams(temperature, top_p, max_response_tokens, (tokenizer.eos_token_id,))
    made = engine.generate(requests, params)
    engine.close()
    return made


def fixed_advantages(seed: int = 0) -> np.ndarray:
    """float64 [NUM_SEQUENCES], of both signs."""
    return np.random.default_rng(seed).normal(size=NUM_SEQUENCES)


@contextmanager
def training(settings: Config) -> Iterator[TrainStep]:
    """A fresh policy with its training step on the ranks there are; the layout is left on the way out."""
    with layout(settings):
        yield TrainStep(settings, Policy(settings, schedule_of(settings)), objective_of(settings))


@contextmanager
def layout(settings: Config) -> Iterator[None]:
    """Megatron's groups for these settings. The ranks stay joined: two rendezvous at one address could mix."""
    distributed.initialize(settings, timeout_s=60.0)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


@dataclass
class Taken:
    """What a step left behind on the main rank."""

    updates: list[dict[str, float]]
    """Metrics of each mini-batch."""
    step: dict[str, float]
    """Metrics of the whole step."""


def prepare(step: TrainStep, rollouts: Sequence[Rollout], advantages: np.ndarray) -> list[MiniBatch]:
    """This rank's share of every mini-batch."""
    owned = owned_sequences(len(rollouts), step.config.train.mini_batches, distributed.dp_rank(), distributed.dp_size())
    return [step.prepare([rollouts[s] for s in part], advantages[part]) for part in owned]


def take_step(
    step: TrainStep, rollouts: Sequence[Rollout], advantages: np.ndarray | None = None, old_pass: bool | None = None
) -> Taken | None:
    """Prepare, old pass (by default only where the trainer runs it), all updates; None except on the main rank."""
    minis = prepare(step, rollouts, fixed_advantages() if advantages is None else advantages)
    if old_pass if old_pass is not None else not step.on_policy:
        for mini in minis:
            step.old_logprobs(mini)
    updates = [collect([step.update(mini)]) for mini in minis]
    whole = collect([mini.metrics for mini in minis])
    return None if whole is None else Taken([finalize(_required(found)) for found in updates], finalize(whole))


def step_on(settings: Config, rollouts: Sequence[Rollout], old_pass: bool | None = None) -> Taken:
    """One step of a fresh policy on one rank."""
    with training(settings) as step:
        taken = take_step(step, rollouts, old_pass=old_pass)
    assert taken is not None
    return taken


def _required(found: dict[str, Stat] | None) -> dict[str, Stat]:
    assert found is not None
    return found


def weights_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in policy.export()}


def hf_config(world: World) -> Any:
    return AutoConfig.from_pretrained(world.model)
