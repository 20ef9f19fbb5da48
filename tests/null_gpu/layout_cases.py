"""Optimizer steps on several ranks, the same on the null GPU over NCCL and on the CPU over gloo."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from cases_training import forward_backward
from null_gpu.computing import computing
from null_gpu.nccl_cases import library
from tiny_world import MODELS, RECOMPUTE, config, exported, join, local_batch, policy_of

from megarl.errors import RolloutError
from megarl.megatron import distributed


def one_step(layout: dict[str, int], recompute: str = "none", **overrides: Any) -> dict[str, Any]:
    """A training step under replay of the rollouts' routes: loss, gradient norm, weights after it."""
    assert torch.cuda.is_available() == (os.environ["EXPECTED_DEVICE"] == "gpu")
    with computing():
        # With its default of 1e-8, Adam makes a step of the rounding in gradients that are almost zero.
        settings = config(MODELS / "base", layout, recompute=RECOMPUTE[recompute], optim__adam_eps=1e-4, **overrides)
        policy = policy_of(settings)
        loss, _ = forward_backward(policy, settings, local_batch())
        norm, _ = policy.optimizer_step()
        weights = {name: weight.cpu() for name, weight in exported(policy).items()}
    return {"loss": loss, "norm": norm, "weights": weights}


def agreements(layout: dict[str, int]) -> list[dict[str, Any]]:
    """What ranks agree on beside their tensors, in a layout and in the next one; the calls of NCCL that it took."""
    rank, found = int(os.environ["RANK"]), []
    nccl = library()
    for _ in range(2):
        join(config(MODELS / "base", layout))
        distributed.model_group()
        nccl.null_nccl_reset()
        outcome = {
            "objects": distributed.gather_objects({"rank": rank}),
            "of_model": distributed.gather_objects(rank, distributed.model_group()),
            "on_main": distributed.gather_on_main_rank(rank),
            "largest": distributed.largest(rank, dist.group.WORLD),
            "of_model_largest": distributed.largest(-rank, distributed.model_group()),
            "from_main": distributed.from_main_rank(lambda: f"from {rank}"),
            "failures": [_failure_of(rank == 1), _failure_of(False)],
        }
        distributed.barrier()
        kinds = ("AllReduce", "Broadcast", "AllGather", "Gather", "Send", "Recv")
        outcome["nccl_calls"] = [nccl.null_nccl_calls(kind.encode()) for kind in kinds]
        dist.all_reduce(torch.zeros(1, device="cuda"))
        outcome["counted"] = nccl.null_nccl_calls(b"AllReduce")
        found.append(outcome)
    return found


def _failure_of(failed: bool) -> str:
    try:
        distributed.fail_together(RolloutError("own failure") if failed else None, "the test")
    except RolloutError as error:
        return str(error)
    return ""
