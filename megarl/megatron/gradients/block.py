"""The parameters of ``sequence_squares``, and passes that train nothing."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.router import TopKRouter

from megarl.errors import ConfigError
from megarl.megatron.distributed import largest, model_group
from megarl.megatron.policy import Policy
from megarl.replay.megatron_state import unwrap

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
