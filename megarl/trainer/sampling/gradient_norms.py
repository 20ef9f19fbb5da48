"""Gradient norms of single samples, for GVM (``megarl.core.sampling.gvm``)."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.core.devices import to_device
from megarl.core.measures import variance_metrics
from megarl.core.metrics import Stat
from megarl.core.types import Rollout, TrainBatch
from megarl.errors import NumericsError
from megarl.megatron.distributed import dp_size, fail_together, gather_rows, largest, model_group
from megarl.megatron.gradients import SequenceSquares, embedding_square, find_block, measuring
from megarl.replay import Recording
from megarl.trainer.mini_batch import MiniBatch, make_rollout
from megarl.trainer.passes import run_pass
from megarl.trainer.sampling.step_rollouts import StepRollouts
from megarl.trainer.step import TrainStep

LEAST = 1e-3
"""Least advantage for measuring a gradient."""


def gradient_norms(train_step: TrainStep, rollouts: Sequence[Rollout], block: str) -> np.ndarray:
    """Return ``||d/d(block) sum_t log pi(y_t)||_2`` by rollout, float64 [n], on every rank of the model copy.

    The sum is over the rollout's loss tokens, without division, at the temperature of the rollout. Routes are replayed
    if ``train.replay`` is "r3", else the routers choose. block: see ``find_block``; the released GVM code uses
    "embedding". Products are summed in fp32.

    A collective call. The ranks of a model copy hold equal rollouts, as for ``TrainStep.prepare``; numbers of rollouts
    may differ between copies. The cost is a forward and backward pass over packed micro-batches
    (``megarl.megatron.gradients``). Weights and optimizer do not change; gradients are zero afterwards. Raises
    ConfigError for an unknown block, NumericsError naming a rollout with a norm that is not finite, and the errors of
    ``prepare``.
    """
    return _measure(train_step, rollouts, block, np.ones(len(rollouts)))[0]


def gradient_variance(train_step: TrainStep, step: StepRollouts) -> dict[str, Stat]:
    """Return ``variance_metrics`` of the training responses, on the embedding, at the present weights.

    A collective call: a forward and backward pass. Empty for fewer than two responses.
    """
    minis = zip(step.mini_batches, step.advantages, step.judged.owned, strict=True)
    responses = [response for mini in minis for response in zip(*mini, strict=True) if response[0].loss_mask.any()]
    advantages = np.array([float(advantage) for _, advantage, _ in responses])
    # Without an advantage the norm cannot be measured: count a thousandth of the response.
    scales = np.where(np.abs(advantages) < LEAST, LEAST, advantages)
    norms, square_of_sum = _measure(train_step, [rollout for rollout, *_ in responses], "embedding", scales, total=True)
    rows = np.column_stack([np.array([row for *_, row in responses]), scales, (norms / scales) ** 2])
    table = gather_rows(rows if not model_group().rank() else rows[:0])
    if len(table) < 2:
        return {}
    column, scales, squares = table.T
    row = column.astype(np.int64)
    return variance_metrics(step.judged.rewards[row], step.judged.groups[row], scales, squares, square_of_sum)


def _measure(
    train_step: TrainStep, rollouts: Sequence[Rollout], block: str, scales: np.ndarray, total: bool = False
) -> tuple[np.ndarray, float]:
    """Norms of the rollouts' gradients times ``scales``; with ``total`` the square of their sum over all ranks, of the
    embedding."""
    policy, multiple = train_step.policy, train_step.config.parallel.micro_batch_multiple
    target = find_block(policy, block)
    num_longest = largest(len(rollouts), parallel_state.get_data_parallel_group())
    if num_longest == 0:
        return np.zeros(0), 0.0
    # Dummies, two tokens without loss, make as many sequences on all copies, and enough for all micro-batches.
    size = -(-num_longest // multiple) * multiple
    experts = np.broadcast_to(
        np.arange(policy.shape.topk, dtype=np.uint8), (2, len(policy.shape.moe_layers), policy.shape.topk)
    )
    dummy = replace(make_rollout(np.zeros(2)), routed_experts=experts, routed_mask=np.ones(2, bool))
    padded = [*rollouts, *[dummy] * (size - len(rollouts))]
    if train_step.config.train.replay != "r3":  # no comparison with the routes is made
        padded = [replace(rollout, routed_experts=None, routed_mask=None) for rollout in padded]
    mini = train_step.prepare(padded, np.append(scales, np.zeros(size - len(rollouts))))
    measured = SequenceSquares(policy, target, mini.micro_batches, size)
    tied = target.embedding and target.output
    # With tied embeddings, hidden states of a window are kept until all its passes are done.
    window = 2 * multiple if tied else len(mini.micro_batches)
    with measuring(policy), measured.watch():
        for start in range(0, len(mini.micro_batches), window):
            _backward(train_step, mini, slice(start, start + window), measured)
            measured.add_products()
        square = embedding_square(policy) if total else 0.0
    dist.all_reduce(measured.values, group=model_group())
    # forward.run scales the loss for Megatron's average over the ranks. No average happens here.
    averaged_over = dp_size() * parallel_state.get_context_parallel_world_size()
    norms = measured.values.clamp(min=0).sqrt().cpu().numpy()[: len(rollouts)] / averaged_over
    failure: NumericsError | None = None
    if len(bad := np.flatnonzero(~np.isfinite(norms))):
        first = rollouts[int(bad[0])]
        failure = NumericsError(
            f"gradient norm of group {first.group} sample {first.sample} is {norms[bad[0]]}, expected a finite number "
            f"({bad.size} such samples of this rank); look for log-probabilities of minus infinity"
        )
    fail_together(failure, "gradient norms of samples")
    return norms, square / averaged_over**2


def _backward(train_step: TrainStep, mini: MiniBatch, window: slice, measured: SequenceSquares) -> None:
    def weigh(
        _: int, batch: TrainBatch, logprobs: torch.Tensor, __: torch.Tensor
    ) -> tuple[torch.Tensor, None, dict[str, Stat]]:
        weights = torch.where(batch.loss_mask, batch.advantages, 0.0)
        return to_device(weights.to(logprobs.dtype), logprobs.device), None, {}

    policy, part = train_step.policy, replace(mini, micro_batches=mini.micro_batches[window])
    routing = nullcontext()
    if policy.replay is not None and mini.routes is not None:
        routes = Recording(mini.routes[window])  # not checked again, as in ``TrainStep``
        # min_agreement=0: too few tokens to check the routes; the training step checks routes.
        routing = policy.replay.replay(routes, min_agreement=0.0)
    run_pass(policy, part, routing, coefficients=weigh, on_logprobs=measured.on_logprobs)
