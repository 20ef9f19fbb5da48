"""Gradient norms of single samples, for GVM (``megarl.core.sampling.gvm``): a backward pass for each sample.

``find_block`` finds the parameters, ``measuring`` prepares passes that train nothing, ``gradient_norms`` measures.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn import Parameter

from megarl.core.packing import drop_routes
from megarl.core.types import Rollout
from megarl.errors import NumericsError, refusal
from megarl.megatron.distributed import dp_size, fail_together, largest, model_group
from megarl.megatron.passes.forward import by_mask
from megarl.megatron.policy import Policy
from megarl.replay import Recording
from megarl.replay.megatron_state import Replaced, unwrap
from megarl.trainer.mini_batch import MiniBatch, make_rollout
from megarl.trainer.passes import run_pass
from megarl.trainer.step import TrainStep

Block = Literal["embedding", "output_layer"]


def gradient_norms(train_step: TrainStep, rollouts: Sequence[Rollout], block: Block) -> np.ndarray:
    """Return ``||d/d(block) sum_t log pi(y_t)||_2`` by rollout, float64 [n], on every rank of the model copy.

    The sum is over the rollout's loss tokens, without division, at the temperature of the rollout. Routes are replayed
    if ``train.replay`` is "r3", else the routers choose. block: the released GVM code uses "embedding".

    A collective call. The ranks of a model copy hold equal rollouts, as for ``TrainStep.prepare``; numbers of rollouts
    may differ between copies. Each rollout costs a forward and a backward pass. Weights and optimizer do not change;
    gradients are zero afterwards. Raises NumericsError naming a rollout with a norm
    that is not finite, and the errors of ``prepare``.
    """
    policy, multiple = train_step.policy, train_step.config.parallel.micro_batch_multiple
    parameters = find_block(policy, block)
    number = largest(len(rollouts), parallel_state.get_data_parallel_group())
    squares = torch.zeros(number, dtype=torch.float64, device=torch.cuda.current_device())
    # Dummies, two tokens without loss, make as many passes on all copies, and enough micro-batches.
    of_token = np.arange(policy.shape.topk, dtype=np.uint8)
    experts = np.broadcast_to(of_token, (2, len(policy.shape.moe_layers), len(of_token)))
    routes = {"routed_experts": experts, "routed_mask": np.ones(2, bool), "gate_weights": experts.astype(np.float32)}
    slots = np.arange(policy.shape.fields.get("dsa_indexer_topk", 0), dtype=np.int32)
    keys = np.where(slots <= np.arange(2)[:, None, None], slots, -1).repeat(len(policy.shape.indexer_layers), 1)
    dummy = replace(make_rollout(np.zeros(2)), **routes, indexer_topk=keys)
    with measuring(policy, parameters):
        for index in range(number):
            batch = [*rollouts[index : index + 1], *[dummy] * multiple][:multiple]
            if train_step.config.train.replay != "r3":  # no comparison with the routes is made
                batch = [replace(drop_routes(rollout), routed_mask=None) for rollout in batch]
            for parameter in parameters:
                vars(parameter)["main_grad"].zero_()
            _backward(train_step, train_step.prepare(batch, np.ones(len(batch))))
            for parameter in parameters:
                squares[index] += _square(parameter)
    dist.all_reduce(squares, group=model_group())
    # forward.run scales the loss for Megatron's average over the ranks. No average happens here.
    averaged_over = dp_size() * parallel_state.get_context_parallel_world_size()
    norms = squares.sqrt().cpu().numpy()[: len(rollouts)] / averaged_over
    failure: NumericsError | None = None
    if len(bad := np.flatnonzero(~np.isfinite(norms))):
        first = rollouts[int(bad[0])]
        failure = NumericsError(refusal("norm_of_sample", first=first, norm=norms[bad[0]], count=bad.size))
    fail_together(failure, "gradient norms of samples")
    return norms


def _backward(train_step: TrainStep, mini: MiniBatch) -> None:
    policy, routing = train_step.policy, nullcontext()
    if policy.replay is not None and mini.routes is not None:
        # min_agreement=0: too few tokens to check the routes; the training step checks routes.
        routing = policy.replay.replay(Recording(mini.routes), min_agreement=0.0)
    run_pass(policy, mini, routing, coefficients=by_mask())


def _square(parameter: Parameter) -> Tensor:
    """Return this rank's part of the squared norm of a parameter's gradient, float64; a collective call."""
    gradient: Tensor = vars(parameter)["main_grad"]
    if getattr(parameter, "shared_embedding", False) and parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.all_reduce(gradient, group=parallel_state.get_embedding_group())
    if parallel_state.get_context_parallel_world_size() > 1:
        dist.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
    # ``shared``: the last stage's copy of a tied embedding.
    is_copy = parallel_state.get_context_parallel_rank() or getattr(parameter, "shared", False)
    return torch.linalg.vector_norm(gradient, dtype=torch.float64).square() * (not is_copy)


def find_block(policy: Policy, block: Block) -> list[Parameter]:
    """Return this rank's weight of the block, or its copy on the last stage: a tied parameter counts as both blocks."""
    chunks = [unwrap(chunk) for chunk in policy.chunks]
    if block == "embedding" or policy.shape.tied_embeddings:
        return _embeddings(policy) or [p for gpt in chunks for p in gpt.parameters() if getattr(p, "shared", False)]
    return [gpt.output_layer.weight for gpt in chunks if gpt.post_process]


@contextmanager
def measuring(policy: Policy, parameters: Sequence[Parameter]) -> Iterator[None]:
    """Inside, backward passes compute no weight gradients but those of ``parameters`` and of the embedding.

    Nothing is reduced over data-parallel ranks, and routers add no balancing loss. Afterwards all gradients are zero,
    and the routers' counts for the expert bias are restored.
    """
    names = ("finalize_model_grads_func", "no_sync_func", "grad_scale_func")
    without_reduction = Replaced(policy.megatron_config, **dict.fromkeys(names))
    # The embedding's gradient makes gradients flow through every layer and activation checkpointing.
    trained = set(map(id, [*parameters, *_embeddings(policy)]))
    frozen = [p for chunk in policy.chunks for p in chunk.parameters() if p.requires_grad and id(p) not in trained]
    buffers = [vars(parameter)["main_grad"] for parameter in frozen]
    policy.zero_grad()
    hooked = [chunk for chunk in policy.chunks if chunk.use_forward_hook]
    for chunk in hooked:  # their hooks gather weights, and assert that all weights are trained
        chunk.disable_forward_pre_hook()
    try:
        for parameter in frozen:
            parameter.requires_grad_(False)
        with ExitStack() as stack:
            for context in (*(chunk.no_sync() for chunk in policy.chunks), _quiet_routers(policy), without_reduction):
                stack.enter_context(context)
            yield
    finally:
        for parameter, buffer in zip(frozen, buffers, strict=True):
            parameter.requires_grad_(True)
            vars(parameter)["main_grad"] = buffer  # the experts of Transformer Engine 2.11 take it from frozen weights
        for chunk in hooked:
            chunk.enable_forward_pre_hook()
        policy.zero_grad()


def _embeddings(policy: Policy) -> list[Parameter]:
    chunks = [unwrap(chunk) for chunk in policy.chunks]
    return [gpt.embedding.word_embeddings.weight for gpt in chunks if gpt.pre_process]


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
