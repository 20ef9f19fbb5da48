"""Checkpoints of a run in Megatron's torch_dist format: saved, found and loaded again.

A checkpoint is a folder ``step_<n>``. It is written as ``step_<n>.partial`` and renamed when every rank is done, so a
folder under its final name is complete. Model weights load in any layout; optimizer state does not load from ep = 1
into ep > 1 or back, because Megatron stores experts apart with ep > 1.
"""

from __future__ import annotations

import errno
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from megarl.data.files import sync_folder
from megarl.data.pickles import require_plain
from megarl.errors import CheckpointError
from megarl.megatron.checkpoints.state import (
    group_multipliers,
    restore_rng,
    run_state,
    separate_adam_steps,
    sharded_state,
    sharded_weights,
)
from megarl.megatron.checkpoints.versions import checkpoint_metadata, results_queue
from megarl.megatron.distributed import is_collective_error, is_main_rank
from megarl.megatron.model import unwrap
from megarl.megatron.policy import Policy
from megarl.models.shapes import ModelShape

_NAME = re.compile(r"step_(\d+)")
# CheckpointException is torch's: a BaseException, no Exception.
WRITE_ERRORS = (dist_checkpointing.core.CheckpointingException, CheckpointException, OSError, RuntimeError)
# AttributeError comes from a bug in Megatron, where common.pt is missing.
_READ_ERRORS = (*WRITE_ERRORS, AssertionError, AttributeError, EOFError, KeyError, UnpicklingError, ValueError)
"""What Megatron and torch raise for a damaged or foreign checkpoint."""
_UNREACHABLE = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EREMOTEIO)
"""Errors of a network file system that is away."""


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of every complete checkpoint in ``folder``, oldest first."""
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted((int(match[1]), path) for path in entries if (match := _NAME.fullmatch(path.name)))


def save(folder: Path, step: int, policy: Policy, loop: Mapping[str, Any], keep: int) -> Path:
    """Write checkpoint ``step``, then remove all but the newest ``keep``; a collective call.

    ``loop`` is what the training loop needs to resume: small, equal on all ranks, and plain data.
    """
    path = clear_partial(folder, step)
    if filesystem_async._results_queue is None:
        # A blocking save needs no server process to collect its results. Megatron's costs seconds to start, and
        # outlives a trainer that is killed.
        filesystem_async._results_queue = results_queue()
    state = run_state(policy, step, loop)
    dist_checkpointing.save(state, str(partial_folder(path)), **checkpoint_metadata("content_metadata"))
    dist.barrier()
    publish(path, keep)
    return path


def partial_folder(path: Path) -> Path:
    """The folder in which checkpoint ``path`` is written before it is complete."""
    return path.with_name(f"{path.name}.partial")


def clear_partial(folder: Path, step: int) -> Path:
    """Make an empty partial folder for checkpoint ``step`` and return the final path; a collective call."""
    path = folder / f"step_{step:07d}"
    if is_main_rank():
        for stale in (path, *folder.glob("step_*.partial")):
            shutil.rmtree(stale, ignore_errors=True)
        partial_folder(path).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return path


def publish(path: Path, keep: int) -> None:
    """Rename a written checkpoint to its final name, and remove all but the newest ``keep``; a collective call."""
    if is_main_rank():
        partial_folder(path).rename(path)
        sync_folder(path.parent)
        for _, old in complete_checkpoints(path.parent)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()


def load(path: Path, policy: Policy) -> dict[str, Any]:
    """Restore a checkpoint into ``policy`` and the random generators; returns the loop state. A collective call.

    Random states are restored only on as many ranks as wrote them; in another layout they keep their seeds.
    """
    written = _read_loop(path, policy.shape)
    same_world = written["world_size"] == dist.get_world_size()
    advice = (
        f". It is damaged, or was written with a layout that this one cannot read ({written['layout']}): Megatron's "
        "optimizer state does not move between ep = 1 and ep > 1"
    )
    with _explain_errors(path, "does not load into this run", advice):
        wanted = sharded_state(policy, is_loading=True)
        if not same_world:
            del wanted["rng"]
        state = _read(wanted, path)
        _load_chunks(policy.chunks, state)
        multipliers = group_multipliers(policy.optimizer)
        policy.optimizer.load_state_dict(state["optimizer"])
        for group, own in zip(policy.optimizer.param_groups, multipliers, strict=True):
            group.update(own)
        separate_adam_steps(policy.optimizer)
        policy.scheduler.load_state_dict(state["scheduler"])
    if same_world:
        restore_rng(state["rng"])
    return state["loop"]


def load_weights(path: Path, chunks: Sequence[torch.nn.Module], shape: ModelShape) -> int:
    """Restore the weights alone, in any layout; returns the checkpoint's step. A collective call, without optimizer."""
    step = int(_read_loop(path, shape)["step"])
    read_weights(path, chunks)
    return step


def read_weights(path: Path, chunks: Sequence[torch.nn.Module]) -> None:
    """Restore the weights from a ``torch_dist`` checkpoint that has them under the model's names; a collective call."""
    advice = ". It is damaged, or was written with settings that change the parameters"
    with _explain_errors(path, "does not load", advice):
        require_plain(path)
        _load_chunks(chunks, _read(sharded_weights(chunks), path))


def _load_chunks(chunks: Sequence[torch.nn.Module], state: Mapping[str, Any]) -> None:
    for index, chunk in enumerate(chunks):
        unwrap(chunk).load_state_dict(state[f"model{index}"])


def _read_loop(path: Path, shape: ModelShape) -> dict[str, Any]:
    """The loop state of a checkpoint; CheckpointError if it is incomplete or of another model."""
    with _explain_errors(path, "is not a complete checkpoint"):
        require_plain(path)
        loop = dist_checkpointing.load_common_state_dict(str(path))["loop"]
        written_by, _, _ = loop["model"], loop["layout"], loop["world_size"]
    expected = shape.describe()
    for key in sorted({*written_by, *expected}):
        if written_by.get(key) != expected.get(key):
            raise CheckpointError(
                f"{path} is of another model: {key} is {written_by.get(key)!r}, expected {expected.get(key)!r}; "
                "remove it, choose another run.dir, or set model.path back"
            )
    return loop


@contextmanager
def _explain_errors(path: Path, what: str, advice: str = "") -> Iterator[None]:
    """Turn an error of reading into a CheckpointError, unless it is no fault of the checkpoint."""
    try:
        yield
    except _READ_ERRORS as error:
        _raise_unless_damage(error)
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} {what}: {type(error).__name__}: {reason[-300:]}{advice}") from error


def _raise_unless_damage(error: BaseException) -> None:
    """Re-raise errors that are no fault of the checkpoint: a rank that died, a file system that is away."""
    wrapped = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    for cause in wrapped:
        if (isinstance(cause, OSError) and cause.errno in _UNREACHABLE) or is_collective_error(cause):
            raise cause


def _read(wanted: dict[str, Any], path: Path) -> Any:
    with warnings.catch_warnings():
        # Megatron calls a torch function under its old name; a user cannot change that.
        warnings.filterwarnings("ignore", message="`load_state_dict` is deprecated", category=FutureWarning)
        return dist_checkpointing.load(wanted, str(path))
