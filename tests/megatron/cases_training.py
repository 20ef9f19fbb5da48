"""Cases that run on several ranks: weights in and out, log-probabilities, gradients, whole optimizer steps."""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from tiny_world import (
    MODELS,
    coefficients_of,
    config,
    entropy_coefficients_of,
    exported,
    gather_sequences,
    gradients_in_place_of_weights,
    local_batch,
    local_routes,
    micro_batches,
    policy_of,
    safetensors_of,
    with_kept_sets,
)

from megarl.config import Config
from megarl.core.types import TrainBatch
from megarl.engines.sglang.transports.ipc import SharedMemory, empty_shared
from megarl.engines.sglang.transports.protocol import Rebuilt
from megarl.engines.weights import split_into_buckets
from megarl.megatron import distributed, hf_weights
from megarl.megatron.passes.forward import MicroOutput, run
from megarl.megatron.passes.micro_batches import MicroBatch
from megarl.megatron.policy import Policy
from megarl.trainer.engines import make_transport

Layout = dict[str, int]


def round_trip(
    layout: Layout,
    model: str = "base",
    dtype: str = "fp32",
    receivers: Sequence[int] | None = None,
    gather_bytes: int = hf_weights.GATHER_BYTES,
) -> dict[str, Any]:
    """Load, export, compare with the file; every receiver sees every tensor, the other ranks none."""
    hf_weights.GATHER_BYTES = gather_bytes
    policy = policy_of(config(MODELS / model, layout, model__dtype=dtype))
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    stored = safetensors_of(MODELS / model)
    names, different = [], []
    receives = receivers is None or dist.get_rank() in receivers
    for name, tensor in policy.export(receives):
        names.append(name)
        if tensor.dtype != wanted or not torch.equal(tensor, stored[name].to(wanted)):
            different.append(name)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (names, different))
    received = [found for rank, found in enumerate(everywhere) if receivers is None or rank in receivers]
    return {
        "names": received[0][0],
        "stored": sorted(stored),
        "different": received[0][1],
        "agree": len(set(map(str, received))),
        "elsewhere": sum(len(found[0]) for found in everywhere if found not in received),
    }


def shared(layout: Layout, per_node: int, gpus: Sequence[int]) -> list[Any]:
    """For each rank: the handles that it sees for each bucket, and the tensors that rank 0 of a node opens by them."""
    os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % per_node)
    servers = {"sglang__gpus": [*gpus], "sglang__servers": len(gpus), "launch__ranks_per_node": per_node}
    settings = config(MODELS / "base", layout, rollout__engine="sglang", sglang__sync="ipc", **servers)
    policy = policy_of(settings)
    stored = safetensors_of(MODELS / "base")
    transport = make_transport(settings)
    assert isinstance(transport, SharedMemory)
    mine = distributed.local_rank() in (0, *gpus)
    exported = policy.export(mine)
    seen, opened = [], 0
    made = split_into_buckets(exported, 1 << 14, (), empty_shared)
    for bucket in transport.rounds(made, lambda: None) if mine else ():
        if bucket is None:
            continue
        handles = transport.handles
        seen.append(sorted(handles))
        for rebuild, arguments in handles.values() if distributed.local_rank() == 0 else ():
            flat = pickle.loads(pickle.dumps(Rebuilt((rebuild, arguments))))
            for name, dtype, shape, start, end in bucket.places:
                assert torch.equal(flat[start:end].view(dtype).view(shape), stored[name])
                opened += 1
    deque(exported, maxlen=0)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (seen, opened))
    return [*everywhere, len(stored)]


def logprobs(layout: Layout, model: str = "base") -> dict[str, Any]:
    """Log-probabilities and entropies of the fixed batch, without replay, by sequence."""
    settings = config(MODELS / model, layout, train__replay="none")
    policy = policy_of(settings)
    micros = micro_batches(settings, local_batch())
    outputs = run(policy.chunks, micros, temperature=settings.rollout.temperature, vocab_size=policy.shape.vocab_size)
    return sequences_of(micros, outputs)


def sequences_of(micros: list[MicroBatch], outputs: list[MicroOutput]) -> dict[str, Any]:
    """Log-probabilities and entropies of all ranks, by the tokens of the sequence."""
    batches = [micro.batch for micro in micros]
    logprobs = gather_sequences(list(zip(batches, [output.logprobs for output in outputs], strict=False)))
    entropies = gather_sequences(list(zip(batches, [output.entropies for output in outputs], strict=False)))
    return {"logprobs": logprobs, "entropies": entropies, "num_micro_batches": len(micros)}


def forward_backward(
    policy: Policy, settings: Config, batch: TrainBatch, entropy: bool = False
) -> tuple[float, list[MicroOutput]]:
    """Accumulate the gradients of the fixed loss, with replay where the settings say so; the loss over all ranks."""
    micros = micro_batches(settings, batch)

    def coefficients(
        _: int, part: TrainBatch, logprobs: torch.Tensor, __: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, dict]:
        of_entropies = entropy_coefficients_of(part).to(logprobs.device) if entropy else None
        return coefficients_of(part).to(logprobs.device), of_entropies, {}

    def step() -> list[MicroOutput]:
        return run(
            policy.chunks,
            micros,
            temperature=settings.rollout.temperature,
            vocab_size=policy.shape.vocab_size,
            coefficients=coefficients,
        )

    policy.zero_grad()
    if settings.train.replay == "none":
        outputs = step()
    else:
        assert policy.replay is not None
        routes = [local_routes(micro, policy.replay.layers, policy.shape) for micro in micros]
        with policy.replay.replay(routes):
            outputs = step()
    own = sum(float(output.metrics["loss"].sums) for output in outputs) if distributed.holds_outputs() else 0.0
    return sum(distributed.gather_objects(own)), outputs


def gradients(
    layout: Layout, model: str = "base", micro_tokens: int = 32, replay: str = "none", kept: bool = False
) -> dict[str, Any]:
    """Loss, gradients by Hugging Face name, their norm by the optimizer, and log-probabilities of a training pass.

    kept: with the sets of ``with_kept_sets``, and an entropy term.
    """
    settings = config(
        MODELS / model,
        layout,
        train__replay=replay,
        train__micro_batch_tokens=micro_tokens,
        parallel__distributed_optimizer=False,
    )
    policy = policy_of(settings)
    batch = with_kept_sets(local_batch()) if kept else local_batch()
    loss, outputs = forward_backward(policy, settings, batch, entropy=kept)
    by_sequence = sequences_of(micro_batches(settings, batch), outputs)
    with gradients_in_place_of_weights(policy):
        found = {"loss": loss, "gradients": exported(policy), **by_sequence}
    return {**found, "norm": policy.optimizer_step()[0]}


def fixed_batch_steps(layout: Layout, dispatcher: str = "alltoall") -> dict[str, Any]:
    """Two optimizer steps of MiniRL's kind on one batch of rollouts, experts replayed."""
    settings = config(MODELS / "base", layout, parallel__dispatcher=dispatcher)
    policy = policy_of(settings)
    losses, norms = [], []
    for _ in range(2):
        loss, _ = forward_backward(policy, settings, local_batch())
        norm, _ = policy.optimizer_step()
        losses.append(loss)
        norms.append(norm)
    return {"losses": losses, "norms": norms, "weights": exported(policy)}
