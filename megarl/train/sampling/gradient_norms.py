"""Gradient norms of single samples, from which GVM allocates samples (``megarl.core.sampling.gvm``)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.core.metrics import Stat
from megarl.core.types import Rollout, TrainBatch
from megarl.errors import NumericsError
from megarl.megatron.block_gradients import block_parameters, local_square, on_block
from megarl.megatron.distributed import dp_size, fail_together, largest, model_group
from megarl.megatron.passes import forward
from megarl.train.mini_batch import MiniBatch, make_rollout
from megarl.train.step import TrainStep


def gradient_norms(train_step: TrainStep, rollouts: Sequence[Rollout], block: str) -> np.ndarray:
    """Return ``||d/d(block) sum_t log pi(y_t)||_2`` of each rollout, float64 [n], on every rank of its model copy.

    The sum is over the rollout's loss tokens, not divided by their number, at the temperature of the rollout. Routes
    are replayed if ``train.replay`` is "r3", else the routers choose. block: see ``block_parameters``; the released GVM
    code uses "embedding". Gradients are accumulated in fp32.

    A collective call. The ranks of one model copy hold the same rollouts, as for ``TrainStep.prepare``. Copies may hold
    different numbers of them, also none. There is one forward and backward pass per rollout, on all copies at once,
    because copies share experts: a copy without further rollouts runs a dummy. Weights and optimizer do not change;
    gradients are zero afterwards. Raises ConfigError for an unknown block, NumericsError naming a rollout whose norm is
    not finite, and what ``prepare`` raises.
    """
    parameters = block_parameters(train_step.policy, block)
    passes = largest(len(rollouts), parallel_state.get_data_parallel_group())
    if passes == 0:
        return np.zeros(0)
    # Copies wait for each other at the experts of every layer, so run rollouts of similar length together.
    order = np.argsort([-rollout.num_tokens for rollout in rollouts], kind="stable")
    # A dummy is for a pass in which only other model copies have a sample: two tokens without loss.
    shape = train_step.policy.shape
    experts = np.broadcast_to(np.arange(shape.topk, dtype=np.uint8), (2, len(shape.moe_layers), shape.topk))
    dummy = replace(make_rollout(np.zeros(2)), routed_experts=experts, routed_mask=np.ones(2, bool))
    taken = [*(rollouts[i] for i in order), *[dummy] * (passes - len(rollouts))]
    if train_step.config.train.replay != "r3":  # nothing here is compared with the routes
        taken = [replace(rollout, routed_experts=None, routed_mask=None) for rollout in taken]
    mini = train_step.prepare(taken, np.zeros(passes), one_by_one=True)
    squares = torch.zeros(passes, dtype=torch.float64, device=torch.cuda.current_device())
    with on_block(train_step.policy, parameters):
        for index in range(passes):
            _backward(train_step, mini, index)
            squares[index] = local_square(parameters, train_step.policy.megatron_config)
    dist.all_reduce(squares, group=model_group())
    # forward.run scales the loss so that Megatron's average over these ranks gives the sum. No average happens here.
    averaged_over = dp_size() * parallel_state.get_context_parallel_world_size()
    norms = np.zeros(len(rollouts))
    norms[order] = squares.sqrt().cpu().numpy()[: len(rollouts)] / averaged_over
    failure: NumericsError | None = None
    if len(bad := np.flatnonzero(~np.isfinite(norms))):
        first = rollouts[int(bad[0])]
        failure = NumericsError(
            f"gradient norm of group {first.group} sample {first.sample} is {norms[bad[0]]}, expected a finite number "
            f"({bad.size} such samples of this rank); look for log-probabilities of minus infinity"
        )
    fail_together(failure, "gradient norms of samples")
    return norms


def _backward(train_step: TrainStep, mini: MiniBatch, index: int) -> None:
    """Leave the gradient of one micro-batch in the model. Copies without loss fill up the interleaved schedule."""
    num = train_step.config.parallel.micro_batch_multiple

    def weigh(
        position: int, batch: TrainBatch, logprobs: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Stat]]:
        counted = batch.loss_mask.to(logprobs) if position == 0 else torch.zeros_like(logprobs)
        return counted, {}

    replay, routes = train_step.policy.replay, mini.routes
    # min_agreement=0: one response is too few tokens to check whether routes belong to it.
    given = None if routes is None else [routes[index]] * num
    with nullcontext() if replay is None or given is None else replay.replay(given, min_agreement=0.0):
        forward.run(
            train_step.policy.chunks,
            [mini.micro_batches[index]] * num,
            temperature=train_step.config.rollout.temperature,
            vocab_size=train_step.policy.shape.vocab_size,
            coefficients=weigh,
        )
