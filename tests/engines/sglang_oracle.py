"""Weights with noise, and what transformers says of a server's rollouts."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rollout_oracle import Oracle
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megarl.core.packing import check_kept
from megarl.core.types import Rollout, SampleRequest
from megarl.engines.protocol import Engine, SamplingParams, Session

Weights = dict[str, torch.Tensor]

CLOSE = 1e-4
"""Two correct float32 computations of a log-probability with ``noisy`` weights: either is up to 2.3e-5 from float64."""


def noisy(model: Path, seed: int, scale: float = 0.1) -> Weights:
    """The checkpoint's tensors, changed so that routes and log-probabilities are visibly others; seed 0: unchanged."""
    generator = torch.Generator().manual_seed(seed)
    found = load_file(model / "model.safetensors")
    if seed == 0:
        return found
    return {name: tensor + scale * torch.randn(tensor.shape, generator=generator) for name, tensor in found.items()}


def oracle_of(model: Path, weights: Weights) -> Oracle:
    """transformers in float32 with these weights, loaded by its own reader of checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(model / "config.json", folder)
        save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        built = AutoModelForCausalLM.from_pretrained(
            folder, dtype="float32", attn_implementation="eager", experts_implementation="eager"
        )
    return Oracle(built.eval())


def logprob_gap(rollouts: Sequence[Rollout], oracle: Oracle, temperature: float = 1.0) -> float:
    """Largest difference of a response token's log-probability, up to the first tie of experts."""
    worst = 0.0
    for rollout in rollouts:
        expected = (oracle.logits(rollout.tokens)[:-1] / temperature).log_softmax(-1)
        expected = expected.gather(-1, torch.as_tensor(rollout.tokens[1:].astype(np.int64))[:, None])[:, 0].numpy()
        mask = rollout.loss_mask[1:] & (np.arange(1, rollout.num_tokens) <= oracle.clear(rollout.tokens))
        worst = max(worst, float(np.abs(expected - rollout.rollout_logprobs[1:])[mask].max(initial=0.0)))
    return worst


def check_nuclei(
    rollouts: Sequence[Rollout], oracle: Oracle, params: SamplingParams, close: float = CLOSE
) -> list[int]:
    """Each token's recorded ids are the oracle's nucleus, its log-probability is within them; returns their numbers.

    Against float64: the shortest prefix of the sorted ids that reaches top_p. Up to the first tie of experts, and but
    for nuclei that end within rounding of top_p."""
    sizes: list[int] = []
    for rollout in rollouts:
        check_kept(rollout)
        assert (rollout.kept_counts.dtype, rollout.kept_ids.dtype) == (np.int32, np.int32)
        assert not rollout.kept_counts[: rollout.prompt_length].any()
        sets = np.split(rollout.kept_ids, np.cumsum(rollout.kept_counts)[:-1])
        probabilities = (oracle.logits(rollout.tokens).double() / params.temperature).softmax(-1).numpy()
        for token in range(rollout.prompt_length, min(rollout.num_tokens, oracle.clear(rollout.tokens) + 1)):
            order = np.argsort(-probabilities[token - 1], kind="stable")
            mass = probabilities[token - 1][order].cumsum()
            if np.abs(mass - params.top_p).min() < close:
                continue
            size = int((mass < params.top_p).sum()) + 1
            assert sets[token].tolist() == sorted(order[:size].tolist())
            expected = np.log(probabilities[token - 1][rollout.tokens[token]] / mass[size - 1])
            assert abs(rollout.rollout_logprobs[token] - expected) < close
            sizes.append(size)
    assert len(sizes) > 50
    return sizes


def pause_after(
    engine: Engine, requests: Sequence[SampleRequest], num_tokens: int, params: SamplingParams
) -> list[Rollout]:
    """The answers when the engine is paused once another response, of ``num_tokens``, is complete; this one last."""
    asked = [*requests, replace(requests[0], group=len(requests), max_response_tokens=num_tokens)]
    parts: dict[int, Rollout] = {}

    def begin(session: Session) -> None:
        async def sample(index: int) -> None:
            parts[index] = await session.sample(asked[index])
            if index == len(requests):
                session.pause()

        for index in reversed(range(len(asked))):
            session.start(sample(index))

    engine.converse(begin, params)
    return [parts[index] for index in range(len(asked))]


def same_sets(rollouts: Sequence[Rollout], oracle: Oracle) -> float:
    """Share of (token, layer) rows whose expert sets are those of the oracle; every token but the last has rows.

    Rows behind a tie of experts do not count, nor do its own.
    """
    equal = []
    for rollout in rollouts:
        assert rollout.routed_mask.tolist() == [True] * (rollout.num_tokens - 1) + [False]
        rows = min(oracle.clear(rollout.tokens), rollout.num_tokens - 1)
        expected = np.sort(oracle.routes(rollout.tokens)[:rows], -1)
        equal.append((np.sort(rollout.routed_experts[:rows].astype(int), -1) == expected).all(-1).ravel())
    return float(np.concatenate(equal).mean())
