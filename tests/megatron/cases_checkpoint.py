"""Cases that run on several ranks: interrupted runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from cases_training import forward_backward
from saves import save
from tiny_world import MODELS, config, exported, local_batch, policy_of

from megarl.config import Config
from megarl.megatron.checkpoints import checkpoint
from megarl.megatron.policy import Policy

SCHEDULE: dict[str, Any] = {
    "optim__decay_style": "linear",
    "optim__warmup_steps": 1,
    "optim__decay_steps": 6,
    "optim__min_lr": 1e-4,
    "optim__weight_decay": 0.01,
}


def train(policy: Policy, settings: Config, steps: range) -> list[tuple[float, float, float]]:
    """(loss, gradient norm, learning rate) of each step; every step has its own batch."""
    found = []
    for step in steps:
        loss, _ = forward_backward(policy, settings, local_batch(seed=step))
        found.append((loss, *policy.optimizer_step()))
    return found


def interrupted(layout: dict[str, int], then: str = "", name: str = "resume", **overrides: Any) -> dict[str, Any]:
    """Four steps in one go; two, a checkpoint, a fresh policy (in layout ``then``), the checkpoint, two more."""
    overrides = {**SCHEDULE, **overrides}
    settings = config(MODELS / "base", layout, **overrides)
    policy = policy_of(settings)
    straight = train(policy, settings, range(4))
    straight_weights = exported(policy)

    policy = policy_of(settings)
    train(policy, settings, range(2))
    folder = Path(f"{name}-{'-'.join(layout)}-{then.replace(' ', '-')}")
    path = save(folder, 2, policy, {"position": 7}, keep=2)
    saved_weights = exported(policy)

    other = {part[:-1]: int(part[-1]) for part in then.split()} if then else layout
    settings = config(MODELS / "base", other, **{**overrides, "run__seed": 99})
    policy = policy_of(settings)
    loop = checkpoint.load(path, policy)
    loaded_weights = exported(policy)
    resumed = train(policy, settings, range(2, 4))
    return {
        "straight": straight,
        "straight_weights": straight_weights,
        "saved_weights": saved_weights,
        "loaded_weights": loaded_weights,
        "resumed": resumed,
        "resumed_weights": exported(policy),
        "loop": loop,
        "folder": sorted(entry.name for entry in folder.iterdir()),
    }


def verdicts(layout: dict[str, int]) -> dict[str, set[str]]:
    """What the ranks say about a checkpoint as it was saved, and with one byte changed in each of its files in turn."""
    path = save(Path("verdicts"), 1, policy_of(config(MODELS / "base", layout)), {}, keep=1)
    found = {"": _said(path)}
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:
            file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        dist.barrier()
        found[file.name] = _said(path)
        if dist.get_rank() == 0:
            file.write_bytes(whole)
    return found


def _said(path: Path) -> set[str]:
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, checkpoint.find_damage(path) or "")
    return set(found)
