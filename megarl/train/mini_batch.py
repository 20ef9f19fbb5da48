"""One optimizer step's share of a rank: rollouts checked, packed, split into micro-batches, with their routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.config import Config
from megarl.core.metrics import Stat
from megarl.core.objectives.columns import Denominators
from megarl.core.packing import drop_routes, pack
from megarl.core.types import Rollout, TrainBatch
from megarl.errors import MegarlError, RolloutError, TraceError
from megarl.megatron import distributed
from megarl.megatron.passes.micro_batches import MicroBatch, split_by_sequence, split_micro_batches
from megarl.megatron.policy import Policy
from megarl.megatron.replay import MicroRoutes
from megarl.megatron.replay.rollout_routes import check_rollouts, deliver_routes


@dataclass(slots=True)
class MiniBatch:
    """This rank's share of one optimizer step. The passes over it fill in the fields that are None at first."""

    micro_batches: list[MicroBatch]
    denominators: Denominators
    """Over all ranks."""
    rollout_routes: list[MicroRoutes] | None = None
    """The engine's routes, this rank's rows and layers. None if it recorded none, or no router here can use them."""
    routes: list[MicroRoutes] | None = None
    """The routes that training replays; None routes natively."""
    native_routes: list[MicroRoutes] | None = None
    """What the routers chose, or would have chosen, in the first pass. Kept only for trace files."""
    old_logprobs: list[torch.Tensor] | None = None
    """[T] per micro-batch, on the last pipeline stage (elsewhere empty). None if the update computes them itself."""
    old_updates: int = 0
    """The number of updates before the old-log-prob pass."""
    ref_logprobs: list[torch.Tensor] | None = None
    """As ``old_logprobs``, of the reference policy; None without one."""
    metrics: dict[str, Stat] = field(default_factory=dict)
    """The gap between the engines; part of the step's record."""


def make_mini_batch(
    config: Config,
    policy: Policy,
    rollouts: Sequence[Rollout],
    advantages: np.ndarray | Sequence[np.ndarray],
    one_by_one: bool = False,
) -> MiniBatch:
    """See ``TrainStep.prepare``."""
    r3, replay = config.train.replay == "r3", policy.replay
    bare = [drop_routes(rollout) for rollout in rollouts]
    recorded = all(rollout.routed_mask is not None for rollout in bare)
    failure: MegarlError | None = None
    try:
        if not rollouts:
            raise RolloutError(
                "this rank has no sequence of the mini-batch, expected one or more on every data-parallel rank; "
                "lower train.mini_batches or raise rollout.prompts_per_step"
            )
        if r3 or recorded:
            check_rollouts(rollouts, policy.shape)
        batch = pack(bare, advantages)
        if r3:
            _check_missing_rows(batch, config.train.max_missing_rows)
    except MegarlError as error:
        failure = error
    distributed.fail_together(failure, "the check of rollouts")
    micro_batches = (
        split_by_sequence(batch, config.parallel.equal_micro_batches) if one_by_one else split(config, batch)
    )
    denominators = Denominators.of(batch.loss_mask, batch.cu_seqlens, batch.rollout_logprobs)
    mini = MiniBatch(micro_batches, over_ranks(denominators))
    if replay is not None and recorded:
        mini.rollout_routes = deliver_routes(rollouts, micro_batches, replay.layers, policy.shape)
    if r3:
        mini.routes = mini.rollout_routes
    return mini


def split(config: Config, batch: TrainBatch, max_tokens: int | None = None) -> list[MicroBatch]:
    """Split a batch as the layout needs it, by default at ``train.micro_batch_tokens``; a collective call."""
    parallel = config.parallel
    return split_micro_batches(
        batch,
        config.train.micro_batch_tokens if max_tokens is None else max_tokens,
        parallel.equal_micro_batches,
        parallel.micro_batch_multiple,
    )


def make_rollout(tokens: np.ndarray, loss_mask: np.ndarray | None = None) -> Rollout:
    """Return tokens that no engine sampled as a rollout without routes; by default without loss."""
    return Rollout(
        group=0,
        sample=0,
        tokens=np.asarray(tokens, np.int32),
        loss_mask=np.zeros(len(tokens), bool) if loss_mask is None else loss_mask,
        rollout_logprobs=np.zeros(len(tokens), np.float32),
        routed_experts=None,
        routed_mask=None,
        weight_versions=np.zeros(len(tokens), np.int32),
        finish_reason="abort",
    )


def over_ranks(local: Denominators) -> Denominators:
    """The sum over data-parallel ranks."""
    counts = torch.tensor([local.num_tokens, local.num_sequences], device=torch.cuda.current_device())
    dist.all_reduce(counts, group=parallel_state.get_data_parallel_group())
    return Denominators(*counts.tolist())


def _check_missing_rows(batch: TrainBatch, limit: float) -> None:
    assert batch.routed_mask is not None
    missing = ~batch.routed_mask
    # Engines have no row for the last token: they never processed it. Nothing is predicted from it either.
    missing[batch.cu_seqlens[1:] - 1] = False
    share = float(missing.double().mean())
    if share > limit:
        raise TraceError(
            f"{share:.1%} of the tokens have no recorded route, more than train.max_missing_rows = {limit:.1%}; "
            "find out why the engine lost them, or raise the limit: missing rows route natively"
        )
