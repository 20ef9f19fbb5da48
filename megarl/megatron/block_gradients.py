"""Gradients of a few parameters on this model copy: no other weight gradients, no sum over data-parallel ranks.

Inside ``on_block``, passes of ``forward.run`` write to ``main_grad`` only what this rank computed. ``local_square``
completes that over the ranks of the model copy, by the rules of Megatron's ``finalize_model_grads``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.errors import ConfigError
from megarl.megatron.distributed import largest, model_group
from megarl.megatron.model import unwrap
from megarl.megatron.policy import Policy

EMBEDDING, OUTPUT_LAYER = "embedding.word_embeddings.weight", "output_layer.weight"


def block_parameters(policy: Policy, block: str) -> list[torch.nn.Parameter]:
    """The parameters of ``block`` on this rank, in the model's order; a collective call of the model copy.

    block: "embedding", "output_layer" (with tied embeddings the same parameter), or a regular expression that is
    searched for in Megatron's parameter names, with layers counted from 0 over all pipeline stages. ConfigError if it
    is no regular expression, or matches no parameter or an expert's.
    """
    output = EMBEDDING if policy.shape.tied_embeddings else OUTPUT_LAYER
    try:
        pattern = re.compile({"embedding": re.escape(EMBEDDING), "output_layer": re.escape(output)}.get(block, block))
    except re.error as error:
        raise ConfigError(f"parameter block {block!r} is no regular expression: {error}") from error
    named = [pair for chunk in policy.chunks for pair in _named_parameters(unwrap(chunk))]
    found = [(name, parameter) for name, parameter in named if pattern.search(name)]
    experts = [name for name, _ in found if ".experts." in name]
    if largest(len(experts), model_group()):
        raise ConfigError(
            f"parameter block {block!r} matches parameters of experts{f', as {experts[0]}' if experts else ''}: their "
            "gradients mix the samples of several ranks; expected parameters outside of experts"
        )
    if not largest(len(found), model_group()):
        raise ConfigError(
            f'parameter block {block!r} matches no parameter; expected "embedding", "output_layer", or a regular '
            f"expression on names such as {', '.join(name for name, _ in named[:3])}"
        )
    return [parameter for _, parameter in found]


def _named_parameters(gpt: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Names as without pipeline stages: global layer numbers, one name for both copies of tied embeddings."""
    for name, parameter in gpt.named_parameters():
        if getattr(parameter, "shared", False):
            name = EMBEDDING
        elif layer := re.match(r"decoder\.layers\.(\d+)\.", name):
            number = gpt.decoder.layers[int(layer[1])].layer_number - 1
            name = f"decoder.layers.{number}.{name[layer.end() :]}"
        yield name, parameter


@contextmanager
def on_block(policy: Policy, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Inside, backward passes add only to the ``main_grad`` of these parameters and of the embedding.

    Nothing is reduced over data-parallel ranks, and routers add no balancing loss. Afterwards all gradients are zero,
    and the routers' counts for the expert bias are restored.
    """
    config = policy.megatron_config
    names = ("finalize_model_grads_func", "no_sync_func", "grad_scale_func")
    kept = {name: getattr(config, name) for name in names}
    # The embedding needs a gradient so that gradients flow through every layer and its activation checkpointing.
    embeddings = [gpt.embedding.word_embeddings.weight for gpt in map(unwrap, policy.chunks) if gpt.pre_process]
    wanted = set(map(id, [*parameters, *embeddings]))
    frozen = [p for chunk in policy.chunks for p in chunk.parameters() if p.requires_grad and id(p) not in wanted]
    policy.zero_grad()
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
        vars(config).update(kept)
        policy.zero_grad()


@contextmanager
def _quiet_routers(policy: Policy) -> Iterator[None]:
    """Keep routers in evaluation mode, where they add no losses; restore their counts for the expert bias."""
    routers = [m for chunk in policy.chunks for m in chunk.modules() if isinstance(m, TopKRouter)]
    counts = [None if r.local_tokens_per_expert is None else r.local_tokens_per_expert.clone() for r in routers]
    # A hook, because every pass sets the whole model to training mode.
    handles = [router.register_forward_pre_hook(lambda one, _: one.eval() and None) for router in routers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for router, count in zip(routers, counts, strict=True):
            if count is not None:
                router.local_tokens_per_expert.copy_(count)


def local_square(parameters: Sequence[torch.nn.Parameter], config: TransformerConfig) -> torch.Tensor:
    """float64 scalar: this rank's part of the squared norm of the gradient, which is reset to zero.

    The parts of all ranks of a model copy add up to the whole. A collective call of the copy.
    """
    context, tensor = parallel_state.get_context_parallel_group(), parallel_state.get_tensor_model_parallel_group()
    total = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
    for parameter in parameters:
        gradient: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
        if getattr(parameter, "shared_embedding", False):
            dist.all_reduce(gradient, group=parallel_state.get_embedding_group())
        if context.size() > 1:
            dist.all_reduce(gradient, group=context)
        sharded = getattr(parameter, "tensor_model_parallel", False)
        # Of these replicated parameters, tensor-parallel ranks see different tokens.
        averaged = getattr(parameter, "average_gradients_across_tp_domain", False)
        summed = config.sequence_parallel and getattr(parameter, "sequence_parallel", False)
        if tensor.size() > 1 and not sharded and (averaged or summed):
            dist.all_reduce(gradient, op=dist.ReduceOp.AVG if averaged else dist.ReduceOp.SUM, group=tensor)
        is_copy = getattr(parameter, "shared", False) or context.rank() or (tensor.rank() and not sharded)
        if not is_copy:
            total += torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2
        gradient.zero_()
    return total
