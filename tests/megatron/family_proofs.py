"""Replay of an engine's and of Megatron's own routes in a family of models, proven by the watch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from local_engines import local_engine
from tiny_world import batch_of, config, local_routes, micro_batches, policy_of, safetensors_of

from megarl.core.types import SampleRequest
from megarl.engines.protocol import SamplingParams
from megarl.megatron.passes.forward import run
from megarl.verify import RoutingWatch


def prove_replay(model: Path) -> dict[str, Any] | None:
    """R3: routes of a transformers engine with other weights. R2: Megatron's own, after a change of its weights."""
    policy = policy_of(settings := config(model, train__replay="r3"))
    if policy.replay is None or not policy.shape.moe_layers:
        return None
    engine = local_engine(model)
    engine.update_weights(changed(safetensors_of(model)), 1)
    batch = batch_of(engine.generate(make_prompts(4), SamplingParams(max_response_tokens=8)))
    micros = micro_batches(settings, batch)
    routes = [local_routes(micro, policy.replay.layers, policy.shape) for micro in micros]
    passes = {"temperature": 1.0, "vocab_size": policy.shape.vocab_size}

    def shares(expected: Sequence[Any], replayed: Any = None) -> Any:
        with RoutingWatch(policy.chunks, most_rows=None) as watch, policy.replay.replay(replayed or expected):
            run(policy.chunks, micros, **passes, coefficients=_zero)
        report = watch.report(expected)
        return report, int(report.right.sum()), int(report.compared.sum())

    with RoutingWatch(policy.chunks, most_rows=None) as watch:
        run(policy.chunks, micros, **passes)
    native = watch.report(routes).right_share
    r3, *r3_rows = shares(routes)
    with policy.replay.record() as recording:
        run(policy.chunks, micros, **passes)
    with torch.no_grad():
        for chunk in policy.chunks:
            for _, parameter in sorted(chunk.named_parameters()):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    r2, *r2_rows = shares(recording.routes, recording)
    is_right = r3.is_right and r2.is_right and min(r3_rows[1], r2_rows[1]) > 0
    return {"r3": r3_rows, "r2": r2_rows, "native": native, "is_right": is_right}


def make_prompts(num_prompts: int) -> list[Any]:
    """Two samples for each of some prompts of 5 to 12 tokens."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 30, rng.integers(5, 13), dtype=np.int32) for _ in range(num_prompts)]
    places = [(group, sample) for group in range(num_prompts) for sample in (0, 1)]
    return [SampleRequest(prompts[group], group, sample, seed=1000 * group + sample) for group, sample in places]


def _zero(_: int, batch: Any, *__: Any) -> tuple[Any, None, dict[str, Any]]:
    return batch.advantages * 0, None, {}


def changed(tensors: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return ((name, tensor + 0.1 * torch.randn(tensor.shape, generator=generator)) for name, tensor in tensors.items())
