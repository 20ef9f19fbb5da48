"""What the trainer's tests share: a tiny model with its task, settings, fixed rollouts, and a step taken on them."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from local_engines import local_engine
from megatron.core import parallel_state, tensor_parallel
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import megarl.trainer.step as train_step
from megarl.config import Config
from megarl.config.file import parse
from megarl.config.tables.data import DataConfig
from megarl.core.choices.parts import NON_NEGATIVE_ADVANTAGES, Objective
from megarl.core.choices.table import OBJECTIVES
from megarl.core.metrics import Stat, finalize
from megarl.core.types import Rollout, SampleRequest
from megarl.data.prompts import load_prompts
from megarl.data.tiny import write_sort_task, write_tiny_model
from megarl.engines.protocol import SamplingParams
from megarl.megatron import distributed
from megarl.megatron.passes import forward
from megarl.megatron.policy import Policy, schedule_of
from megarl.run.folder import claim
from megarl.run.metrics_log import MetricsLog
from megarl.run.stop_request import StopRequest
from megarl.run.vitals import Vitals
from megarl.trainer.loop import Trainer
from megarl.trainer.mini_batch import Judged, MiniBatch, StepPlan
from megarl.trainer.sampling.assignment import split_sequences
from megarl.trainer.step import TrainStep

NUM_GROUPS, GROUP_SIZE, MAX_RESPONSE = 8, 4, 8
NUM_SEQUENCES = NUM_GROUPS * GROUP_SIZE
NUM_MOE_LAYERS, NUM_EXPERTS, TOP_K = 3, 8, 2


def penalised(estimator: str, coef: float = 0.2) -> dict[str, Any]:
    """Overrides that add a penalty to the reference."""
    return {"penalties": [{"estimator": estimator, "coef": coef}]}


ROWS: dict[str, dict[str, Any]] = {
    **{name: {"train__objective": name} for name, row in OBJECTIVES.items() if not row.needs_topk},
    **{
        f"{name} {kl}": {"train__objective": name, "train__objective_overrides": penalised(kl)}
        for name, kl in (("grpo", "k1"), ("gspo", "k2"), ("minirl", "k3"), ("deepseek_v32", "unbiased"))
    },
    "kl_grpo strong": {"train__objective": "kl_grpo", "train__objective_overrides": {"kl_coef": 1.0}},
    "kl_grpo current": {
        "train__objective": "kl_grpo",
        "train__objective_overrides": {"kl_coef": 1.0, "kl_at": "theta"},
    },
    # Its own bounds are those of equal precision; the engine's weights are rounded here.
    "geo_rs": {
        "train__objective": "geo_rs",
        "train__objective_overrides": {"masks": {"1": {"low": 0.99, "high": 1.01}}},
    },
    "mis_po": {
        "train__objective": "mis_po",
        "train__objective_overrides": {"masks": {"1": {"low": 0.99, "high": 1.01}}},
    },
    # So little that some tokens are beyond it, of engines that differ by little.
    "ipo": {"train__objective": "ipo", "train__objective_overrides": {"masks": {"0": {"high": 2e-3}}}},
    "cppo": {
        "train__objective": "cppo",
        "train__objective_overrides": {"masks": {"0": {"high": 2e-3, "budget": 1e-4}}},
    },
    "m2po": {"train__objective": "m2po", "train__objective_overrides": {"masks": {"0": {"high": 2e-5}}}},
    "grpo entropy": {"train__objective": "grpo", "train__objective_overrides": {"entropy_coef": 0.01}},
    "minirl normalized": {
        "train__objective": "minirl",
        "train__objective_overrides": {"factors": {"0": {"batch_normalize": True}}},
    },
    "adaptive theta/mu": {
        "train__objective": "adaptive_power",
        "train__objective_overrides": {"factors": {"0": {"policies": "theta_mu", "ess_target": 0.95}}},
    },
    "adaptive old/mu": {
        "train__objective": "adaptive_power",
        "train__objective_overrides": {"factors": {"0": {"policies": "old_mu", "ess_target": 0.9999}}},
    },
}
"""Settings of every row of the table, and of variants that need a reference or a pass over the whole mini-batch."""


@dataclass(frozen=True)
class World:
    """A folder with ``model`` (4 layers, the second dense), ``reference`` (the same but for noise), ``task``, and
    rollouts of both kinds of engine."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def reference(self) -> Path:
        return self.folder / "reference"

    def settings(self, **overrides: Any) -> Config:
        """A configuration of this world; ``overrides`` are dotted keys with ``__`` for the dot."""
        return parse(self.table(), {key.replace("__", "."): value for key, value in overrides.items()})

    def table(self) -> dict[str, Any]:
        task = self.folder / "task"
        return {
            "run": {"steps": 2, "seed": 3, "dir": str(self.folder / "unused")},
            "model": {"path": str(self.model), "dtype": "fp32", "reference": str(self.reference)},
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
            "log": {"sinks": []},
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
    _write_reference(world)
    write_sort_task(folder / "task", num_train=64, num_heldout=16, num_demonstrations=256, digits=3)
    for name in ("fp8", "fp32"):
        made = sample(world, fp8_rounding=name == "fp8")
        (folder / f"{name}.pkl").write_bytes(pickle.dumps(made))
    return world


def _write_reference(world: World) -> None:
    shutil.copytree(world.model, world.reference)
    generator = torch.Generator().manual_seed(5)
    for file in world.reference.glob("*.safetensors"):
        weights = load_file(file)
        noisy = {name: w + 0.02 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
        save_file(noisy, file, metadata={"format": "pt"})


def sample(
    world: World,
    *,
    fp8_rounding: bool = False,
    temperature: float = 1.0,
    top_p: float = 1.0,
    max_response_tokens: int = MAX_RESPONSE,
    routes: bool = True,
    max_kept_ids: int | None = None,
) -> list[Rollout]:
    """A step's rollouts from the local engine."""
    engine = local_engine(world.model, fp8_rounding=fp8_rounding)
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    data = DataConfig(train=str(world.folder / "task" / "train.jsonl"))
    prompts = load_prompts(data, tokenizer, limit=NUM_GROUPS)
    requests = [
        SampleRequest(prompts[s // GROUP_SIZE].tokens, s // GROUP_SIZE, s % GROUP_SIZE, seed=s)
        for s in range(NUM_SEQUENCES)
    ]
    ends = (tokenizer.eos_token_id,)
    limits = max_response_tokens, ends
    params = SamplingParams(temperature, top_p, *limits, routes, max_kept_ids, return_gate_weights=routes)
    made = engine.generate(requests, params)
    engine.close()
    return made


def fixed_advantages(objective: Objective | None = None) -> np.ndarray:
    """float64 [NUM_SEQUENCES], of both signs where the objective can have them."""
    values = np.random.default_rng(0).normal(size=NUM_SEQUENCES)
    return np.abs(values) if objective and objective.advantage in NON_NEGATIVE_ADVANTAGES else values


@contextmanager
def training(settings: Config) -> Iterator[TrainStep]:
    """A fresh policy with its training step on the ranks there are."""
    with layout(settings):
        yield TrainStep(settings, Policy(settings, schedule_of(settings)), settings.train.resolved_objective)


@contextmanager
def layout(settings: Config) -> Iterator[None]:
    """Megatron's groups for these settings; a process of one rank keeps them.

    Autograd's hooks tie models, and with them groups and 50 threads of gloo, into cycles that Python cannot collect.
    """
    if parallel_state.model_parallel_is_initialized() and dist.get_world_size() == 1:
        settings.check_world_size(1)
        torch.manual_seed(settings.run.seed)
        tensor_parallel.model_parallel_cuda_manual_seed(settings.run.seed + 1)
        yield
        return
    distributed.initialize(settings, timeout_s=600.0)
    try:
        yield
    finally:
        if dist.get_world_size() > 1:
            distributed.leave_layout()


@dataclass
class Taken:
    """What a step left behind on the main rank."""

    updates: list[dict[str, float]]
    """Metrics of each mini-batch."""
    step: dict[str, float]
    """Metrics of the whole step."""
    coefficients: list[dict[int, np.ndarray]] = field(compare=False)
    """Of each mini-batch: [t] by sequence, from all ranks."""


def owned_by_this_rank(step: TrainStep) -> list[list[int]]:
    return split_sequences(NUM_SEQUENCES, step.config.train.mini_batches, distributed.dp_rank(), distributed.dp_size())


class Going:
    """A step under way on fixed rollouts: ``minis`` are this rank's share, as the latest pass has left them."""

    def __init__(
        self,
        step: TrainStep,
        rollouts: Sequence[Rollout],
        rewards: np.ndarray | None = None,
        groups: np.ndarray | None = None,
        *,
        old_pass: bool = False,
        **plan: Any,
    ) -> None:
        """rewards: also the advantages, unless the objective computes them; by default random, of both signs.

        old_pass: run the old-log-prob pass over all mini-batches, also where the first update does without; plan:
        fields of the plan that differ from the configuration's.
        """
        self.step, self.owned = step, owned_by_this_rank(step)
        planned = StepPlan.of(step.config, step.config.run.steps)
        if old_pass:
            plan["old_passes"] = len(self.owned)
        self.plan = replace(planned, **plan)
        rewards = fixed_advantages(step.objective) if rewards is None else rewards
        groups = np.repeat(np.arange(NUM_GROUPS), GROUP_SIZE) if groups is None else groups
        self.judged = Judged(rewards, groups, self.owned)
        advantages = np.zeros_like(rewards) if step.objective.advantage == "token_level_kl" else rewards
        self.minis = [step.prepare([rollouts[s] for s in rows], advantages[rows]) for rows in self.owned]

    def look(self) -> Self:
        """Run all passes before the updates."""
        self.minis = self.step.look(self.plan, self.minis, self.judged)
        return self

    def old_pass(self, index: int) -> None:
        self.minis[index] = self.step.old_pass(self.plan, self.minis[index])

    def update(self, index: int) -> dict[str, Stat]:
        self.minis, statistics = self.step.update(self.plan, self.minis, index, self.judged)
        return statistics

    def collect_update(self, index: int) -> dict[str, float] | None:
        """The metrics of an update on the main rank."""
        statistics = distributed.collect([self.update(index)])
        return None if statistics is None else finalize(statistics)

    def collect_step(self) -> dict[str, float] | None:
        """The metrics of the whole step on the main rank."""
        statistics = distributed.collect([mini.statistics for mini in self.minis])
        return None if statistics is None else finalize(statistics)


def old_logprobs(mini: MiniBatch) -> list[torch.Tensor]:
    """Of the first pass, which has been."""
    assert mini.first is not None
    return mini.first.logprobs


@contextmanager
def counted_passes() -> Iterator[list[None]]:
    """One entry for each pass over a mini-batch."""
    counts: list[None] = []
    run = forward.run

    def counted(*arguments: Any, **options: Any) -> Any:
        counts.append(None)
        return run(*arguments, **options)

    forward.run = counted
    try:
        yield counts
    finally:
        forward.run = run


def take_step(
    step: TrainStep,
    rollouts: Sequence[Rollout],
    rewards: np.ndarray | None = None,
    groups: np.ndarray | None = None,
    **plan: Any,
) -> Taken | None:
    """Prepare, passes before the updates, all updates, as ``Going``; None except on the main rank."""
    going = Going(step, rollouts, rewards, groups, **plan).look()
    updates, weights = [], []
    for index, owned in enumerate(going.owned):
        with _tapped_coefficients() as seen:
            updates.append(going.collect_update(index))
        weights.append(_of_all_ranks(going.minis[index], owned, seen))
    whole = going.collect_step()
    return None if whole is None else Taken([update for update in updates if update is not None], whole, weights)


@contextmanager
def _tapped_coefficients() -> Iterator[list[np.ndarray]]:
    """What the objective hands to the loss, one [T] per micro-batch."""
    seen: list[np.ndarray] = []
    original = train_step.coefficients

    def tapped(*arguments: Any, **options: Any) -> Any:
        found = original(*arguments, **options)
        seen.append(found.values.detach().cpu().numpy().copy())
        return found

    train_step.coefficients = tapped
    try:
        yield seen
    finally:
        train_step.coefficients = original


def _of_all_ranks(mini: MiniBatch, owned: Sequence[int], seen: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
    """By sequence; ranks that hold the same sequence must have computed the very same."""
    mine: dict[int, np.ndarray] = {}
    latest = seen[-len(mini.micro_batches) :]  # a mini-batch is weighed twice if tripwires drop a sequence
    for micro, values in zip(mini.micro_batches, latest, strict=bool(seen)):
        parts = np.split(values, micro.batch.cu_seqlens[1:-1].tolist())
        mine.update({owned[local]: part for local, part in zip(micro.sequences, parts, strict=True)})
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    merged: dict[int, np.ndarray] = {}
    for of_rank in ranks:
        for sequence, part in of_rank.items():
            assert np.array_equal(merged.setdefault(sequence, part), part), f"ranks differ on sequence {sequence}"
    return merged


def step_on(settings: Config, rollouts: Sequence[Rollout], old_pass: bool = False) -> Taken:
    """One step of a fresh policy on one rank."""
    with training(settings) as step:
        taken = take_step(step, rollouts, old_pass=old_pass)
    assert taken is not None
    return taken


def weights_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in policy.export()}


def trainer_of(settings: Config) -> Trainer:
    """A trainer as ``train`` makes it, in this process alone."""
    folder = settings.run_dir
    claim(settings)
    vitals = Vitals(folder, 0, 1, steps=settings.run.steps, hang_s=settings.log.hang_s)
    return Trainer(settings, MetricsLog(folder), vitals, StopRequest())
