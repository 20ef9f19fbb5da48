"""Builds a rank of a recipe at its real size on a device that computes nothing, runs a step, and measures it.

    tests/null_gpu/python tests/null_gpu/plan_rank.py RECIPE [--rank N] [--set table.key=value ...]

torch's caching allocator gives the memory; layers are those of Transformer Engine with its compiled extension. The
process group is torch's fake one, which moves nothing. Prints JSON: measured and planned bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import without_values
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.config import Config
from megarl.config.file import load
from megarl.core.packing import pack

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as training sets it
without_values.install()
warnings.simplefilter("ignore")

# What follows imports Megatron and Transformer Engine, which must find what was installed.
from megatron.core import parallel_state  # noqa: E402

from megarl.megatron import distributed, policy  # noqa: E402
from megarl.megatron.passes import forward, micro_batches  # noqa: E402
from megarl.ops.plan.layout import stages_of  # noqa: E402
from megarl.ops.plan.plan import find_model  # noqa: E402
from megarl.ops.plan.trainer_memory import rank_memory  # noqa: E402
from megarl.ops.shipped import RECIPES  # noqa: E402
from megarl.trainer.mini_batch import make_rollout, split  # noqa: E402

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="table.key=value", dest="changes")
    given = parser.parse_args()
    changes = {key: json.loads(value) for key, value in (each.split("=", 1) for each in given.changes)}
    source = RECIPES / given.recipe
    model = find_model(load(source, changes), None)
    config = load(source, {**changes, "model.path": str(model)})
    print(json.dumps(measure(config, given.rank)))


def measure(config: Config, rank: int) -> dict[str, Any]:
    """Build a rank of the recipe's layout in this process; in the result are pairs of bytes, (measured, planned)."""
    world_size = config.launch.ranks
    os.environ.update(WORLD_SIZE=str(world_size), RANK=str(rank), LOCAL_RANK="0")
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    new_group = dist.new_group
    dist.new_group = lambda *a, backend=None, **k: new_group(*a, backend="fake", **k)
    distributed.initialize(config)
    # All ranks have equal shares, and none fails.
    micro_batches.largest, micro_batches.fail_together = lambda value, _: value, lambda *_: None
    policy.load_hf = lambda *_: None  # there is no checkpoint
    built = policy.Policy(config, policy.schedule_of(config))
    top_k = built.shape.topk or 1
    without_values.balance_routes(top_k)
    layout = config.check_world_size(world_size)
    stage = stages_of(config, built.shape)[parallel_state.get_pipeline_model_parallel_rank()]
    num = layout.pp * (layout.vpp or 1)
    planned = rank_memory(config, built.shape, layout, stage, num)
    observed = without_values.Observed(top_k)
    with observed:
        step(config, built, num)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(config, built, num)
        peak = torch.cuda.max_memory_allocated()
    found = {name: (size, getattr(planned, name)) for name, size in states(built).items()}
    found |= {"states": (before, planned.states), "peak": (peak, planned.training)}
    return {"rank": rank, "memory": found}


def states(built: policy.Policy) -> dict[str, int]:
    """Bytes of weights, gradient buffers and optimizer states."""
    held = [buffer for chunk in built.chunks for name, buffer in chunk.named_buffers() if "expert" in name]
    weights = storages([*(p for chunk in built.chunks for p in chunk.parameters()), *held])
    gradients = storages(built._grad_buffers())
    optimizer = {key: size for key, size in storages(built._optimizer_tensors()).items() if key not in weights}
    sizes = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    return {name: sum(each.values()) for name, each in sizes.items()}


def storages(tensors: Iterator[torch.Tensor] | Sequence[torch.Tensor]) -> dict[int, int]:
    """Identity -> bytes of each storage."""
    return {s._cdata: s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}


def step(config: Config, built: policy.Policy, num: int) -> None:
    """Forward and backward passes of ``num`` full micro-batches, and the update."""
    length = config.train.micro_batch_tokens * config.parallel.cp
    rollouts = [make_rollout(np.zeros(length, np.int32), np.arange(length) > 0) for _ in range(num)]
    passes = split(config, pack(rollouts, np.zeros(num)))
    assert len(passes) == num
    built.zero_grad()
    forward.run(
        built.chunks,
        passes,
        temperature=1.0,
        vocab_size=built.shape.vocab_size,
        coefficients=lambda index, batch, logprobs, entropies: (torch.ones_like(logprobs), None, {}),
    )
    built.optimizer.step()


if __name__ == "__main__":
    main()
