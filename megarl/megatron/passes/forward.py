"""Runs micro-batches through Megatron's schedules: log-probabilities of given tokens, and the backward pass of a step.

Every objective is given as coefficients per token: the loss of a micro-batch is ``-(coefficients * logprobs).sum()``,
less ``(entropy_values * entropies).sum()`` where the objective has an entropy term, and the gradient is the sum over
all micro-batches and ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import mappings
from torch import Tensor

from megarl.core.devices import to_device
from megarl.core.metrics import Stat
from megarl.core.parallel import sequence_parallel_slice
from megarl.core.types import TrainBatch
from megarl.megatron.passes.logprobs import linear_logprobs
from megarl.megatron.passes.micro_batches import MicroBatch, to_slots, to_tokens
from megarl.replay.megatron_state import Replaced, tp_position, unwrap

CoefficientFn = Callable[[int, TrainBatch, Tensor, Tensor], tuple[Tensor, Tensor | None, dict[str, Stat]]]
"""(index of the micro-batch, columns, logprobs [T], entropies [T], detached) -> (coefficients [T], entropy_values [T],
metrics): dJ/dlogprobs, and dJ/dentropies or None.

Called on all tensor-parallel ranks of the last pipeline stage, with equal arguments.
"""


@dataclass(frozen=True, slots=True)
class MicroOutput:
    """Output of the last pipeline stage for a micro-batch, aligned with the T tokens."""

    logprobs: Tensor
    """float32 [T], 0 for the first token of each sequence; over the kept sets of the batch, if any."""
    entropies: Tensor
    """float32 [T], of the distribution that the token was drawn from; natural logarithm, full vocabulary."""
    metrics: dict[str, Stat]


def by_mask(divisor: float = 1.0) -> CoefficientFn:
    """Return coefficients of 1 / ``divisor`` for every loss token: a weighted log-likelihood."""

    def weigh(_: int, batch: TrainBatch, logprobs: Tensor, __: Tensor) -> tuple[Tensor, None, dict[str, Stat]]:
        return to_device(batch.loss_mask.to(logprobs.dtype), logprobs.device) / divisor, None, {}

    return weigh


@contextmanager
def _hidden_states(model: torch.nn.Module) -> Iterator[GPTModel]:
    """Inside, the model's output layer returns the input, to avoid whole logits."""
    gpt: GPTModel = unwrap(model)
    layer = getattr(gpt, "output_layer", None)  # on the last stage

    def pass_on(hidden: Tensor, weight: object = None, runtime_gather_output: object = None) -> tuple[Tensor, None]:
        return hidden, None

    # The layer is still called, because Megatron's data-parallel hooks are registered on it.
    with nullcontext() if layer is None else Replaced(layer, forward=pass_on):
        yield gpt


def _padding_mask(gpt: GPTModel, micro: MicroBatch) -> Tensor | None:
    """bool [1, S]. Later stages get the sequence-parallel slice, because Megatron 0.16.1 does not slice the mask."""
    mask = micro.padding_mask
    if mask is None or gpt.pre_process or not gpt.config.sequence_parallel:
        return mask
    return mask[:, sequence_parallel_slice(mask.size(1), *tp_position())]


def _logprobs(
    gpt: GPTModel, hidden: Tensor, micro: MicroBatch, temperature: float, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies) by position, fp32 [S] each, from hidden [S / tp or S, H]."""
    group = parallel_state.get_tensor_model_parallel_group()
    if gpt.config.sequence_parallel:
        hidden = mappings.gather_from_sequence_parallel_region(hidden, group=group)
    else:
        hidden = mappings.copy_to_tensor_model_parallel_region(hidden, group)
    is_tied = gpt.share_embeddings_and_output_weights
    weight = gpt.shared_embedding_or_output_weight() if is_tied else gpt.output_layer.weight
    assert weight is not None  # it may be None on earlier stages
    return linear_logprobs(hidden, weight, micro.labels, temperature, vocab_size, group, micro.kept)


def _weigh(weights: Tensor, column: Tensor) -> Tensor:
    """``-(weights * column).sum()``."""
    # Skip weights of 0, because 0 times a log-probability of -inf is NaN.
    return -(weights * torch.where(weights != 0, column, 0.0)).sum()


def run(
    chunks: Sequence[torch.nn.Module], micro_batches: Sequence[MicroBatch], *,
    temperature: float, vocab_size: int, coefficients: CoefficientFn | None = None,
    on_micro_batch: Callable[[], None] | None = None,
) -> list[MicroOutput]:  # fmt: skip
    """Forward all micro-batches; with ``coefficients`` also backward, which adds gradients to the model's.

    Returns a MicroOutput per micro-batch on the last pipeline stage, an empty list elsewhere.
    """
    training = coefficients is not None
    # Megatron averages the loss over both.
    undo_average = len(micro_batches) * parallel_state.get_data_parallel_world_size()

    def loss(index: int, gpt: GPTModel, hidden: Tensor) -> tuple[Tensor, MicroOutput]:
        micro = micro_batches[index]
        by_slot, entropy_by_slot = _logprobs(gpt, hidden, micro, temperature, vocab_size)
        logprobs, entropies = (to_tokens(column.detach(), micro) for column in (by_slot, entropy_by_slot))
        metrics: dict[str, Stat] = {}
        value = by_slot.sum() * 0.0
        if coefficients is not None:
            weights, entropy_weights, metrics = coefficients(index, micro.batch, logprobs, entropies)
            value, reported = _weigh(to_slots(weights.detach(), micro), by_slot), _weigh(weights, logprobs)
            if entropy_weights is not None:
                value = value + _weigh(to_slots(entropy_weights.detach(), micro), entropy_by_slot)
                reported = reported + _weigh(entropy_weights, entropies)
            metrics = {**metrics, "loss": Stat.total(reported)}
        if on_micro_batch is not None:
            on_micro_batch()
        return value * undo_average, MicroOutput(logprobs, entropies, metrics)

    def forward_step(iterator: Iterator[tuple[int, MicroBatch]], model: torch.nn.Module) -> tuple[Any, Any]:
        index, micro = next(iterator)
        with _hidden_states(model) as gpt:
            masks = {"attention_mask": None, "padding_mask": _padding_mask(gpt, micro)}
            inputs = {"input_ids": micro.input_ids, "position_ids": torch.zeros_like(micro.input_ids)}
            output = model(**inputs, **masks, packed_seq_params=micro.packing)
        return output, lambda hidden: loss(index, gpt, hidden[0])

    iterators, length = [enumerate(micro_batches) for _ in chunks], micro_batches[0].num_slots
    for chunk in chunks:
        if chunk.training != training:  # a walk through all modules
            chunk.train(training)
    with torch.set_grad_enabled(training):
        sizes = {"num_microbatches": len(micro_batches), "micro_batch_size": 1, "forward_only": not training}
        data = {"data_iterator": iterators, "model": list(chunks)}
        data = data if len(chunks) > 1 else {name: of_chunks[0] for name, of_chunks in data.items()}
        return get_forward_backward_func()(forward_step_func=forward_step, seq_length=length, **sizes, **data)
