"""Process groups of a run: torch.distributed and Megatron's parallel state, on CUDA or on CPU."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megarl.config import Config
from megarl.core.metrics import Stat, merge
from megarl.core.rollout_codec import decode_rollouts, encode_rollouts
from megarl.core.types import Rollout
from megarl.errors import ConfigError, MegarlError, PeerError, RolloutError

Result = TypeVar("Result")

_OF_A_COLLECTIVE = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe")


def initialize(config: Config, timeout_s: float | None = None) -> None:
    """Join the other ranks (torchrun's environment; alone without it), then lay out and seed Megatron's groups.

    gloo on a CPU, NCCL on GPUs; ``timeout_s`` is by default ``config.collective_timeout_s``. A layout that does not
    divide the ranks raises ConfigError on every rank.
    """
    timeout_s = timeout_s or config.collective_timeout_s
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    layout = config.check_world_size(world_size)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        timeout = timedelta(seconds=timeout_s)
        if world_size > 1:
            try:
                dist.init_process_group(backend, timeout=timeout)
            except (dist.DistError, RuntimeError) as error:
                raise PeerError(
                    f"rank {os.environ.get('RANK')} of {world_size} did not meet the others at "
                    f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: {str(error).splitlines()[0]}; "
                    "see the logs of the other ranks, and whether that address can be reached from here"
                ) from error
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        atexit.register(shutdown)
    if parallel_state.model_parallel_is_initialized():
        raise ConfigError("Megatron's parallel state exists already; one run per process, or destroy it first")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=max(1, int(timeout_s // 60)),
    )
    torch.manual_seed(config.run.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(config.run.seed + 1)


def leave_layout() -> None:
    """Dissolve Megatron's groups, and with them gloo's threads; the ranks stay joined and may ``initialize`` again."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
        parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None  # which 0.12 leaves behind
        _context_model_group.cache_clear()
    for group in [group for group in dist.distributed_c10d._world.pg_map if group != dist.group.WORLD]:
        dist.destroy_process_group(group)


def shutdown() -> None:
    """Leave all groups. Several ranks need a new store, so a new launch, before they can ``initialize`` again."""
    if dist.is_initialized():
        leave_layout()
        dist.destroy_process_group()


def is_main_rank() -> bool:
    """True on the rank that prints and writes: global rank 0."""
    return dist.get_rank() == 0


def node_leaders() -> list[int]:
    """The first rank of each node, in the order of ranks; a collective call. torchrun and Slurm's launchers say."""
    leads: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(leads, int(os.environ.get("LOCAL_RANK", "0")) == 0)
    return [rank for rank, is_leader in enumerate(leads) if is_leader]


def dp_rank() -> int:
    return parallel_state.get_data_parallel_rank()


def dp_size() -> int:
    return parallel_state.get_data_parallel_world_size()


def tp_position() -> tuple[int, int]:
    """(size of this rank's tensor-parallel group, this rank in it)."""
    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()


def cp_position() -> tuple[int, int]:
    """(size of this rank's context-parallel group, this rank in it)."""
    return parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()


def model_group() -> dist.ProcessGroup:
    """The ranks that hold one copy of the model and so train on the same batch (tensor x context x pipeline)."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return parallel_state.get_model_parallel_group()
    return _context_model_group()


@cache
def _context_model_group() -> dist.ProcessGroup:
    """Megatron keeps no group over tensor, context and pipeline ranks; a collective call, made once."""
    copies: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(copies, dp_rank())
    groups = {copy: [rank for rank, of in enumerate(copies) if of == copy] for copy in sorted(set(copies))}
    made = {copy: dist.new_group(ranks) for copy, ranks in groups.items()}
    return made[dp_rank()]


def holds_outputs() -> bool:
    """True on one rank of each model copy: last pipeline stage, first tensor- and context-parallel rank. It reports the
    metrics."""
    return (
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )


def largest(value: int, group: dist.ProcessGroup) -> int:
    """The largest ``value`` of a group's ranks."""
    found = torch.tensor(value, dtype=torch.int64, device=torch.cuda.current_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return int(found)


def fail_together(failure: MegarlError | None, what: str) -> None:
    """Raise on every rank if ``what`` failed on one, so that none waits for the others; a collective call."""
    failed = torch.tensor([int(failure is not None)], device=torch.cuda.current_device())
    dist.all_reduce(failed, op=dist.ReduceOp.SUM)
    if failure is not None:
        raise failure
    if int(failed):
        error = RolloutError(f"{what} failed on {int(failed)} other ranks; their messages say why")
        error.second_hand = True
        raise error


def is_of_a_collective(error: BaseException) -> bool:
    """Whether it is of a collective call that failed: torch has no class of its own for what gloo raises."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in _OF_A_COLLECTIVE)


def from_main_rank(action: Callable[[], Result]) -> Result:
    """What ``action`` returns on the main rank, on all of them; a collective call.

    A MegarlError there ends all ranks, and only the main rank says why: the others raise SystemExit.
    """
    told: list[Any] = [None, None]
    if is_main_rank():
        try:
            told[0] = action()
        except MegarlError as error:
            told[1] = error
    dist.broadcast_object_list(told)
    if told[1] is not None:
        raise told[1] if is_main_rank() else SystemExit(2)
    return told[0]


def collect_metrics(statistics: Mapping[str, Stat]) -> dict[str, Stat] | None:
    """Merge the statistics of all model copies, each reported once, in rank order; None except on the main rank."""
    mine = dict(statistics) if holds_outputs() else {}
    on_cpu = {name: Stat(stat.kind, stat.sums.cpu(), stat.maxima.cpu()) for name, stat in mine.items()}
    gathered: list[dict[str, Stat]] | None = [{}] * dist.get_world_size() if is_main_rank() else None
    dist.gather_object(on_cpu, gathered)
    return merge(gathered) if gathered is not None else None


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[...] of each rank of a group -> [group size, ...] in rank order, without gradient. All shapes must be equal."""
    if group.size() == 1:
        return tensor[None]
    found = tensor.new_empty((group.size(), *tensor.shape))
    dist.all_gather(list(found.unbind()), tensor.contiguous(), group=group)  # into its place: no second copy
    return found


def gather_bytes(mine: np.ndarray, group: dist.ProcessGroup) -> list[np.ndarray]:
    """The uint8 arrays of a group's ranks, of any lengths, in rank order, on each of them: as tensors, not pickled."""
    if group.size() == 1:
        return [mine]
    device = torch.cuda.current_device()
    sizes = torch.zeros(group.size(), dtype=torch.int64, device=device)
    sizes[group.rank()] = len(mine)
    dist.all_reduce(sizes, group=group)
    longest = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=device)
    longest[: len(mine)] = torch.from_numpy(np.ascontiguousarray(mine)).to(device)
    return [part[:size].cpu().numpy() for part, size in zip(all_gather(longest, group), sizes.tolist(), strict=True)]


def gather_rollouts(mine: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts of all ranks of this model copy, without their routes, in rank order, on each of them."""
    return [rollout for part in gather_bytes(encode_rollouts(mine), model_group()) for rollout in decode_rollouts(part)]


def gather_rows(rows: np.ndarray) -> np.ndarray:
    """The rows, float64 [n, C], of all ranks back to back, in rank order; every rank may have its own n."""
    device = torch.cuda.current_device()
    most = largest(len(rows), dist.group.WORLD)
    mine = torch.full((most + 1, rows.shape[1]), float(len(rows)), dtype=torch.float64, device=device)
    mine[1 : len(rows) + 1] = torch.from_numpy(rows).to(device)
    parts = all_gather(mine, dist.group.WORLD).cpu().numpy()
    return np.concatenate([part[1 : int(part[0, 0]) + 1] for part in parts])
