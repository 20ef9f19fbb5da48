"""Squared gradient norms of single sequences on a block of parameters, from one pass over packed micro-batches.

``find_block`` finds the parameters, ``measuring`` prepares passes that train nothing, ``SequenceSquares`` measures.

A linear layer's gradient of a sequence is ``sum_t g_t a_t^T``, with inputs a_t and gradients g_t of the outputs. Every
backward pass has both factors: no sequence needs a separate pass (Goodfellow, arXiv 1510.01799; "ghost norms", Li et
al., arXiv 2110.05679). An embedding adds up g_t by token. If the output layer shares its weight with the embedding, the
product of the two gradients comes on top.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megarl.core.devices import to_device
from megarl.core.ratios import segment_ids
from megarl.errors import ConfigError
from megarl.megatron.distributed import largest, model_group
from megarl.megatron.passes.micro_batches import MicroBatch, gather_slots
from megarl.megatron.passes.weight_gradient import WeightGradient, outer_squares
from megarl.megatron.policy import Policy
from megarl.replay.megatron_state import cp_position, tp_position, unwrap

EMBEDDING, OUTPUT_LAYER = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True, slots=True)
class Block:
    """What is measured. The first two are equal on all ranks, and both or neither are set with tied embeddings."""

    embedding: bool
    output: bool
    layers: tuple[torch.nn.Module, ...]
    """The rank's linear layers and routers with measured weights."""


def find_block(policy: Policy, block: str) -> Block:
    """Return the parameters of ``block``; a collective call of the model copy.

    block: "embedding", "output_layer" (equal with tied embeddings), or a regular expression to search in Megatron's
    parameter names, with layers counted from 0 over all pipeline stages. ConfigError for a wrong regular expression,
    and for a match of no parameter, of experts, or of weights outside linear layers.
    """
    tied = policy.shape.tied_embeddings
    output = EMBEDDING if tied else OUTPUT_LAYER
    try:
        pattern = re.compile({"embedding": re.escape(EMBEDDING), "output_layer": re.escape(output)}.get(block, block))
    except re.error as error:
        raise ConfigError(f"parameter block {block!r} is no regular expression: {error}") from error
    modules = [entry for chunk in policy.chunks for entry in _named_modules(unwrap(chunk))]
    matches = [(name, module) for name, module in modules if pattern.search(name)]
    linear = [(name, module) for name, module in matches if name not in (EMBEDDING, OUTPUT_LAYER)]
    experts = [name for name, _ in matches if ".experts." in name]
    if largest(len(experts), model_group()):
        raise ConfigError(
            f"parameter block {block!r} matches parameters of experts{f', as {experts[0]}' if experts else ''}: their "
            "gradients mix the samples of several ranks; expected parameters outside of experts"
        )
    odd = [f", as {name}" for name, module in linear if not (name.endswith(".weight") and _is_linear(module))]
    if largest(len(odd), model_group()):
        raise ConfigError(
            f"parameter block {block!r} matches other parameters{''.join(odd[:1])}: expected weights of the embedding, "
            "the output layer, Megatron's own linear layers (not Transformer Engine's) and routers"
        )
    if not largest(len(matches), model_group()):
        raise ConfigError(
            f'parameter block {block!r} matches no parameter; expected "embedding", "output_layer", or a regular '
            f"expression on names such as {', '.join(name for name, _ in modules[:3])}"
        )
    layers = tuple(module for _, module in linear)
    return Block(bool(pattern.search(EMBEDDING)), bool(pattern.search(output)), layers)


def _is_linear(module: torch.nn.Module) -> bool:
    kinds = (ColumnParallelLinear, RowParallelLinear, TopKRouter)
    return isinstance(module, kinds) and not getattr(module, "gather_output", False)


def _named_modules(gpt: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """(parameter, its module). Names as without pipeline stages: global layer numbers, a single name for both copies of
    tied embeddings.
    """
    for prefix, module in gpt.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if getattr(parameter, "shared", False):
                name = EMBEDDING
            elif layer := re.match(r"decoder\.layers\.(\d+)\.", name):
                number = gpt.decoder.layers[int(layer[1])].layer_number - 1
                name = f"decoder.layers.{number}.{name[layer.end() :]}"
            yield name, module


@contextmanager
def measuring(policy: Policy) -> Iterator[None]:
    """Inside, backward passes compute no weight gradients but the embedding's.

    Nothing is reduced over data-parallel ranks, and routers add no balancing loss. Afterwards all gradients are zero,
    and the routers' counts for the expert bias are restored.
    """
    config = policy.megatron_config
    names = ("finalize_model_grads_func", "no_sync_func", "grad_scale_func")
    originals = {name: getattr(config, name) for name in names}
    # The embedding's gradient makes gradients flow through every layer and activation checkpointing.
    embeddings = set(map(id, _embeddings(policy)))
    frozen = [p for chunk in policy.chunks for p in chunk.parameters() if p.requires_grad and id(p) not in embeddings]
    policy.zero_grad()
    hooked = [chunk for chunk in policy.chunks if chunk.use_forward_hook]
    for chunk in hooked:  # their hooks gather weights, and assert that all weights are trained
        chunk.disable_forward_pre_hook()
    try:
        vars(config).update(dict.fromkeys(names))
        for parameter in frozen:
            parameter.requires_grad_(False)
        with ExitStack() as stack:
            for context in (*(chunk.no_sync() for chunk in policy.chunks), _quiet_routers(policy)):
                stack.enter_context(context)
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
        for chunk in hooked:
            chunk.enable_forward_pre_hook()
        vars(config).update(originals)
        policy.zero_grad()


def embedding_square(policy: Policy) -> float:
    """Return the squared norm of the embedding's gradient, summed over all ranks; collective, inside ``measuring``."""
    total = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
    is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    for weight in _embeddings(policy):
        gradient: torch.Tensor = vars(weight)["main_grad"]
        if getattr(weight, "shared_embedding", False):
            dist.all_reduce(gradient, group=parallel_state.get_embedding_group())
        dist.all_reduce(gradient, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        if is_first and not parallel_state.get_context_parallel_rank():
            total += torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2
    dist.all_reduce(total, group=model_group())
    return float(total)


def _embeddings(policy: Policy) -> list[torch.nn.Parameter]:
    """Return the embedding, or its copy on the last stage."""
    chunks = [unwrap(chunk) for chunk in policy.chunks]
    weights = [gpt.embedding.word_embeddings.weight for gpt in chunks if gpt.pre_process]
    return weights or [p for gpt in chunks for p in gpt.parameters() if getattr(p, "shared_embedding", False)]


@contextmanager
def _quiet_routers(policy: Policy) -> Iterator[None]:
    """Keep routers in evaluation mode, where they add no losses; restore their counts for the expert bias."""
    routers = [m for chunk in policy.chunks for m in chunk.modules() if isinstance(m, TopKRouter)]
    counts = [(count, count.clone()) for r in routers if (count := r.local_tokens_per_expert) is not None]
    # A hook, because every pass sets the whole model to training mode.
    handles = [router.register_forward_pre_hook(lambda module, _: module.eval() and None) for router in routers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for count, original in counts:
            count.copy_(original)


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
