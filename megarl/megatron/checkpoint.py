"""Checkpoints of a run in Megatron's torch_dist format: model, optimizer, schedule, random states, loop state.

A checkpoint is a folder ``step_<n>``. It is written beside its name and renamed when every rank is done, so a folder
under its name is complete, whatever killed the writer. Model and optimizer load in any layout.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megarl.errors import CheckpointError
from megarl.megatron.distributed import is_main_rank
from megarl.megatron.policy import Policy
from megarl.megatron.weights import unwrap

_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
_NAME = re.compile(r"step_(\d+)")


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of every complete checkpoint in ``folder``, oldest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted(found)


def save(folder: Path, step: int, policy: Policy, loop: Mapping[str, Any], keep: int) -> Path:
    """Write checkpoint ``step``, then remove all but the newest ``keep``; a collective call.

    ``loop`` is small, equal on all ranks and plain (numbers, strings, lists, dicts): what the training loop needs to
    go on.
    """
    path = folder / f"step_{step:07d}"
    partial = folder / f"{path.name}.partial"
    if is_main_rank():
        for stale in (partial, path):
            shutil.rmtree(stale, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state = _sharded_state(policy, is_loading=False)
    state["loop"] = {**loop, "step": step, "world_size": dist.get_world_size()}
    dist_checkpointing.save(state, str(partial), content_metadata=_METADATA)
    dist.barrier()
    if is_main_rank():
        partial.rename(path)
        for _, old in complete_checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return path


def load(path: Path, policy: Policy) -> dict[str, Any]:
    """Restore a checkpoint into ``policy`` and the random generators; returns the loop state. A collective call.

    Random states are restored only on as many ranks as wrote them; in another layout they keep their seeds.
    """
    try:
        common = dist_checkpointing.load_common_state_dict(str(path))
        same_world = common["loop"]["world_size"] == dist.get_world_size()
        wanted = _sharded_state(policy, is_loading=True)
        if not same_world:
            del wanted["rng"]
        state = dist_checkpointing.load(wanted, str(path))
    except (dist_checkpointing.core.CheckpointingException, KeyError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} does not load into this model: {error}") from error
    for index, chunk in enumerate(policy.chunks):
        unwrap(chunk).load_state_dict(state[f"model{index}"])
    policy.optimizer.load_state_dict(state["optimizer"])
    policy.scheduler.load_state_dict(state["scheduler"])
    if same_world:
        _restore_rng(state["rng"])
    return state["loop"]


def _sharded_state(policy: Policy, is_loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {
        f"model{index}": unwrap(chunk).sharded_state_dict(metadata=_METADATA)
        for index, chunk in enumerate(policy.chunks)
    }
    models = {key: value for chunk in state.values() for key, value in chunk.items()} if len(state) == 1 else state
    state["optimizer"] = policy.optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=_METADATA)
    state["scheduler"] = policy.scheduler.state_dict()
    rank, world = dist.get_rank(), dist.get_world_size()
    state["rng"] = ShardedObject("rng", _rng(), (world,), (rank,), replica_id=0)
    return state


def _rng() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def _restore_rng(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
