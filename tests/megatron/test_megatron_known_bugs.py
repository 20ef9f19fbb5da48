"""Bugs of routing replay that users of other systems have reported, each as a test that it does not happen here.

What needs several ranks runs in the replay matrix: virtual pipeline stages, dense layers before and between the MoE
ones, context-parallel and alignment padding, recomputation of every kind. Multi-token prediction is in
``test_megatron_replay_semantics``; wrong traces, settings that bypass the hook, several models and blocks that break
in ``test_megatron_replay_errors``; backward passes behind their block in ``test_megatron_replay_loops``.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases_replay import World
from dispatch_probe import DispatchProbe
from tiny_world import local_routes, rollouts

from megarl.errors import TraceError
from megarl.megatron.passes.forward import run
from megarl.megatron.passes.micro_batches import micro_batch
from megarl.megatron.rollout_routes import check_rollouts
from megarl.models.shapes import read_shape
from megarl.replay import MicroRoutes


def gradients_of(world: World) -> torch.Tensor:
    return torch.cat([p.main_grad.flatten() for chunk in world.policy.chunks for p in chunk.parameters()])


@pytest.mark.parametrize("fill", [0, 5])
def test_uniform_or_zero_padding_of_routes_never_reaches_a_dispatcher(models: dict[str, Path], fill: int) -> None:
    """An expert twice in a row breaks the split sizes of the all-to-all."""
    shape = read_shape(models["base"])
    made = rollouts()[0]
    assert made.routed_experts is not None
    padded = replace(made, routed_mask=np.ones(made.num_tokens, bool), routed_experts=made.routed_experts.copy())
    padded.routed_experts[-1] = fill
    with pytest.raises(TraceError, match=r"group 0 sample 0, row .*different ones"):
        check_rollouts([padded], shape)
    check_rollouts([replace(padded, routed_mask=made.routed_mask)], shape)  # the same, marked as not recorded


def test_padding_tokens_do_not_all_go_to_the_first_experts(world: World) -> None:
    """Constant routes 0..K-1 for padding load the first expert-parallel rank alone."""
    padded = micro_batch(world.micros[0].batch, world.micros[0].num_slots + 40)
    embedding = world.policy.chunks[0].module.embedding.word_embeddings.weight
    padded = replace(padded, input_ids=padded.input_ids.clone())
    padded.input_ids[0, -40:] = torch.arange(40) % len(embedding)  # different tokens, or all would route alike
    routes = local_routes(padded, world.replay.layers, world.policy.shape)
    assert routes.present is not None
    assert not routes.present[-40:].any()
    probe = DispatchProbe(world.policy.chunks, [padded])
    with world.replay.replay([routes]) as recording:
        run(world.policy.chunks, [padded], temperature=1.0, vocab_size=30)
    probe.remove()
    assert recording.native_rows == int((~routes.present).sum()) * 3
    for one in probe.seen:
        of_padding = one.experts[-40:]
        assert torch.equal(of_padding, torch.zeros_like(of_padding).scatter(1, one.logits[-40:].topk(2).indices, True))
        assert int(of_padding.any(0).sum()) > 2


@pytest.mark.parametrize("recompute", ["uniform", "block", "moe"])
def test_r2_with_recomputation_neither_runs_out_of_indices_nor_re_routes(
    recompute: str, models: dict[str, Path], one_rank: None
) -> None:
    """The recording pass has no backward, the replaying one asks for every row twice."""
    plain, again = World(models["base"]), World(models["base"], recompute)
    for world in (plain, again):
        with world.replay.record() as recording:
            world.run()
        with torch.no_grad():  # the router now prefers other experts
            for chunk in world.policy.chunks:
                for name, parameter in chunk.named_parameters():
                    if "router.weight" in name:
                        parameter.neg_()
        world.policy.zero_grad()
        with world.replay.replay(recording):
            world.run(backward=True)
    torch.testing.assert_close(gradients_of(again), gradients_of(plain), rtol=2e-5, atol=1e-8)


def test_nothing_of_a_step_is_kept_after_it(world: World) -> None:
    routes = [MicroRoutes(one.experts.clone(), one.present) for one in world.routes]
    watched = [weakref.ref(one.experts) for one in routes]
    world.policy.zero_grad()
    with world.replay.replay(routes, observe=True, compared=routes) as recording:
        world.run(backward=True)
    watched += [weakref.ref(one.experts) for one in recording.native]
    watched += [weakref.ref(one) for one in (*recording.shared, *recording.native_shared)]
    del routes, recording
    gc.collect()
    assert [one() for one in watched] == [None] * len(watched)


def test_routes_cost_one_byte_per_token_layer_and_slot_while_they_wait_and_while_they_are_used(world: World) -> None:
    """L_local * K bytes per local token, and at most one micro-batch widened to int64 at a time."""
    shape = world.policy.shape
    tokens = [len(one.experts) for one in world.routes]
    waiting = sum(one.experts.untyped_storage().nbytes() for one in world.routes)
    assert waiting == sum(tokens) * len(shape.moe_layers) * shape.topk

    def integers() -> int:
        gc.collect()
        found = {}
        for item in gc.get_objects():
            if isinstance(item, torch.Tensor) and not item.is_floating_point() and item.dim() >= 2:
                found[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        return sum(found.values())

    inside: list[int] = []
    mlp = world.policy.chunks[0].module.decoder.layers[3].mlp
    hook = mlp.register_forward_hook(lambda *_: inside.append(integers()))
    world.policy.zero_grad()
    world.run(backward=True)
    natively, after = max(inside), integers()
    inside.clear()
    with world.replay.replay(world.routes, compared=world.routes):
        world.run(backward=True)
    hook.remove()
    assert len(inside) == len(tokens)
    widened, counts = max(tokens) * shape.topk * 8, 2 * sum(tokens)
    assert max(inside) - natively <= (widened + counts) * len(shape.moe_layers)
    assert integers() <= after
