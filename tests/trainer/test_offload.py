"""Memory that training gives back while servers sample."""

from __future__ import annotations

import pytest
import torch
from train_world import World, take_step, training, weights_of

from megarl.errors import ConfigError


def test_gradient_memory_is_given_back_and_training_goes_on_as_if_it_had_not_been(world: World) -> None:
    found = []
    for rests in (False, True):
        with training(world.settings()) as step:
            take_step(step, world.rollouts())
            if rests:
                buffers = [b.grad_data for c in step.policy.chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
                held = sum(buffer.untyped_storage().nbytes() for buffer in buffers)
                parameters = sum(p.numel() * 4 for c in step.policy.chunks for p in c.parameters())
                assert held >= parameters
                step.policy.offload()
                assert all(buffer.untyped_storage().nbytes() == 0 for buffer in buffers)
                before = weights_of(step.policy)  # what the engine would be sent meanwhile
                step.policy.reload()
                assert all(torch.equal(weight, before[name]) for name, weight in weights_of(step.policy).items())
                assert sum(buffer.untyped_storage().nbytes() for buffer in buffers) == held
                assert not any(buffer.any() for buffer in buffers)
            take_step(step, world.rollouts())
            found.append({name: weight.clone() for name, weight in weights_of(step.policy).items()})
    for name, weight in found[0].items():
        assert torch.equal(weight, found[1][name]), name


def test_only_servers_beside_the_trainer_can_hand_memory_over(world: World) -> None:
    with pytest.raises(ConfigError, match=r"sglang.release_memory: found true, expected servers that share"):
        world.settings(sglang__release_memory=True)
