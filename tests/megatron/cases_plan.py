"""Cases of `megarl plan`: what a real Policy allocates on every rank, beside what the plan says of it."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from tiny_families import write_family
from tiny_world import config, policy_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.config import Config
from megarl.megatron.policy import Policy
from megarl.ops.plan.layout import count_rank, stages_of
from megarl.ops.plan.trainer_memory import gathered_bytes, state_bytes

SLOTS = 512
SIZES = {"hidden_size": 64, "vocab_size": 100, "max_position_embeddings": 256}
Layout = dict[str, int]


def _settings(layout: Layout, model: str, dtype: str, **overrides: Any) -> Config:
    """Every rank writes the same model for itself."""
    folder = write_family(Path(tempfile.mkdtemp()) / model, model, **SIZES)
    sizes = {"train__micro_batch_tokens": SLOTS, "rollout__max_response_tokens": 160, "train__replay": "none"}
    return config(folder, layout, model__dtype=dtype, **{**sizes, **overrides})


def states(layout: Layout, model: str, dtype: str, sharded: bool = True) -> list[dict[str, tuple[int, int]]]:
    """For each rank, name -> (measured, planned): parameters (counts), weights, gradients, optimizer states (bytes)."""
    settings = _settings(layout, model, dtype, parallel__distributed_optimizer=sharded)
    policy = policy_of(settings)
    policy.zero_grad()
    policy.optimizer_step()  # Adam's moments appear with the first step
    divided = settings.check_world_size(dist.get_world_size())
    stage = stages_of(settings, policy.shape)[parallel_state.get_pipeline_model_parallel_rank()]
    count = count_rank(policy.shape, divided, stage)
    parameters = [parameter for chunk in policy.chunks for parameter in chunk.parameters()]
    held = [buffer for chunk in policy.chunks for name, buffer in chunk.named_buffers() if "expert" in name]
    buffers = [buffer for chunk in policy.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    weights = _storages([*parameters, *held])
    measured = {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "weights": sum(weights.values()),
        "gradients": sum(_storages([buffer.grad_data for buffer in buffers]).values()),
        "optimizer": sum(size for key, size in _storages(_optimizer_tensors(policy)).items() if key not in weights),
    }
    planned = dict(zip(("weights", "gradients", "optimizer"), state_bytes(settings, divided, count), strict=True))
    mine = {name: (size, {"parameters": count.total, **planned}[name]) for name, size in measured.items()}
    return _from_all(mine)


def _storages(tensors: Sequence[torch.Tensor | None]) -> dict[int, int]:
    """Identity -> bytes of the storages of some tensors, each once, as large as they are now."""
    found = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


def _optimizer_tensors(policy: Policy) -> Iterator[torch.Tensor]:
    """Main weights and moments; scalars such as step counts too."""
    chained = getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
    for part in (getattr(optimizer, "optimizer", optimizer) for optimizer in chained):
        yield from (parameter for group in part.param_groups for parameter in group["params"])
        yield from (v for state in part.state.values() for v in state.values() if isinstance(v, torch.Tensor))


def _from_all(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def export_peak(layout: Layout, model: str) -> list[tuple[int, int]]:
    """For each rank: (most bytes that there are at a time beside the weights while an update streams, planned)."""
    settings = _settings(layout, model, "bf16")
    policy = policy_of(settings)
    peaks = []
    for _ in range(5):  # what gloo lets go of late differs, and is not the update's; the rest is there each time
        with _Made() as made:
            for _ in policy.export():
                pass
        peaks.append(made.most)
    return _from_all((min(peaks), gathered_bytes(policy.shape, 2, layout.get("ep", 1))))


class _Made(TorchDispatchMode):
    """Bytes of the storages that operations have made inside, as many as there are at once at most."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((arguments, named)) if isinstance(t, torch.Tensor)}
        result = operation(*arguments, **(named or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given | self._known:
                    self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self._now += size
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._let_go, key, size)

    def _let_go(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size
