"""Cases that run on several ranks: which experts tokens are sent to under replay."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dispatch_probe import DispatchProbe, tokens_held
from megatron.core import parallel_state
from tiny_world import (
    MODELS,
    RECOMPUTE,
    config,
    experts_of,
    fixed_coefficients,
    local_batch,
    local_routes,
    micro_batches,
    policy_of,
)

from megarl.core.types import TrainBatch
from megarl.megatron import distributed
from megarl.megatron.passes.forward import run
from megarl.megatron.passes.micro_batches import MicroBatch
from megarl.megatron.policy import Policy
from megarl.megatron.rollout_routes import gather_shared


class World:
    """A policy on one rank with a batch, by default the fixed one, and its routes."""

    def __init__(self, model: Path, recompute: str = "none", batch: TrainBatch | None = None) -> None:
        settings = config(model, recompute=RECOMPUTE[recompute])
        self.policy: Policy = policy_of(settings)
        assert self.policy.replay is not None
        self.replay = self.policy.replay
        self.micros: list[MicroBatch] = micro_batches(settings, local_batch() if batch is None else batch)
        self.routes = [local_routes(micro, self.replay.layers, self.policy.shape) for micro in self.micros]

    def run(self, backward: bool = False, micros: list[MicroBatch] | None = None) -> list[torch.Tensor]:
        outputs = run(
            self.policy.chunks,
            self.micros if micros is None else micros,
            temperature=1.0,
            vocab_size=self.policy.shape.vocab_size,
            coefficients=fixed_coefficients if backward else None,
        )
        return [output.logprobs for output in outputs]

    def same(self, before: list[torch.Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(before, self.run(), strict=True))


def recorded(
    layout: dict[str, int], recompute: str = "none", dispatcher: str = "alltoall", model: str = "base"
) -> dict[str, Any]:
    """R2: a recorded pass, then a training pass that replays it with unchanged weights."""
    settings = config(MODELS / model, layout, recompute=RECOMPUTE[recompute], parallel__dispatcher=dispatcher)
    policy = policy_of(settings)
    assert policy.replay is not None
    batch = local_batch()
    micros = micro_batches(settings, batch)
    keywords: dict[str, Any] = {"temperature": 1.0, "vocab_size": policy.shape.vocab_size}
    probe = DispatchProbe(policy.chunks, micros)
    of_rollouts = [local_routes(micro, policy.replay.layers, policy.shape) for micro in micros]
    with policy.replay.record(compared=of_rollouts) as recording:
        first = run(policy.chunks, micros, **keywords)
    probe.remove()

    policy.zero_grad()
    with policy.replay.replay(recording):
        second = run(policy.chunks, micros, coefficients=fixed_coefficients, **keywords)
    same = [torch.equal(a.logprobs, b.logprobs) for a, b in zip(first, second, strict=True)]
    wrong = []
    for one in probe.seen:
        column = policy.replay.layers.index(one.layer)
        kept = recording.routes[one.micro].experts[:, column].long()
        if not torch.equal(torch.zeros_like(one.experts).scatter(1, kept, True), one.experts):
            wrong.append((one.layer, one.micro))
    shared = gather_shared([recording.shared], micros, policy.replay.layers)
    counted = _count_shared(probe, micros, policy.shape.moe_layers)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (same, wrong, [one[..., 0].tolist() for one in shared] == counted, counted))
    return {
        "same": [flag for flags, *_ in everywhere for flag in flags],
        "wrong": [item for _, items, *_ in everywhere for item in items],
        "shared_as_counted": [equal for _, _, equal, _ in everywhere],
        "counted": counted,
    }


def _count_shared(probe: DispatchProbe, micros: list[MicroBatch], moe_layers: tuple[int, ...]) -> list[list[list[int]]]:
    """[micro][token with a row][layer]: experts that the dispatchers of all ranks and the rollouts have in common."""
    copy, tp_rank = distributed.dp_rank(), parallel_state.get_tensor_model_parallel_rank()
    place = (copy, parallel_state.get_context_parallel_rank(), tp_rank)
    mine = {(*place, one.layer, one.micro): one.experts for one in probe.seen}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    seen = {key: value for part in parts for key, value in part.items()}
    tp, cp = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_context_parallel_world_size()
    counted = []
    for index, micro in enumerate(micros):
        row_of = {
            place: row for row, place in enumerate(place for rank in range(cp) for place in tokens_held(micro, rank))
        }
        bounds = micro.batch.cu_seqlens.tolist()
        sequences = [tuple(micro.batch.tokens[a:b].tolist()) for a, b in itertools.pairwise(bounds)]
        rows = [row_of[tokens, offset] for tokens in sequences for offset in range(len(tokens))]
        by_layer = [
            torch.cat([seen[copy, of_cp, of_tp, layer, index] for of_cp in range(cp) for of_tp in range(tp)])[rows]
            for layer in moe_layers
        ]
        columns = micro.batch
        assert columns.routed_mask is not None
        experts = experts_of(columns).long()
        counted.append(
            [
                [int(used[token, experts[token, at]].sum()) for at, used in enumerate(by_layer)]
                for token in columns.routed_mask.nonzero()[:, 0].tolist()
            ]
        )
    return counted
