"""Checkpoints of a run in Megatron's torch_dist format: model, optimizer, schedule, random states, loop state.

A checkpoint is a folder ``step_<n>``. It is written beside its name and renamed when every rank is done, so a folder
under its name is complete, whatever killed the writer. Model weights load in any
layout; optimizer state in any with the same kind of experts (ep = 1 or ep > 1), as Megatron stores them apart.
"""

from __future__ import annotations

import errno
import random
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from megarl.data.files import sync_folder
from megarl.errors import CheckpointError
from megarl.megatron.checkpoints.versions import checkpoint_metadata, results_queue
from megarl.megatron.distributed import is_collective_error, is_main_rank
from megarl.megatron.model import unwrap
from megarl.megatron.policy import Policy
from megarl.megatron.versions import for_stage
from megarl.models.shapes import ModelShape

_NAME = re.compile(r"step_(\d+)")
_READ_ERRORS = (
    dist_checkpointing.core.CheckpointingException,
    CheckpointException,  # torch's, and no Exception but a BaseException
    AssertionError,
    AttributeError,  # Megatron's own slip on the way to saying that common.pt is missing
    EOFError,
    KeyError,
    OSError,
    RuntimeError,
    UnpicklingError,
    ValueError,
)
"""What a damaged or foreign checkpoint makes Megatron and torch raise."""
WRITE_ERRORS = (dist_checkpointing.core.CheckpointingException, CheckpointException, OSError, RuntimeError)
_AWAY = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EREMOTEIO)
"""Of a file system over a network."""


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
    path = cleared(folder, step)
    _write(whole_state(policy, step, loop), partial_folder(path))
    publish(path, keep)
    return path


def partial_folder(path: Path) -> Path:
    """Where a checkpoint is written before it has its name."""
    return path.with_name(f"{path.name}.partial")


def cleared(folder: Path, step: int) -> Path:
    """The path of checkpoint ``step``; its partial folder is there and empty. A collective call."""
    path = folder / f"step_{step:07d}"
    if is_main_rank():
        for stale in (path, *folder.glob("step_*.partial")):
            shutil.rmtree(stale, ignore_errors=True)
        partial_folder(path).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return path


def whole_state(policy: Policy, step: int, loop: Mapping[str, Any]) -> dict[str, Any]:
    """All that a checkpoint holds, in Megatron's sharded form."""
    state = _sharded_state(policy, is_loading=False)
    state["loop"] = {
        **loop,
        "step": step,
        "world_size": dist.get_world_size(),
        "layout": _layout(policy),
        "model": policy.shape.describe(),
    }
    return state


def publish(path: Path, keep: int) -> None:
    """Give a written checkpoint its name and remove all but the newest ``keep``; a collective call."""
    if is_main_rank():
        partial_folder(path).rename(path)
        sync_folder(path.parent)
        for _, old in complete_checkpoints(path.parent)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()


def write_weights(path: Path, chunks: Sequence[torch.nn.Module]) -> None:
    """Write the weights alone as a ``torch_dist`` checkpoint into ``path``, an empty folder; a collective call."""
    _write(_sharded_weights(chunks), path)


def _write(state: dict[str, Any], path: Path) -> None:
    if filesystem_async._results_queue is None:
        # A save that is waited for needs no server process to collect its results: Megatron's costs seconds and
        # outlives a trainer that is killed.
        filesystem_async._results_queue = results_queue()
    dist_checkpointing.save(state, str(path), **checkpoint_metadata("content_metadata"))
    dist.barrier()


def load(path: Path, policy: Policy) -> dict[str, Any]:
    """Restore a checkpoint into ``policy`` and the random generators; returns the loop state. A collective call.

    Random states are restored only on as many ranks as wrote them; in another layout they keep their seeds.
    """
    written = _written(path, policy.shape)
    layout = written["layout"]
    try:
        same_world = written["world_size"] == dist.get_world_size()
        wanted = _sharded_state(policy, is_loading=True)
        if not same_world:
            del wanted["rng"]
        state = _read(wanted, path)
        for index, chunk in enumerate(policy.chunks):
            unwrap(chunk).load_state_dict(state[f"model{index}"])
        multipliers = _multipliers(policy.optimizer)
        policy.optimizer.load_state_dict(state["optimizer"])
        for group, own in zip(policy.optimizer.param_groups, multipliers, strict=True):
            group.update(own)
        _separate_adam_steps(policy.optimizer)
        policy.scheduler.load_state_dict(state["scheduler"])
    except _READ_ERRORS as error:
        _raise_unless_damage(error)
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{path} does not load into this run: {type(error).__name__}: {reason[-300:]}. It is damaged, or was "
            f"written with a layout that this one cannot read ({layout}): Megatron's optimizer state does not move "
            "between ep = 1 and ep > 1"
        ) from error
    if same_world:
        _restore_rng(state["rng"])
    return state["loop"]


def load_weights(path: Path, chunks: Sequence[torch.nn.Module], shape: ModelShape) -> int:
    """Restore the model's weights alone, in any layout; returns the checkpoint's step. A collective call.

    No optimizer is needed: what else the checkpoint holds is not read.
    """
    step = int(_written(path, shape)["step"])
    read_weights(path, chunks)
    return step


def read_weights(path: Path, chunks: Sequence[torch.nn.Module]) -> None:
    """Restore the weights from a ``torch_dist`` checkpoint that has them under the model's names; a collective call."""
    try:
        state = _read(_sharded_weights(chunks), path)
        for index, chunk in enumerate(chunks):
            unwrap(chunk).load_state_dict(state[f"model{index}"])
    except _READ_ERRORS as error:
        _raise_unless_damage(error)
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{path} does not load: {type(error).__name__}: {reason[-300:]}. It is damaged, or was written with "
            "settings that change the parameters"
        ) from error


def _written(path: Path, shape: ModelShape) -> dict[str, Any]:
    """The loop state of a checkpoint; CheckpointError if it is incomplete or of another model."""
    try:
        loop = dist_checkpointing.load_common_state_dict(str(path))["loop"]
        written_by, _ = loop["model"], loop["layout"]
    except _READ_ERRORS as error:
        _raise_unless_damage(error)
        raise CheckpointError(f"{path} is not a complete checkpoint: {type(error).__name__}: {error}") from error
    _refuse_other_model(path, written_by, shape.describe())
    return loop


def _raise_unless_damage(error: BaseException) -> None:
    """A rank that died meanwhile and a file system that is away are no fault of the checkpoint: both pass."""
    wrapped = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    for cause in wrapped:
        if (isinstance(cause, OSError) and cause.errno in _AWAY) or is_collective_error(cause):
            raise cause


def _read(wanted: dict[str, Any], path: Path) -> Any:
    with warnings.catch_warnings():
        # Megatron's own call of a torch function under its old name, of which a user can do nothing.
        warnings.filterwarnings("ignore", message="`load_state_dict` is deprecated", category=FutureWarning)
        return dist_checkpointing.load(wanted, str(path))


def _sharded_weights(chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    state = {}
    for index, chunk in enumerate(chunks):
        for_stage(index if len(chunks) > 1 else None)  # by which 0.12 names the layers
        state[f"model{index}"] = unwrap(chunk).sharded_state_dict(**checkpoint_metadata())
    return state


def _sharded_state(policy: Policy, is_loading: bool) -> dict[str, Any]:
    state = _sharded_weights(policy.chunks)
    _allocate_adam_state(policy.optimizer)
    models = {key: value for chunk in state.values() for key, value in chunk.items()} if len(state) == 1 else state
    state["optimizer"] = policy.optimizer.sharded_state_dict(models, is_loading=is_loading, **checkpoint_metadata())
    state["scheduler"] = policy.scheduler.state_dict()
    rank, world = dist.get_rank(), dist.get_world_size()
    state["rng"] = ShardedObject("rng", _rng(), (world,), (rank,), replica_id=0)
    return state


def _torch_adam_states(optimizer: Any) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """(parameter, its state) of every torch Adam inside Megatron's optimizer; none where a fused Adam is installed."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, torch.optim.Adam):
            for group in part.optimizer.param_groups:
                yield from ((parameter, part.optimizer.state[parameter]) for parameter in group["params"])


def _allocate_adam_state(optimizer: Any) -> None:
    """torch's Adam makes its state in the first step; Megatron reads it to know what to save or load."""
    for parameter, state in _torch_adam_states(optimizer):
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)


def _separate_adam_steps(optimizer: Any) -> None:
    """Megatron's distributed optimizer loads one step tensor into all parameters; each would advance it for all."""
    for _, state in _torch_adam_states(optimizer):
        state["step"] = state["step"].clone()


def _multipliers(optimizer: Any) -> list[dict[str, Any]]:
    """What each group says about its parameters. Before 0.14 rank 0 saves its own for all, and their order differs."""
    names = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
    return [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]


def _refuse_other_model(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for key in sorted({*found, *expected}):
        if found.get(key) != expected.get(key):
            raise CheckpointError(
                f"{path} is of another model: {key} is {found.get(key)!r}, expected {expected.get(key)!r}; "
                "remove it, choose another run.dir, or set model.path back"
            )


def _layout(policy: Policy) -> str:
    parallel = policy.config.parallel
    return (
        f"tp {parallel.tp} pp {parallel.pp} ep {parallel.ep} etp {parallel.expert_tp} on {dist.get_world_size()} ranks"
    )


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
