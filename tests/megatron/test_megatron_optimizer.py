"""Megatron's optimizer on a CPU: what a step does to the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_world import config, policy_of

LR, DECAY, BETA1, BETA2, EPS = 1e-2, 0.1, 0.9, 0.95, 1e-8


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("distributed", [True, False])
def test_a_step_is_adam_with_decoupled_weight_decay(distributed: bool, models: dict[str, Path]) -> None:
    optim = {"lr": LR, "min_lr": LR, "weight_decay": DECAY, "clip_grad": 0.0, "decay_style": "constant"}
    adam = {"adam_beta1": BETA1, "adam_beta2": BETA2, "adam_eps": EPS}
    given = {f"optim__{name}": value for name, value in {**optim, **adam}.items()}
    policy = policy_of(config(models["base"], parallel__distributed_optimizer=distributed, **given))
    parameters = [p for chunk in policy.chunks for p in chunk.parameters()]
    wanted = [p.detach().double().clone() for p in parameters]
    moments = [(torch.zeros_like(value), torch.zeros_like(value)) for value in wanted]
    generator = torch.Generator().manual_seed(1)
    for step in (1, 2, 3):
        policy.zero_grad()
        for parameter, value, (first, second) in zip(parameters, wanted, moments, strict=True):
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.main_grad.copy_(gradient)  # type: ignore[attr-defined]
            first.mul_(BETA1).add_((1 - BETA1) * gradient.double())
            second.mul_(BETA2).add_((1 - BETA2) * gradient.double() ** 2)
            value *= 1 - LR * (DECAY if parameter.dim() > 1 else 0.0)  # not of norms
            value -= LR * first / (1 - BETA1**step) / ((second / (1 - BETA2**step)).sqrt() + EPS)
        norm, lr = policy.optimizer_step()
        assert lr == pytest.approx(LR)
        squares = sum(float(p.main_grad.double().square().sum()) for p in parameters)  # type: ignore[attr-defined]
        assert norm == pytest.approx(squares**0.5, rel=1e-5)
        for parameter, value in zip(parameters, wanted, strict=True):
            torch.testing.assert_close(parameter.detach().double(), value, rtol=1e-5, atol=1e-6)
