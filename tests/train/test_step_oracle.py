"""The whole training half against transformers, autograd and the loops of ``megarl.core.reference_objectives``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from train_world import NUM_SEQUENCES, World, fixed_advantages, prepare, training
from transformers import AutoModelForCausalLM

from megarl.config import OBJECTIVES, Config
from megarl.core.metrics import finalize
from megarl.core.reference_objectives import coefficients
from megarl.core.types import Rollout
from megarl.megatron.weights import save_hf
from megarl.train.loop import objective_of
from megarl.train.step import collect


def logprobs_of(model: Any, rollout: Rollout, temperature: float) -> torch.Tensor:
    """[T] with gradient; 0 for the first token, which nothing predicts."""
    tokens = torch.as_tensor(rollout.tokens, dtype=torch.int64)
    full = torch.log_softmax(model(tokens[None]).logits[0] / temperature, -1)
    picked = full[:-1].gather(1, tokens[1:, None])[:, 0]
    return torch.cat([picked.new_zeros(1), picked])


def oracle(
    theta: Path, old: Path, settings: Config, rollouts: Sequence[Rollout], advantages: Sequence[float]
) -> tuple[float, float, float]:
    """(loss, gradient norm, share of loss tokens that the trust mask drops) of one mini-batch."""
    model = AutoModelForCausalLM.from_pretrained(theta, dtype=torch.float32, attn_implementation="eager").eval()
    model.get_input_embeddings().padding_idx = None  # transformers trains no pad embedding, Megatron does
    before = AutoModelForCausalLM.from_pretrained(old, dtype=torch.float32, attn_implementation="eager").eval()
    objective, temperature = objective_of(settings), settings.rollout.temperature
    logprobs = [logprobs_of(model, r, temperature) for r in rollouts]
    with torch.no_grad():
        old_logprobs = [logprobs_of(before, r, temperature) for r in rollouts]
    weights = coefficients(
        objective,
        [row.tolist() for row in logprobs],
        [row.tolist() for row in old_logprobs],
        [r.rollout_logprobs.tolist() for r in rollouts],
        [[float(a)] * r.num_tokens for r, a in zip(rollouts, advantages, strict=True)],
        [r.loss_mask.tolist() for r in rollouts],
        ref_logprobs=[[0.0] * r.num_tokens for r in rollouts],
    )
    loss = -torch.stack([(torch.tensor(row) * lps).sum() for row, lps in zip(weights, logprobs, strict=True)]).sum()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    of_loss_tokens = [
        w for row, r in zip(weights, rollouts, strict=True) for w, m in zip(row, r.loss_mask, strict=True) if m
    ]
    return float(loss.detach()), float(norm), sum(w == 0 for w in of_loss_tokens) / len(of_loss_tokens)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradient_norm_are_those_of_plain_pytorch(world: World, tmp_path: Path, name: str) -> None:
    """Mini-batch 0 has theta = old; mini-batch 1 has moved away from it, far enough that the masks drop tokens."""
    settings = world.settings(
        train__objective=name,
        train__replay="none",
        optim__lr=0.01,
        rollout__temperature=0.9,
        rollout__fp8_rounding=False,
    )
    rollouts, advantages, half = world.rollouts("fp32"), fixed_advantages(), NUM_SEQUENCES // 2
    with training(settings) as step:
        minis = prepare(step, rollouts, advantages)
        for mini in minis:
            step.old_logprobs(mini)
        found = []
        for index, mini in enumerate(minis):
            merged = collect([step.update(mini)])
            assert merged is not None
            found.append(finalize(merged))
            if index == 0:
                save_hf(step.policy.chunks, step.policy.shape, world.model, tmp_path / "moved")
    theta = [world.model, tmp_path / "moved"]
    for index in (0, 1):
        own = slice(index * half, (index + 1) * half)
        loss, norm, dropped = oracle(theta[index], world.model, settings, rollouts[own], advantages[own])
        assert found[index]["loss"] == pytest.approx(loss, rel=2e-4, abs=1e-5)
        assert found[index]["grad_norm"] == pytest.approx(norm, rel=2e-4)
        clipped = sum(found[index].get(f"clip/{side}", 0.0) for side in ("high", "low", "dual"))
        assert clipped == pytest.approx(dropped, abs=1e-9)
        assert clipped == 0.0 if index == 0 or objective_of(settings).mask == "none" else clipped > 0.05
