"""The whole training half against transformers, autograd and the loops of ``oracles.reference_objectives``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles.reference import token_level_kl
from oracles.reference_objectives import coefficients
from train_world import NUM_SEQUENCES, ROWS, Going, World, fixed_advantages, training
from transformers import AutoModelForCausalLM

from megarl.config import Config
from megarl.core.types import Rollout
from megarl.megatron.hf_weights import save_hf


def outputs_of(model: Any, rollout: Rollout, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies [T] with gradient; 0 for the first token, which nothing predicts."""
    tokens = torch.as_tensor(rollout.tokens, dtype=torch.int64)
    full = torch.log_softmax(model(tokens[None]).logits[0] / temperature, -1)[:-1]
    picked, entropies = full.gather(1, tokens[1:, None])[:, 0], -(full.exp() * full).sum(-1)
    return torch.cat([picked.new_zeros(1), picked]), torch.cat([picked.new_zeros(1), entropies])


def logprobs_of(model: Any, rollout: Rollout, temperature: float) -> torch.Tensor:
    return outputs_of(model, rollout, temperature)[0]


def model_at(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.get_input_embeddings().padding_idx = None  # transformers trains no pad embedding, Megatron does
    return model


@dataclass(frozen=True)
class Before:
    """What plain PyTorch says of a whole step before its first update: one row per rollout."""

    old: list[list[float]]
    ref: list[list[float]]
    advantages: list[list[float]]


def before(
    world: World, settings: Config, rollouts: Sequence[Rollout], rewards: Sequence[float], kl_of: Path | None = None
) -> Before:
    """``rewards`` are the advantages themselves, unless the objective makes them of returns to go.

    kl_of: the policy whose KL that is, by default the old one.
    """
    objective, temperature = settings.train.resolved_objective, settings.rollout.temperature
    old_model, ref_model = model_at(world.model), model_at(world.reference)
    with torch.no_grad():
        old = [logprobs_of(old_model, r, temperature).tolist() for r in rollouts]
        ref = [logprobs_of(ref_model, r, temperature).tolist() for r in rollouts]
    if objective.advantage != "token_level_kl":
        return Before(old, ref, [[float(a)] * r.num_tokens for r, a in zip(rollouts, rewards, strict=True)])
    policy = old
    if kl_of is not None:
        with torch.no_grad():
            policy = [logprobs_of(model_at(kl_of), r, temperature).tolist() for r in rollouts]
    masks = [np.flatnonzero(r.loss_mask) for r in rollouts]
    of_loss_tokens = token_level_kl(
        [float(r) for r in rewards],
        [r.group for r in rollouts],
        [[o[t] - f[t] for t in mask] for o, f, mask in zip(policy, ref, masks, strict=True)],
        objective.kl_coef,
        objective.std_ddof,
        objective.std_eps,
        objective.kl_horizon,
    )
    advantages = [np.zeros(r.num_tokens) for r in rollouts]
    for row, mask, values in zip(advantages, masks, of_loss_tokens, strict=True):
        row[mask] = values
    return Before(old, ref, [row.tolist() for row in advantages])


def oracle(
    theta: Path, known: Before, settings: Config, rollouts: Sequence[Rollout], own: slice, old: Path
) -> tuple[float, float, float]:
    """(loss, gradient norm, share of loss tokens that train nothing) of the mini-batch ``own`` of the step.

    old: the weights before the first update.
    """
    from test_router_drift import expected_drift  # which reads models as this module does

    model, mine = model_at(theta), rollouts[own]
    objective = settings.train.resolved_objective
    outputs = [outputs_of(model, r, settings.rollout.temperature) for r in mine]
    logprobs = [row for row, _ in outputs]
    drift = None
    if objective.router_shift_floor is not None:
        drift = [expected_drift(model_at(old), model, r, "none").tolist() for r in mine]
    weights = coefficients(
        objective,
        [row.tolist() for row in logprobs],
        known.old[own],
        [r.rollout_logprobs.tolist() for r in mine],
        known.advantages[own],
        [r.loss_mask.tolist() for r in mine],
        ref_logprobs=known.ref[own],
        router_drift=drift,
    )
    loss = -torch.stack([(torch.tensor(row) * lps).sum() for row, lps in zip(weights, logprobs, strict=True)]).sum()
    if objective.entropy_coef:
        assert objective.aggregation == "seq-mean-token-mean"
        masks = [torch.as_tensor(r.loss_mask) for r in mine]
        means = [entropies[mask].mean() for (_, entropies), mask in zip(outputs, masks, strict=True)]
        loss = loss - objective.entropy_coef * torch.stack(means).mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    of_loss_tokens = [
        w for row, r in zip(weights, mine, strict=True) for w, m in zip(row, r.loss_mask, strict=True) if m
    ]
    return float(loss.detach()), float(norm), sum(w == 0 for w in of_loss_tokens) / len(of_loss_tokens)


@pytest.mark.parametrize("name", ROWS)
def test_loss_and_gradient_norm_are_those_of_plain_pytorch(world: World, tmp_path: Path, name: str) -> None:
    """Mini-batch 0 has theta = old; mini-batch 1 has moved away from it, far enough that the masks drop tokens."""
    settings = world.settings(
        train__replay="none",
        optim__lr=0.01,
        rollout__temperature=0.9,
        rollout__fp8_rounding=False,
        **ROWS[name],
    )
    rollouts, rewards, half = (
        world.rollouts("fp32"),
        fixed_advantages(settings.train.resolved_objective),
        NUM_SEQUENCES // 2,
    )
    with training(settings) as step:
        going, found = Going(step, rollouts, rewards).look(), []
        for index in range(2):
            found.append(going.collect_update(index) or {})
            if index == 0:
                save_hf(step.policy.chunks, step.policy.shape, world.model, tmp_path / "moved")
    theta = [world.model, tmp_path / "moved"]
    objective = settings.train.resolved_objective
    for index in (0, 1):
        known = before(world, settings, rollouts, rewards, theta[index] if objective.kl_at == "theta" else None)
        own = slice(index * half, (index + 1) * half)
        loss, norm, dropped = oracle(theta[index], known, settings, rollouts, own, world.model)
        assert found[index]["loss"] == pytest.approx(loss, rel=2e-4, abs=1e-5)
        assert found[index]["grad_norm"] == pytest.approx(norm, rel=2e-4)
        shares = [found[index].get(f"clip/{side}", 0.0) for side in ("high", "low", "negative", "both")]
        if not objective.penalties and objective.advantage != "token_level_kl":
            assert max(shares) <= dropped + 1e-9 <= sum(shares) + 2e-9
        of_old = objective.masks and objective.pairs <= {"theta_old"}
        assert (sum(shares) == 0.0 if index == 0 else sum(shares) > 0.05) if of_old else True
