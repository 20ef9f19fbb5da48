"""What forked ranks run for the tests of single samples' gradients."""

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

from megarl.core.packing import drop_routes
from megarl.core.types import Rollout
from megarl.megatron import distributed
from megarl.trainer.sampling.gradient_norms import gradient_norms
from megarl.trainer.step import TrainStep

BLOCKS = {
    "embedding": ["model.embed_tokens.weight"],
    "output_layer": ["lm_head.weight"],
}
"""Names in transformers by block."""


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
