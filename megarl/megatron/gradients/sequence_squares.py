"""Squared gradient norms of single sequences on a block of parameters, from one pass over packed micro-batches.

A linear layer's gradient of a sequence is ``sum_t g_t a_t^T``, with inputs a_t and gradients g_t of the outputs. Every
backward pass has both factors: no sequence needs a separate pass (Goodfellow, arXiv 1510.01799; "ghost norms", Li et
al., arXiv 2110.05679). An embedding adds up g_t by token. If the output layer shares its weight with the embedding, the
product of the two gradients comes on top.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megarl.core.devices import to_device
from megarl.core.ratios import segment_ids
from megarl.megatron.gradients.block import Block
from megarl.megatron.passes.logprobs import WeightGradient, outer_squares
from megarl.megatron.passes.micro_batches import MicroBatch, gather_slots
from megarl.megatron.policy import Policy
from megarl.replay.megatron_state import cp_position, tp_position, unwrap


class SequenceSquares:
    """Adds up, inside ``watch``, this rank's parts of the squared norms; all ranks of a model copy have the whole.

    Backward passes must take the micro-batches once and in order, as all of Megatron's schedules do.
    """

    def __init__(self, policy: Policy, block: Block, micro_batches: Sequence[MicroBatch], num_sequences: int) -> None:
        self._policy, self._block, self._micro_batches = policy, block, micro_batches
        device = torch.cuda.current_device()
        squares = torch.zeros(num_sequences + 1, dtype=torch.float64, device=device)  # the last is padding's
        self._squares, self.values = squares, squares[:-1]
        """``values``: float64 [num_sequences], by place in the mini-batch."""
        self._places = [to_device(torch.tensor([*micro.sequences, num_sequences]), device) for micro in micro_batches]
        self._outputs = count()
        # With tied embeddings, by micro-batch: [S, H] of both uses of the weight, until ``add_products``.
        self._embedded: dict[int, Tensor] = {}
        self._predicted: dict[int, Tensor] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Inside, backward passes are measured."""
        with ExitStack() as stack:
            for gpt in map(unwrap, self._policy.chunks):
                if self._block.embedding and gpt.pre_process:
                    stack.enter_context(_tapped(gpt.embedding, "forward", self._add_embedding))
            for layer in self._block.layers:
                is_router = isinstance(layer, TopKRouter)  # a copy of it is on every tensor-parallel rank
                add = partial(self._add_layer, is_router and tp_position()[1] > 0)
                stack.enter_context(_tapped(layer, "gating" if is_router else "forward", add))
            yield

    def on_logprobs(self, logprobs: Tensor) -> None:
        """Measure the output layer, if in the block, in the backward pass of a result [S] of ``linear_logprobs``."""
        if self._block.output:
            weight = WeightGradient(logprobs)
            logprobs.register_hook(lambda gradient: self._add_output(next(self._outputs), weight, gradient))

    def add_products(self) -> None:
        """Add twice the product of the embedding's and the output layer's gradients, for the passes so far.

        A collective call of the model copy. Adds nothing without tied embeddings.
        """
        if not (self._block.embedding and self._block.output):
            return
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        first, last = self._embedded, self._predicted  # of the first stage, and of the last one
        for index in sorted(first.keys() | last.keys()):
            predicted = last.pop(index, None)
            embedded = first.pop(index) if predicted is None or index in first else torch.zeros_like(predicted)
            if stages > 1:
                dist.all_reduce(embedded, group=parallel_state.get_embedding_group())
            if predicted is not None:
                products = 2 * (embedded * predicted).sum(1, dtype=torch.float64)
                for slots, places in self._buckets(index):
                    self._squares.index_add_(0, places, products[slots].sum(1))

    def _add_embedding(self, index: int, _: Tensor | None, gradient: Tensor) -> None:
        micro, batch = self._micro_batches[index], self._micro_batches[index].batch
        rows = self._whole(gradient, micro).float()
        if self._block.output:
            self._embedded[index] = rows
        if tp_position()[1] or cp_position()[1]:
            return  # every rank has the whole
        sequence = segment_ids(batch.cu_seqlens, batch.num_tokens)
        pairs, pair_of = torch.unique(torch.stack([sequence, batch.tokens.long()]), dim=1, return_inverse=True)
        sums = rows.new_zeros(pairs.size(1), rows.size(1))
        sums.index_add_(0, to_device(pair_of, rows.device), rows[micro.slots])
        places = self._places[index][to_device(pairs[0], rows.device)]
        self._squares.index_add_(0, places, sums.square().sum(1, dtype=torch.float64))

    def _add_layer(self, is_copy: bool, index: int, inputs: Tensor | None, gradient: Tensor) -> None:
        assert inputs is not None, "layers take their input as the first argument"
        input_rows, gradient_rows = (
            self._whole(share, self._micro_batches[index]).float() for share in (inputs, gradient)
        )
        for slots, places in () if is_copy else self._buckets(index):
            self._squares.index_add_(0, places, outer_squares(input_rows[slots], gradient_rows[slots]))

    def _add_output(self, index: int, weight: WeightGradient, gradient: Tensor) -> None:
        micro = self._micro_batches[index]
        weight.complete(gradient, lambda share: gather_slots(share, micro))
        buckets = [*self._buckets(index)]
        for slots, places in buckets:
            self._squares.index_add_(0, places, weight.squares(slots))
        if self._block.embedding:
            rows, tokens = torch.zeros_like(weight.hidden, dtype=torch.float32), gather_slots(micro.input_ids[0], micro)
            for slots, _ in buckets:
                rows[slots] = weight.at_tokens(slots, tokens)
            self._predicted[index] = rows

    def _whole(self, share: Tensor, micro: MicroBatch) -> Tensor:
        """Return [S, ...] in slot order, from the share of each rank; a collective call."""
        return gather_slots(share.detach().flatten(0, -2), micro)

    def _buckets(self, index: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This context-parallel rank's share of the sequences: (slots [n, length], places in ``values`` [n])."""
        (ranks, rank), packing = cp_position(), self._micro_batches[index].packing
        ends = packing.cu_seqlens_q[1:].long()
        for bucket in packing.length_buckets:
            slots = bucket[rank::ranks]
            if len(slots):
                # The alignment padding at the end is a sequence too, the last one.
                yield slots, self._places[index][torch.bucketize(slots[:, 0].contiguous(), ends, right=True)]


@contextmanager
def _tapped(module: torch.nn.Module, method: str, add: Callable[[int, Tensor | None, Tensor], None]) -> Iterator[None]:
    """Inside, the n-th gradient of the method's output calls ``add`` with n, the first argument, and the gradient.

    Calls without gradient, such as the first pass of a checkpoint, are left out.
    """
    numbers, original, is_instance_attribute = count(), getattr(module, method), method in vars(module)

    def tapped(*arguments: Any, **options: Any) -> Any:
        output = original(*arguments, **options)
        tensor = output[0] if isinstance(output, tuple) else output
        if tensor.requires_grad:
            inputs = arguments[0].detach() if arguments else None
            tensor.register_hook(lambda gradient: add(next(numbers), inputs, gradient))
        return output

    setattr(module, method, tapped)
    try:
        yield
    finally:
        setattr(module, method, original) if is_instance_attribute else delattr(module, method)
