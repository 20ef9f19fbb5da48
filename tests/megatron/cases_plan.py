"""Cases of `megarl plan`: what a real Policy allocates on every rank, beside what the plan says of it."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from tiny_families import write_family
from tiny_world import config, policy_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.config import Config
from megarl.core.packing import pack
from megarl.core.types import Rollout, TrainBatch
from megarl.megatron.passes import forward
from megarl.megatron.passes.micro_batches import split_micro_batches
from megarl.megatron.policy import Policy
from megarl.plan.layout import count_rank, stages_of
from megarl.plan.trainer_memory import activation_bytes, cut_of, gathered_elements, head_bytes, state_bytes

SLOTS = 512
LENGTHS = (125, 126, 127, 128)
"""Of the sequences of a micro-batch, none as long as another; any four fit, however they are dealt out."""
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


def activations(
    layout: Layout, model: str, dtype: str, micro_batches: int = 1, **recompute: Any
) -> list[tuple[int, int]]:
    """For each rank: (bytes that forward passes keep when the first backward pass begins, planned)."""
    overrides = {f"recompute__{key}": list(v) if isinstance(v, tuple) else v for key, v in recompute.items()}
    settings = _settings(layout, model, dtype, **overrides)
    policy = policy_of(settings)
    divided = settings.check_world_size(dist.get_world_size())
    stage = stages_of(settings, policy.shape)[parallel_state.get_pipeline_model_parallel_rank()]
    planned, _ = activation_bytes(settings, policy.shape, divided, stage, micro_batches)
    planned += head_bytes(policy.shape, cut_of(settings, divided)) if stage.is_last else 0
    return _from_all((_saved(settings, policy, micro_batches), planned))


def recomputed_peak(model: str, dtype: str, **recompute: Any) -> tuple[int, int]:
    """(most bytes that autograd holds at a time, in forward and backward pass of one micro-batch, planned)."""
    settings = _settings({}, model, dtype, **{f"recompute__{key}": value for key, value in recompute.items()})
    policy = policy_of(settings)
    divided, (stage,) = settings.check_world_size(1), stages_of(settings, policy.shape)
    kept, unit = activation_bytes(settings, policy.shape, divided, stage, 1)
    held = _Held(_storages([p for chunk in policy.chunks for p in chunk.parameters()]))
    with torch.autograd.graph.saved_tensors_hooks(held.keep, lambda kept: kept.tensor):
        _forward_backward(settings, policy, 1, lambda: None)
    return held.most, kept + max(unit, head_bytes(policy.shape, cut_of(settings, divided)))


class _Kept:
    """What autograd holds in place of a tensor; gone when autograd lets go of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Held:
    """Bytes of the storages that autograd holds now, and the most it has held."""

    def __init__(self, known: Mapping[int, int]) -> None:
        self.most = self._now = 0
        self._known = known
        self._users: dict[int, int] = {}

    def keep(self, tensor: torch.Tensor) -> _Kept:
        storage, kept = tensor.untyped_storage(), _Kept(tensor)
        if storage._cdata not in self._known:
            key, size = storage._cdata, storage.nbytes()
            self._users[key] = self._users.get(key, 0) + 1
            self._now += size if self._users[key] == 1 else 0
            self.most = max(self.most, self._now)
            weakref.finalize(kept, self._let_go, key, size)
        return kept

    def _let_go(self, key: int, size: int) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self._now -= size


def _saved(settings: Config, policy: Policy, num_micro_batches: int) -> int:
    """Bytes of all storages that autograd holds when the first backward pass begins, weights left out."""
    known = _storages([p for chunk in policy.chunks for p in chunk.parameters()])
    held: list[torch.Tensor] = []
    at_end: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        return tensor

    def count() -> None:
        at_end.append(sum(size for key, size in _storages(held).items() if key not in known))

    def restore(tensor: torch.Tensor) -> torch.Tensor:
        if not at_end:  # the first backward pass of a stage that has no loss
            count()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, restore):
        _forward_backward(settings, policy, num_micro_batches, count)
    return at_end[0]


def _forward_backward(settings: Config, policy: Policy, num: int, on_loss: Callable[[], None]) -> None:
    """A training pass over ``num`` full micro-batches."""
    micro_batches = split_micro_batches(
        _batch(num * settings.parallel.cp),
        settings.train.micro_batch_tokens,
        multiple_of=settings.parallel.micro_batch_multiple,
    )
    assert len(micro_batches) == num
    forward.run(
        policy.chunks,
        micro_batches,
        temperature=1.0,
        vocab_size=policy.shape.vocab_size,
        coefficients=lambda index, batch, logprobs, entropies: (torch.ones_like(logprobs), {}),
        on_micro_batch=on_loss,
    )


def _batch(repeats: int) -> TrainBatch:
    """The sequences so many times; every model copy takes all of them."""
    rng = np.random.default_rng(0)
    made = []
    for index, length in enumerate(LENGTHS * repeats):
        made.append(
            Rollout(
                group=index,
                sample=0,
                tokens=rng.integers(0, SIZES["vocab_size"], length).astype(np.int32),
                loss_mask=np.arange(length) >= 4,
                rollout_logprobs=np.zeros(length, np.float32),
                routed_experts=None,
                routed_mask=None,
                weight_versions=np.zeros(length, np.int32),
                finish_reason="stop",
            )
        )
    return pack(made, np.zeros(len(made)))


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
    made = _Made()
    with made:
        for _ in policy.export():
            pass
    return _from_all((made.most, 2 * gathered_elements(policy.shape)))


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
