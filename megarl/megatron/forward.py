"""Runs micro-batches through Megatron's schedules: log-probabilities of given tokens, and the step's backward pass.

Every objective enters as per-token coefficients: the loss of a micro-batch is ``-(coefficients * logprobs).sum()``, and
the gradients of all micro-batches and ranks add up, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

from megarl.core.metrics import Stat
from megarl.core.types import TrainBatch
from megarl.megatron.batches import MicroBatch, to_tokens

CoefficientFn = Callable[[int, TrainBatch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, dict[str, Stat]]]
"""(index of the micro-batch, its columns, logprobs [T], entropies [T]; both detached) -> (coefficients [T], metrics).

Called on the last pipeline stage only; on each of its tensor-parallel ranks, with equal arguments."""


@dataclass(frozen=True, slots=True)
class MicroOutput:
    """What the last pipeline stage knows about one micro-batch, aligned with its T tokens."""

    logprobs: torch.Tensor
    """float32 [T], 0 for the first token of each sequence."""
    entropies: torch.Tensor
    """float32 [T], of the distribution that the token was drawn from; natural logarithm, full vocabulary."""
    metrics: dict[str, Stat]


def vocab_parallel_logprobs(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, vocab_size: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of a softmax whose vocabulary is split over ``group``.

    ``logprob = z_label - log sum_w exp z_w`` and ``entropy = -sum_w p_w log p_w`` with ``z = logits / temperature``.
    logits [S, V / tp], labels int64 [S]; returns fp32 [S] (with gradient) and fp32 [S] (without). Columns beyond
    ``vocab_size`` pad the vocabulary and have probability 0.
    """
    scaled = logits.float() / temperature
    width, first = scaled.size(1), scaled.size(1) * group.rank()
    if first + width > vocab_size:
        columns = torch.arange(first, first + width, device=scaled.device)
        scaled = scaled.masked_fill(columns >= vocab_size, float("-inf"))
    largest = scaled.detach().amax(1)
    if group.size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    shifted = scaled - largest[:, None]
    exponentials = shifted.exp()
    log_sum = reduce_from_tensor_model_parallel_region(exponentials.sum(1), group=group).log()
    local = labels - first
    here = (local >= 0) & (local < width)
    picked = shifted.gather(1, local.clamp(0, width - 1)[:, None]).squeeze(1)
    picked = reduce_from_tensor_model_parallel_region(torch.where(here, picked, 0.0), group=group)
    with torch.no_grad():
        finite = torch.where(exponentials > 0, shifted, 0.0)
        weighted = (exponentials * finite).sum(1)
        if group.size() > 1:
            dist.all_reduce(weighted, group=group)
        entropies = log_sum - weighted / log_sum.exp()
    return picked - log_sum, entropies


def run(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    *,
    temperature: float,
    vocab_size: int,
    coefficients: CoefficientFn | None = None,
    on_micro_batch: Callable[[], None] | None = None,
) -> list[MicroOutput]:
    """Forward all micro-batches; with ``coefficients`` also backward, leaving summed gradients in the model.

    Returns one MicroOutput per micro-batch on the last pipeline stage, an empty list on the others. The gradient is
    that of ``-(coefficients * logprobs).sum()`` over all micro-batches and all data-parallel ranks: Megatron's averages
    over both are undone here.
    """
    training = coefficients is not None
    group = parallel_state.get_tensor_model_parallel_group()
    undo_average = len(micro_batches) * parallel_state.get_data_parallel_world_size()

    def forward_step(iterator: Iterator[tuple[int, MicroBatch]], model: torch.nn.Module) -> tuple[Any, Any]:
        index, micro = next(iterator)
        output = model(
            input_ids=micro.input_ids,
            position_ids=torch.zeros_like(micro.input_ids),
            attention_mask=None,
            packed_seq_params=micro.packing,
            padding_mask=micro.padding_mask,
        )

        def loss(logits: torch.Tensor) -> tuple[torch.Tensor, MicroOutput]:
            by_position = vocab_parallel_logprobs(logits[0], micro.labels, temperature, vocab_size, group)
            logprobs, entropies = (to_tokens(column, micro.batch) for column in by_position)
            metrics: dict[str, Stat] = {}
            value = logprobs.sum() * 0.0
            if coefficients is not None:
                weights, metrics = coefficients(index, micro.batch, logprobs.detach(), entropies)
                kept = torch.where(weights != 0, logprobs, 0.0)
                value = -(weights.detach() * kept).sum()
                metrics = {**metrics, "loss": Stat.total(value.detach())}
            if on_micro_batch is not None:
                on_micro_batch()
            return value * undo_average, MicroOutput(logprobs.detach(), entropies, metrics)

        return output, loss

    iterators = [enumerate(micro_batches) for _ in chunks]
    for chunk in chunks:
        chunk.train(training)
    with torch.set_grad_enabled(training):
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(i) for i in iterators] if len(chunks) > 1 else iterators[0],
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=micro_batches[0].num_slots,
            micro_batch_size=1,
            forward_only=not training,
        )
    return outputs
