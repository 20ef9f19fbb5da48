"""`megarl plan` against what a real Policy allocates on a CPU: parameters and states.

Measured are the bytes of tensors, each storage once, without the allocator's rounding. What passes hold is measured on
the null GPU (tests/null_gpu/test_plan.py).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from ranks import Case, case
from tiny_families import FAMILIES, write_family
from tiny_world import config, policy_of

from megarl.config import Config
from megarl.megatron.policy import Policy
from megarl.models.shapes import read_shape
from megarl.ops.plan.layout import count_rank, stages_of
from megarl.ops.plan.trainer_memory import gathered_bytes, state_bytes

WITHIN = 0.10
STATES = "test_megatron_plan:states"


def test_an_update_gathers_the_largest_parameter() -> None:
    """Experts of a layer twice, or a dense parameter three times; SIZES with 8 experts of width 40, in bf16."""
    with tempfile.TemporaryDirectory() as folder:
        shape = read_shape(write_family(Path(folder) / "model", "mixtral", **SIZES))
    assert gathered_bytes(shape, 2, ep=1) == 2 * 8 * (2 * 40 * 64) * 2


def assert_states(found: list[dict[str, tuple[int, int]]]) -> None:
    for rank, sizes in enumerate(found):
        measured, planned = sizes["parameters"]
        assert planned == measured, f"rank {rank}"
        for name, (measured, planned) in sizes.items():
            assert planned == pytest.approx(measured, rel=WITHIN), f"rank {rank}: {name}"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", FAMILIES)
def test_states_of_one_rank(model: str, dtype: str, one_rank: None) -> None:
    assert_states(states({}, model, dtype))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_states_without_the_distributed_optimizer(dtype: str, one_rank: None) -> None:
    assert_states(states({}, "qwen3_moe", dtype, sharded=False))


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize(
    "case",
    [
        *(case(2, STATES, layout, model="qwen3_moe", dtype="bf16") for layout in ("tp2", "ep2", "pp2", "cp2")),
        case(2, STATES, "", model="qwen3_moe", dtype="fp32"),
        case(2, STATES, "", model="qwen3_moe", dtype="bf16", sharded=False),
        *(case(2, STATES, layout, model="deepseek_v3", dtype="bf16") for layout in ("tp2 ep2 etp1", "pp2")),
        case(2, STATES, "tp2 ep2 etp1", model="glm4_moe", dtype="fp32"),
        case(2, STATES, "pp2", model="qwen3", dtype="bf16"),
        case(2, STATES, "pp2 vpp2", model="qwen3_moe", dtype="bf16"),
        case(4, STATES, "tp2 ep2 etp1 pp2", model="deepseek_v3", dtype="bf16"),
    ],
    ids=str,
)
def test_states_of_every_rank(case: Case, outcome: list[dict[str, tuple[int, int]]]) -> None:
    assert_states(outcome)


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
