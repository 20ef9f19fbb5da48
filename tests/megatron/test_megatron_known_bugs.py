"""Bugs of routing replay that users of other systems have reported, each as a test that it does not happen here.

What needs several ranks runs in the replay matrix: virtual pipeline stages, dense layers before and between the MoE
ones, context-parallel and alignment padding, recomputation of every kind. Multi-token prediction is in
``test_megatron_replay_semantics``, wrong traces and settings that bypass the hook in ``test_megatron_replay_errors``.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases_replay import RECOMPUTE
from dispatch_probe import DispatchProbe
from tiny_world import coefficients_of, config, local_batch, local_routes, micro_batches, policy_of, rollouts

from megarl.core.types import TrainBatch
from megarl.errors import ReplayError, TraceError
from megarl.megatron.passes.forward import run
from megarl.megatron.passes.micro_batches import micro_batch
from megarl.megatron.rollout_routes import check_rollouts
from megarl.models.shapes import read_shape
from megarl.replay import MicroRoutes, RoutingReplay


class Setup:
    def __init__(self, model: Path, recompute: str = "none") -> None:
        settings = config(model, recompute=RECOMPUTE[recompute])
        self.policy = policy_of(settings)
        assert self.policy.replay is not None
        self.replay: RoutingReplay = self.policy.replay
        self.micros = micro_batches(settings, local_batch())
        self.routes = [local_routes(micro, self.replay.layers, self.policy.shape) for micro in self.micros]

    def run(self, training: bool = False) -> list[torch.Tensor]:
        def coefficients(_: int, part: TrainBatch, *__: torch.Tensor) -> tuple[torch.Tensor, None, dict[str, Any]]:
            return coefficients_of(part), None, {}

        found = run(
            self.policy.chunks,
            self.micros,
            temperature=1.0,
            vocab_size=self.policy.shape.vocab_size,
            coefficients=coefficients if training else None,
        )
        return [output.logprobs for output in found]

    def gradients(self) -> torch.Tensor:
        return torch.cat([p.main_grad.flatten() for chunk in self.policy.chunks for p in chunk.parameters()])


@pytest.fixture
def setup(models: dict[str, Path], one_rank: None) -> Setup:
    return Setup(models["base"])


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


def test_padding_tokens_do_not_all_go_to_the_first_experts(setup: Setup) -> None:
    """Constant routes 0..K-1 for padding load the first expert-parallel rank alone."""
    padded = micro_batch(setup.micros[0].batch, setup.micros[0].num_slots + 40)
    embedding = setup.policy.chunks[0].module.embedding.word_embeddings.weight
    padded = replace(padded, input_ids=padded.input_ids.clone())
    padded.input_ids[0, -40:] = torch.arange(40) % len(embedding)  # different tokens, or all would route alike
    routes = local_routes(padded, setup.replay.layers, setup.policy.shape)
    assert routes.present is not None
    assert not routes.present[-40:].any()
    probe = DispatchProbe(setup.policy.chunks, [padded])
    with setup.replay.replay([routes]) as recording:
        run(setup.policy.chunks, [padded], temperature=1.0, vocab_size=30)
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
    plain, again = Setup(models["base"]), Setup(models["base"], recompute)
    for setup in (plain, again):
        with setup.replay.record() as recording:
            setup.run()
        with torch.no_grad():  # the router now prefers other experts
            for chunk in setup.policy.chunks:
                for name, parameter in chunk.named_parameters():
                    if "router.weight" in name:
                        parameter.neg_()
        setup.policy.zero_grad()
        with setup.replay.replay(recording):
            setup.run(training=True)
    torch.testing.assert_close(again.gradients(), plain.gradients(), rtol=2e-5, atol=1e-8)


@pytest.mark.parametrize("recompute", ["uniform", "moe"])
def test_replay_that_ends_before_the_backward_pass_is_an_error_and_not_another_route(
    recompute: str, models: dict[str, Path], one_rank: None
) -> None:
    """Elsewhere clearing the replay action early made recomputation re-route, with wrong gradients and no error.

    Here the action is a block: the only way to end it early is to leave the backward pass outside, which raises.
    """
    setup = Setup(models["base"], recompute)
    micro, chunk = setup.micros[0], setup.policy.chunks[0]
    chunk.train()
    inputs = {"input_ids": micro.input_ids, "position_ids": micro.input_ids, "attention_mask": None}
    losses = []
    with setup.replay.replay(setup.routes[:1]):
        losses.append(chunk(**inputs, packed_seq_params=micro.packing).sum())
    with pytest.raises(ReplayError, match="the block of its forward pass has closed"):
        losses[0].backward()
    assert not [name for name in dir(setup.replay) if "clear" in name or "action" in name or "reset" in name]


def test_a_discarded_model_leaves_no_router_behind(models: dict[str, Path], one_rank: None) -> None:
    """A global list of routers would hand the next model the layers of this one."""
    first, second = Setup(models["base"]), Setup(models["base"])
    with first.replay.replay(first.routes):
        first.run()
    assert second.replay.layers == first.replay.layers == (0, 2, 3)
    before = second.run()
    del first
    gc.collect()
    with second.replay.replay(second.routes):
        replayed = second.run()
    assert all(torch.equal(a, b) for a, b in zip(before, second.run(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before, replayed, strict=True))


def test_nothing_of_a_step_is_kept_after_it(setup: Setup) -> None:
    routes = [MicroRoutes(one.experts.clone(), one.present) for one in setup.routes]
    watched = [weakref.ref(one.experts) for one in routes]
    setup.policy.zero_grad()
    with setup.replay.replay(routes, observe=True, compared=routes) as recording:
        setup.run(training=True)
    watched += [weakref.ref(one.experts) for one in recording.native]
    watched += [weakref.ref(one) for one in (*recording.shared, *recording.native_shared)]
    del routes, recording
    gc.collect()
    assert [one() for one in watched] == [None] * len(watched)


def test_routes_cost_one_byte_per_token_layer_and_slot_while_they_wait_and_while_they_are_used(setup: Setup) -> None:
    """L_local * K bytes per local token, and at most one micro-batch widened to int64 at a time."""
    shape = setup.policy.shape
    tokens = [len(one.experts) for one in setup.routes]
    waiting = sum(one.experts.untyped_storage().nbytes() for one in setup.routes)
    assert waiting == sum(tokens) * len(shape.moe_layers) * shape.topk

    def integers() -> int:
        gc.collect()
        found = {}
        for item in gc.get_objects():
            if isinstance(item, torch.Tensor) and not item.is_floating_point() and item.dim() >= 2:
                found[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        return sum(found.values())

    inside: list[int] = []
    mlp = setup.policy.chunks[0].module.decoder.layers[3].mlp
    hook = mlp.register_forward_hook(lambda *_: inside.append(integers()))
    setup.policy.zero_grad()
    setup.run(training=True)
    natively, after = max(inside), integers()
    inside.clear()
    with setup.replay.replay(setup.routes, compared=setup.routes):
        setup.run(training=True)
    hook.remove()
    assert len(inside) == len(tokens)
    widened, counts = max(tokens) * shape.topk * 8, 2 * sum(tokens)
    assert max(inside) - natively <= (widened + counts) * len(shape.moe_layers)
    assert integers() <= after


def test_the_native_routes_come_back_after_every_kind_of_end(setup: Setup) -> None:
    native = setup.run()
    with setup.replay.record():
        setup.run()
    with setup.replay.replay(setup.routes):
        setup.run()
    with contextlib.suppress(ZeroDivisionError), setup.replay.replay(setup.routes):
        setup.run()
        raise ZeroDivisionError
    with pytest.raises(ReplayError), setup.replay.replay(setup.routes[:1]):
        setup.run()
    assert all(torch.equal(a, b) for a, b in zip(native, setup.run(), strict=True))
