"""What a checkpoint of a run holds, in Megatron's sharded form: model, optimizer, schedule, random states, loop."""

import io
import os
import pickle
import queue
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megarl.megatron.policy import Policy
from megarl.megatron.versions import takes
from megarl.replay.megatron_state import unwrap

_MULTIPLIERS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


def run_state(policy: Policy, step: int, loop: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a checkpoint, for saving."""
    about = {"step": step, "layout": describe_layout(policy), "model": policy.shape.describe()}
    state, loop = sharded_state(policy, is_loading=False), dict(loop)
    if (untrained := loop.pop("untrained", None)) is not None:
        state["untrained"], about["has_untrained"] = of_rank("untrained", untrained), True
    return {**state, "loop": {**loop, **about}}


def of_rank(name: str, content: Any) -> ShardedObject:
    """Return content of the rank alone, which loads in the same layout only."""
    return ShardedObject(name, content, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


def describe_layout(policy: Policy) -> str:
    """E.g. "tp 2 pp 1 cp 1 ep 2 etp 1 on 4 ranks"."""
    parallel = policy.config.parallel
    sizes = f"tp {parallel.tp} pp {parallel.pp} cp {parallel.cp} ep {parallel.ep} etp {parallel.expert_tp}"
    return f"{sizes} on {dist.get_world_size()} ranks"


def sharded_weights(chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """Return the weights alone, by model chunk."""
    states = (unwrap(chunk).sharded_state_dict(**checkpoint_metadata()) for chunk in chunks)
    return {f"model{index}": state for index, state in enumerate(states)}


def sharded_state(policy: Policy, is_loading: bool) -> dict[str, Any]:
    """Weights, optimizer, schedule and random states; for loading, the places to load into."""
    state = sharded_weights(policy.chunks)
    _allocate_adam_state(policy.optimizer)
    models = {key: value for chunk in state.values() for key, value in chunk.items()} if len(state) == 1 else state
    state["optimizer"] = policy.optimizer.sharded_state_dict(models, is_loading=is_loading, **checkpoint_metadata())
    state["scheduler"] = policy.scheduler.state_dict()
    state["rng"] = of_rank("rng", {name: get() for name, (get, _) in _random_states().items()})
    return state


def _torch_adam_states(optimizer: Any) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """(parameter, its state) of every torch Adam inside Megatron's optimizer; nothing for a fused Adam."""
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(inner.optimizer, torch.optim.Adam):
            for group in inner.optimizer.param_groups:
                yield from ((parameter, inner.optimizer.state[parameter]) for parameter in group["params"])


def _allocate_adam_state(optimizer: Any) -> None:
    """torch's Adam creates its state in the first step, but Megatron needs the state before, to save or load."""
    for parameter, state in _torch_adam_states(optimizer):
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)


def separate_adam_steps(optimizer: Any) -> None:
    """Give each parameter a separate step: every parameter would advance the shared tensor that Megatron loads."""
    for _, state in _torch_adam_states(optimizer):
        state["step"] = state["step"].clone()


def regrouped(state: dict[Any, Any], optimizer: Any) -> dict[Any, Any]:
    """Return a loaded state of the distributed optimizer in the structure of ``optimizer``; a plain optimizer's
    unchanged.

    With ep > 1 Megatron numbers two optimizers, the second for experts; with ep = 1 there is a single optimizer. The
    tensors are in place already, the settings of the parameter groups at the checkpoint's places.
    """
    count = len(getattr(optimizer, "chained_optimizers", [optimizer]))
    local = [state] if count == 1 else [state[index] for index in range(count)]
    written = [entry for entry in (state, *state.values()) if isinstance(entry, dict) and "optimizer" in entry]
    if "param_state" not in local[0] or len(written) in (0, count):
        return state
    groups = [group for entry in written for group in entry["optimizer"]["param_groups"]]
    by_multipliers = {tuple(group.get(name) for name in _MULTIPLIERS): group for group in groups}
    for group in groups:
        for is_expert in (False, True):
            copy = {**group, "is_expert_parallel": is_expert}
            by_multipliers.setdefault(tuple(copy.get(name) for name in _MULTIPLIERS), copy)
    common = {**written[0], "optimizer": {"param_groups": list(by_multipliers.values())}}
    states = [{**common, "param_state": entry["param_state"]} for entry in local]
    return states[0] if count == 1 else dict(enumerate(states))


def _random_states() -> dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]:
    """Getter and setter of every random generator."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    assert tracker is not None  # made on first use
    return {
        "torch": (torch.get_rng_state, torch.set_rng_state),
        "cuda": (torch.cuda.get_rng_state, torch.cuda.set_rng_state),
        "tracker": (tracker.get_states, tracker.set_states),
        "numpy": (np.random.get_state, np.random.set_state),
        "python": (random.getstate, random.setstate),
    }


def restore_rng(states: Mapping[str, Any]) -> None:
    for name, (_, restore) in _random_states().items():
        restore(states[name])


def checkpoint_metadata(name: str = "metadata") -> dict[str, dict[str, Any]]:
    """Return the keyword argument that shards optimizer state for loading in any layout.

    A new dict at every call, because Megatron writes the current process groups into it.
    """
    return {name: {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}}


def writer() -> dict[str, Any]:
    """The keyword argument that asks for Megatron's own writer; from 0.17 on, the default is another package's."""
    return {"async_strategy": "mcore"} if takes(dist_checkpointing.save, "async_strategy") else {}


class ForkedQueue:
    """A queue from forked processes to their parent, through a file: no writer blocks, and the file ends with the
    processes.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (open as long as the queue)
        self._read = 0

    def put(self, item: Any) -> None:
        self._file.write(pickle.dumps(item))

    def drain(self) -> Iterator[Any]:
        with suppress(queue.Empty):
            while True:
                yield self.get_nowait()

    def get_nowait(self) -> Any:
        waiting = os.fstat(self._file.fileno()).st_size - self._read
        if not waiting:
            raise queue.Empty
        data = io.BytesIO(os.pread(self._file.fileno(), waiting, self._read))
        item = pickle.load(data)
        self._read += data.tell()
        return item
