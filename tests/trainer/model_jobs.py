"""What forked ranks run for the tests of single samples' gradients, and of the value head."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from train_world import World, take_step, training, weights_of

from megarl.core.metrics import finalize
from megarl.core.packing import drop_routes
from megarl.core.types import Rollout
from megarl.megatron import distributed
from megarl.trainer.mini_batch import Judged
from megarl.trainer.sampling.gradient_norms import gradient_norms, gradient_variance
from megarl.trainer.sampling.step_rollouts import StepRollouts
from megarl.trainer.sampling.value_head import ValueHead, prompt_features
from megarl.trainer.step import TrainStep

BLOCKS = {
    "embedding": ["model.embed_tokens.weight"],
    "output_layer": ["lm_head.weight"],
    r"layers\.2\.mlp\.router": ["model.layers.2.mlp.gate.weight"],
    r"layers\.(0|3)\.self_attention\.linear_(proj|qkv)\.weight|layers\.1\.mlp\.linear_fc2": [
        *(f"model.layers.{layer}.self_attn.{name}_proj.weight" for layer in (0, 3) for name in "qkvo"),
        "model.layers.1.mlp.down_proj.weight",
    ],
}
"""Names in transformers by block. The last one mixes layers divided by rows and by columns, of both pipeline stages."""


ADVANTAGES = np.array([0.5, -1.0, 0.0, 2.0, 1.0, -0.5, 0.25, 1.5])
REWARDS = np.arange(8) % 3 / 2
"""Of the first eight rollouts."""


@dataclass(frozen=True)
class Case:
    """A model in a layout, and how many of the first rollouts each copy of it holds."""

    overrides: Mapping[str, Any]
    counts: Sequence[int]
    tied: bool = False
    engine: str = "fp32"
    blocks: Sequence[str] = field(default_factory=lambda: tuple(BLOCKS))


def tied_model(world: World) -> Path:
    """The world's model whose output layer is its embedding."""
    folder = world.folder / "tied"
    if not folder.exists():
        shutil.copytree(world.model, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
        for file in folder.glob("*.safetensors"):
            kept = {name: weight for name, weight in load_file(file).items() if name != "lm_head.weight"}
            save_file(kept, file, metadata={"format": "pt"})
    return folder


def case_training(world: World, case: Case) -> AbstractContextManager[TrainStep]:
    model = tied_model(world) if case.tied else world.model
    fixed = {"train__replay": "none", "train__max_k3": "off", "model__path": str(model)}  # rollouts are of world.model
    return training(world.settings(**{**fixed, **case.overrides}))


def rollouts_here(world: World, case: Case) -> list[Rollout]:
    """Those of this model copy; each has its routes on one of the copy's ranks only."""
    first = sum(case.counts[: distributed.dp_rank()])
    mine = world.rollouts(case.engine)[first : first + case.counts[distributed.dp_rank()]]
    group = distributed.model_group()
    return [r if i % group.size() == group.rank() else drop_routes(r) for i, r in enumerate(mine)]


def norms(world: World, cases: Mapping[str, Case]) -> dict[str, dict[str, np.ndarray]]:
    """By case and block, the norms of all copies' rollouts; the ranks of a copy must agree on theirs."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, case in cases.items():
        with case_training(world, case) as step:
            mine = rollouts_here(world, case)
            found[name] = {block: of_all_copies(gradient_norms(step, mine, block)) for block in case.blocks}
    return found


def variances(world: World, cases: Mapping[str, Case]) -> dict[str, dict[str, float]]:
    """By case, the variance of the gradient over the rollouts of all copies, in two mini-batches; equal on all ranks.

    ``ADVANTAGES``, ``REWARDS`` and groups of four are those of the whole step.
    """
    found: dict[str, dict[str, float]] = {}
    for name, case in cases.items():
        with case_training(world, case) as step:
            mine = rollouts_here(world, case)
            first = sum(case.counts[: distributed.dp_rank()])
            parts = [slice(0, len(mine) // 2), slice(len(mine) // 2, len(mine))]
            owned = list(range(first, first + len(mine)))
            judged = Judged(REWARDS, np.arange(len(REWARDS)) // 4, [owned[part] for part in parts])
            advantages = [ADVANTAGES[owned][part] for part in parts]
            rollouts = StepRollouts([mine[part] for part in parts], advantages, judged, {}, None, 0, [])
            found[name] = finalize(gradient_variance(step, rollouts))
            assert all(other == found[name] for other in distributed.gather_objects(found[name])), name
    return found


def of_all_copies(values: np.ndarray) -> np.ndarray:
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (distributed.dp_rank(), values))
    by_copy: dict[int, np.ndarray] = {}
    for copy, of_rank in ranks:
        assert np.array_equal(by_copy.setdefault(copy, of_rank), of_rank), f"ranks of copy {copy} differ"
    return np.concatenate([by_copy[copy] for copy in sorted(by_copy)])


def steps_around(world: World, cases: Mapping[str, Case]) -> dict[str, list[Any]]:
    """By case, a step of a fresh policy without and with gradient norms before it: metrics, and weights after it."""
    found: dict[str, list[Any]] = {}
    for name, case in cases.items():
        found[name] = []
        for looks in (False, True):
            with case_training(world, case) as step:
                if looks:
                    before = [chunk.training for chunk in step.policy.chunks]
                    for block in case.blocks:
                        gradient_norms(step, rollouts_here(world, case), block)
                    assert before == [True] * len(before)
                    assert all(not p.main_grad.any() and p.grad is None for p in parameters_of(step))
                taken = take_step(step, world.rollouts())
                weights = weights_of(step.policy)
                found[name].append((taken, weights))
    return found


def parameters_of(step: TrainStep) -> list[Any]:
    found = [parameter for chunk in step.policy.chunks for parameter in chunk.parameters()]
    assert all(parameter.requires_grad for parameter in found)
    return found


FIRST_TOKENS, RATES = (3, 11), (0.1, 0.9)
NUM_UPDATES = 12


def prompts_and_rates(seed: int, num: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Prompts of 2 to 6 tokens, and their pass rates, which hang on the first token."""
    generator = np.random.default_rng(seed)
    kinds = generator.integers(2, size=num)
    prompts = [generator.integers(16, size=generator.integers(2, 7)).astype(np.int32) for _ in range(num)]
    for prompt, kind in zip(prompts, kinds, strict=True):
        prompt[0] = FIRST_TOKENS[kind]
    return prompts, np.array(RATES)[kinds]


def learn(head: ValueHead, updates: range, num: int = 33) -> list[float]:
    """Updates with pools of 0 to 8 samples of new prompts each time; their losses."""
    losses = []
    for seed in updates:
        prompts, rates = prompts_and_rates(100 + seed, num)
        generator = np.random.default_rng(200 + seed)
        samples = generator.integers(9, size=num)
        losses.append(head.update(prompts, samples, generator.binomial(samples, rates)))
    return losses


def heads(world: World, cases: Mapping[str, Case]) -> dict[str, dict[str, Any]]:
    """By case: features of a few prompts and of one, and what a head has learned; equal on all ranks."""
    found: dict[str, dict[str, Any]] = {}
    for name, case in cases.items():
        with case_training(world, case) as step:
            prompts, _ = prompts_and_rates(0, 7)
            head = ValueHead(step.policy, micro_batch_tokens=16)
            mine = {
                "features": prompt_features(step.policy, prompts, 16).numpy(),
                "one": prompt_features(step.policy, prompts[:1], 16).numpy(),
                "before": head.rates(prompts),
                "losses": np.array(learn(head, range(NUM_UPDATES))),
                "rates": head.rates(prompts_and_rates(1, 64)[0]),
            }
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, (mine, head.state_dict()))
            for of_rank, state in ranks:
                assert state == head.state_dict(), f"{name}: ranks hold different heads"
                assert all(np.array_equal(of_rank[key], mine[key]) for key in mine), name
            found[name] = mine
    return found
