"""Process groups of a run (torch.distributed and Megatron's parallel state), and small collective calls."""

import atexit
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megarl import enable_cpu
from megarl.core.metrics import Stat, merge, to_host
from megarl.core.packing import drop_routes
from megarl.core.types import Rollout
from megarl.errors import ConfigError, MegarlError, PeerError, RolloutError, refusal, refuse_if
from megarl.files.texts import read_table
from megarl.replay.megatron_state import Replaced, cp_position, tp_position

if TYPE_CHECKING:  # replay needs no pydantic
    from megarl.config import Config

Result = TypeVar("Result")

SIZES: Mapping[str, str] = read_table(__file__)["sizes"]
"""Megatron's names of the sizes of a layout -> ours."""
_TWIN = "over gloo"
_COLLECTIVE_WORDS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe")


def initialize(config: "Config", timeout_s: float | None = None) -> None:
    """Join the ranks of torchrun (or run alone), then create and seed Megatron's groups.

    ``timeout_s`` is by default ``config.collective_timeout_s``. ConfigError if the layout does not divide the ranks.
    """
    enable_cpu()  # no-op where a command has called it before importing Megatron
    timeout_s = timeout_s or config.collective_timeout_s
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    layout = config.check_world_size(world_size)
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())
    if not dist.is_initialized():
        _join(world_size, timedelta(seconds=timeout_s))
        atexit.register(shutdown)
    refuse_if(parallel_state.model_parallel_is_initialized(), ConfigError, "second_run")
    sizes = {name: getattr(layout, size) for name, size in SIZES.items()}
    parallel_state.initialize_model_parallel(**sizes, distributed_timeout_minutes=max(1, int(timeout_s // 60)))
    torch.manual_seed(config.run.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(config.run.seed + 1)


def _join(world_size: int, timeout: timedelta) -> None:
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    options: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if world_size == 1 else {}
    try:
        dist.init_process_group(backend, timeout=timeout, **options)
    except (dist.DistError, RuntimeError) as error:
        rank, *place = (os.environ.get(name) for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
        facts = {"rank": rank, "world": world_size, "place": ":".join(map(str, place))}
        raise PeerError(refusal("no_rendezvous", error=str(error).splitlines()[0], **facts)) from error


def leave_layout() -> None:
    """Destroy Megatron's groups, and gloo's threads with them. The ranks stay joined and may ``initialize`` again."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
        _context_model_group.cache_clear()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group != dist.group.WORLD and group.group_desc != _TWIN:
            dist.destroy_process_group(group)


def shutdown() -> None:
    """Leave all groups. To ``initialize`` again, several ranks need a new launch."""
    if dist.is_initialized():
        leave_layout()
        _connect_by_gloo.cache_clear()
        dist.destroy_process_group()


def is_main_rank() -> bool:
    """True on global rank 0, which prints and writes."""
    return dist.get_rank() == 0


def require_group(group: object) -> dist.ProcessGroup:
    """Return ``group``. A rank outside of a group gets a number from torch, and None stands for all ranks."""
    assert isinstance(group, dist.ProcessGroup), f"found {group!r}, expected a group that this rank is in"
    return group


def over_gloo(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """The ranks of a group (by default all), connected by gloo; a collective call of theirs on first use.

    Over NCCL, numbers and objects of the host would pass the GPU, after all queued work. A rank that waits in NCCL also
    keeps the GPU busy, and a server may share the GPU.
    """
    group = require_group(group or dist.group.WORLD)
    if dist.get_backend(group) == dist.Backend.GLOO:
        return group
    return _connect_by_gloo(tuple(dist.get_process_group_ranks(group)))


@cache
def _connect_by_gloo(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    c10d = dist.distributed_c10d
    timeout = c10d._get_default_group()._get_backend(torch.device(torch.cuda.current_device())).options._timeout
    # torch's own name counts the groups that a rank is in, and the ranks of a pipeline's ends are in more: the others
    # would wait under another name. A name of ranks alone serves a single group, which outlasts the layout.
    name = hashlib.sha256(repr(ranks).encode()).hexdigest()
    with Replaced(c10d, _process_group_name=lambda *_, **__: name):
        options: Any = {"use_local_synchronization": True, "group_desc": _TWIN}
        return require_group(dist.new_group(list(ranks), timeout, "gloo", **options))


def gather_objects(local: Result, group: dist.ProcessGroup | None = None) -> list[Result]:
    """A small object, pickled, of each rank of a group (by default all ranks), in rank order; a collective call."""
    gathered = [local] * dist.get_world_size(group)
    if len(gathered) > 1:
        dist.all_gather_object(gathered, local, group=over_gloo(group))
    return gathered


def local_rank() -> int:
    """Return LOCAL_RANK, which is also the index of the rank's GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def gather_on_main_rank(local: Result) -> list[Result] | None:
    """An object, pickled, of each rank in rank order; None except on the main rank; a collective call."""
    gathered = [local] * dist.get_world_size() if is_main_rank() else None
    dist.gather_object(local, gathered, group=over_gloo())
    return gathered


def barrier() -> None:
    """Wait for all ranks, without the GPU."""
    dist.barrier(over_gloo())


def node_leaders() -> list[int]:
    """The first rank of each node, in rank order; a collective call."""
    return [rank for rank, local in enumerate(gather_objects(local_rank())) if local == 0]


def dp_rank() -> int:
    return parallel_state.get_data_parallel_rank()


def dp_size() -> int:
    return parallel_state.get_data_parallel_world_size()


def model_group() -> dist.ProcessGroup:
    """The ranks of one model copy (tensor x context x pipeline). All train on one batch."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return parallel_state.get_model_parallel_group()
    return _context_model_group()


@cache
def _context_model_group() -> dist.ProcessGroup:
    """Megatron has no group over tensor, context and pipeline ranks. A collective call on first use."""
    copies = gather_objects(dp_rank())
    ranks = {copy: [rank for rank, of_rank in enumerate(copies) if of_rank == copy] for copy in sorted(set(copies))}
    return require_group({copy: dist.new_group(members) for copy, members in ranks.items()}[dp_rank()])


def holds_outputs() -> bool:
    """Return True on the rank of each model copy that reports metrics: last stage, first tensor- and context-parallel
    one.
    """
    return parallel_state.is_pipeline_last_stage(ignore_virtual=True) and tp_position()[1] == cp_position()[1] == 0


def largest(value: int, group: dist.ProcessGroup | None = None) -> int:
    """The largest ``value`` of a group's ranks (by default all)."""
    result = torch.tensor(value)
    dist.all_reduce(result, op=dist.ReduceOp.MAX, group=over_gloo(group))
    return int(result)


def fail_together(failure: MegarlError | None, action: str) -> None:
    """Raise on every rank if ``action`` failed on any rank, so that no rank waits forever; a collective call."""
    num_failed = int(all_sum(torch.tensor(int(failure is not None)), over_gloo())) if dist.get_world_size() > 1 else 0
    if failure is not None:
        raise failure
    if num_failed:
        error = RolloutError(f"{action} failed on {num_failed} other ranks; their messages say why")
        error.second_hand = True
        raise error


def run_together(name: str, action: Callable[[], Result]) -> Result:
    """Return the result of ``action``; all ranks raise the error of any rank; a collective call."""
    result: Any = None
    failure: MegarlError | None = None
    try:
        result = action()
    except MegarlError as error:
        failure = error
    fail_together(failure, name)
    return result


def is_collective_error(error: BaseException) -> bool:
    """Whether a collective call failed. Compares words, because torch has no class for errors of gloo."""
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in _COLLECTIVE_WORDS)


def from_main_rank(action: Callable[[], Result]) -> Result:
    """The result of ``action`` on the main rank, on all ranks; a MegarlError ends the others with SystemExit."""
    outcome: list[Any] = [None, None]
    if is_main_rank():
        try:
            outcome = [action(), None]
        except MegarlError as error:
            outcome = [None, error]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(outcome, group=over_gloo())
    if outcome[1] is not None:
        raise outcome[1] if is_main_rank() else SystemExit(2)
    return outcome[0]


def collect(statistics: Sequence[Mapping[str, Stat]]) -> dict[str, Stat] | None:
    """Merge the rank's statistics and those of all model copies; None except on the main rank; a collective call."""
    of_ranks = gather_on_main_rank(to_host(merge(statistics)) if holds_outputs() else {})
    return None if of_ranks is None else merge(of_ranks)


def all_sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensor [...], which becomes the sum over a group's ranks."""
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)
    return tensor


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[...] of each rank of a group -> [group size, ...] in rank order, without gradient. All shapes must be equal."""
    if group.size() == 1:
        return tensor[None]
    gathered = tensor.new_empty((group.size(), *tensor.shape))
    dist.all_gather(list(gathered.unbind()), tensor.contiguous(), group=group)  # into its place: no second copy
    return gathered


def gather_rollouts(local: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts of all ranks of this model copy in rank order; without routes if there are several ranks."""
    if model_group().size() == 1:
        return list(local)
    bare = [drop_routes(rollout) for rollout in local]
    return [rollout for of_rank in gather_objects(bare, model_group()) for rollout in of_rank]


def gather_rows(rows: np.ndarray) -> np.ndarray:
    """The rows, float64 [n, C], of all ranks back to back in rank order; n may differ between ranks."""
    return np.concatenate(gather_objects(rows))
