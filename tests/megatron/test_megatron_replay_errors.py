"""What replay refuses, and that it leaves no trace behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases_replay import World
from dispatch_probe import DispatchProbe
from megatron.core.transformer.moe.router import TopKRouter
from tiny_world import (
    batch_of,
    local_batch,
    local_routes,
    rollouts,
    transformers_model,
)

from megarl.core.replay_blockers import REPLAY_BLOCKERS
from megarl.data.tiny import write_tiny_model
from megarl.errors import ReplayError, TraceError
from megarl.megatron.passes.forward import run
from megarl.megatron.passes.micro_batches import micro_batch
from megarl.megatron.policy import Policy
from megarl.megatron.rollout_routes import check_rollouts
from megarl.models.shapes import read_shape
from megarl.replay import MicroRoutes, RoutingReplay


@pytest.mark.parametrize("num_experts", [256, 257, 512])
def test_routes_of_many_experts_are_replayed_and_one_too_many_is_refused(
    num_experts: int, tmp_path: Path, one_rank: None
) -> None:
    """256 is DeepSeek-V3's number, and the largest whose experts are stored in 8 bits."""
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "expert_width": 4}
    made = rollouts(num_layers=2, num_experts=num_experts)
    for rollout in made:
        assert rollout.routed_experts is not None
        rollout.routed_experts[0] = [0, num_experts - 1]
    world = World(write_tiny_model(tmp_path / "model", num_experts=num_experts, **sizes), batch=batch_of(made))
    probe = DispatchProbe(world.policy.chunks, world.micros)
    with world.replay.replay(world.routes, min_agreement=0.0):
        world.run()
    probe.remove()
    for one in probe.seen:
        given = world.routes[one.micro]
        wanted = torch.zeros_like(one.experts).scatter(1, given.experts[:, one.layer].long(), True)
        assert torch.equal(one.experts[given.present], wanted[given.present])
    wrong = [replace(entry, experts=entry.experts.long()) for entry in world.routes]
    wrong[0].experts[0, 1, 0] = num_experts
    with (
        pytest.raises(
            ReplayError, match=rf"micro-batch 0, row 0, layer 1: experts \[{num_experts}, .* {num_experts - 1}"
        ),
        world.replay.replay(wrong),
    ):
        pass


def test_too_few_and_too_many_micro_batches(world: World) -> None:
    number = len(world.micros)
    assert number > 1
    too_many = rf"layer 0: pass of micro-batch {number}, but there are routes for {number - 1}"
    with pytest.raises(ReplayError, match=too_many), world.replay.replay(world.routes[:-1]):
        world.run()
    too_few = rf"layer 0: {number - 1} forward passes.* {number}"
    with pytest.raises(ReplayError, match=too_few), world.replay.replay(world.routes):
        world.run(micros=world.micros[:-1])
    with pytest.raises(ReplayError, match="another pass ran in the same block"), world.replay.replay(world.routes):
        _ = world.run(), world.run()


def test_routes_for_another_number_of_tokens(world: World) -> None:
    short = [MicroRoutes(entry.experts[:-1], None) for entry in world.routes]
    tokens = world.micros[0].num_slots
    message = rf"layer 0, micro-batch 0: .* {tokens} tokens.* {tokens - 1}\."
    with pytest.raises(ReplayError, match=message), world.replay.replay(short):
        world.run()


def loss_of(world: World) -> torch.Tensor:
    """A scalar of one micro-batch with its graph, outside of Megatron's schedules."""
    micro, chunk = world.micros[0], world.policy.chunks[0]
    chunk.train()
    inputs = {"input_ids": micro.input_ids, "position_ids": torch.zeros_like(micro.input_ids)}
    return chunk(**inputs, attention_mask=None, packed_seq_params=micro.packing).sum()


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("kind", ["uniform", "moe"])
def test_backward_outside_of_the_block_is_an_error(
    kind: str, trains: bool, models: dict[str, Path], one_rank: None
) -> None:
    """Also after other passes in a block and outside."""
    world = World(models["base"], kind)
    with world.replay.replay(world.routes[:1]):
        loss = loss_of(world)
    if trains:
        world.run()
        with world.replay.replay(world.routes):
            world.run(backward=True)
    with pytest.raises(ReplayError, match=r"layer \d: recomputation of an unknown forward pass: .* has closed"):
        loss.backward()


@pytest.mark.parametrize("kind", ["none", "uniform"])
def test_a_broken_block_leaves_the_routers_native(kind: str, models: dict[str, Path], one_rank: None) -> None:
    world = World(models["base"], kind)
    before = world.run()
    with pytest.raises(ZeroDivisionError), world.replay.replay(world.routes):
        _ = world.run(micros=world.micros[:1]), 1 / 0
    assert world.same(before)
    with pytest.raises(ZeroDivisionError), world.replay.record():
        _ = 1 / 0
    with pytest.raises(ReplayError, match="used the routes of 1"), world.replay.replay(world.routes[:1]):
        pass
    world.run(backward=True)  # its recomputations belong to itself
    assert world.same(before)
    with world.replay.replay(world.routes):  # and usable
        replayed = world.run()
    assert not torch.equal(replayed[0], before[0])


def test_blocks_do_not_nest(world: World) -> None:
    for outer in (world.replay.record(), world.replay.replay(world.routes)):
        with pytest.raises(ReplayError, match="do not nest"), outer, world.replay.record():
            pytest.fail("the block must not run")
    with pytest.raises(ReplayError, match="another RoutingReplay"), world.replay.record():
        RoutingReplay(world.policy.chunks)


def test_an_older_replay_of_the_same_model_is_refused(world: World) -> None:
    newer = RoutingReplay(world.policy.chunks, min_agreement=0.0)
    with pytest.raises(ReplayError, match="use the newest"), world.replay.record():
        pytest.fail("the block must not run")
    with newer.replay(world.routes):
        world.run()
    newer.detach()
    assert all(router.router_replay is None for router in _routers(world.policy))


def _routers(policy: Policy) -> Iterator[Any]:
    for chunk in policy.chunks:
        yield from (module for module in chunk.modules() if isinstance(module, TopKRouter))


def test_missing_rows_route_natively(world: World) -> None:
    absent = [
        MicroRoutes(torch.zeros_like(entry.experts), torch.zeros(len(entry.experts), dtype=torch.bool))
        for entry in world.routes
    ]
    before = world.run()
    with world.replay.replay(absent):
        assert all(torch.equal(a, b) for a, b in zip(world.run(), before, strict=True))


def test_observing_tells_what_the_routers_wanted_and_comparing_how_much_is_shared(world: World) -> None:
    probe = DispatchProbe(world.policy.chunks, world.micros)
    with world.replay.replay(world.routes, observe=True, compared=world.routes) as seen:
        world.run()
    probe.remove()
    assert probe.violations(rollouts(), world.policy.shape.moe_layers) == []
    wishes = set()
    for one in probe.seen:
        column = world.replay.layers.index(one.layer)
        wanted = torch.zeros_like(one.experts).scatter(1, seen.native[one.micro].experts[:, column].long(), True)
        assert torch.equal(wanted, torch.zeros_like(wanted).scatter(1, one.logits.topk(2).indices, True))
        given = world.routes[one.micro]
        there = torch.ones(len(wanted), dtype=torch.bool) if given.present is None else given.present
        rows = torch.zeros_like(wanted).scatter(1, given.experts[:, column].long(), True)
        assert torch.equal(seen.shared[one.micro][there, column], (one.experts & rows).sum(1)[there].to(torch.uint8))
        assert torch.equal(seen.native_shared[one.micro][there, column], (wanted & rows).sum(1)[there].to(torch.uint8))
        wishes |= set(seen.native_shared[one.micro][there, column].tolist())
    assert wishes == {0, 1, 2}
    with world.replay.record(keep=False, compared=world.routes) as watched:
        world.run()
    assert watched.routes == []
    for one, other in zip(watched.shared, world.routes, strict=True):
        assert one.shape == other.experts.shape[:2]


def _choose(chosen: torch.Tensor) -> Any:
    """transformers' router chooses these experts [T, K], weighted by the softmax of its own logits."""

    def hook(gate: Any, arguments: Any, _: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = arguments[0].reshape(-1, gate.weight.size(1)) @ gate.weight.T
        return logits, logits.gather(1, chosen).softmax(1), chosen

    return hook


def test_replay_equals_transformers_with_the_same_experts_forced(world: World, models: dict[str, Path]) -> None:
    oracle = transformers_model(models["base"])
    gates = [layer.mlp.gate for layer in oracle.model.layers if hasattr(layer.mlp, "gate")]
    made = rollouts(holes=False)
    batch = local_batch(holes=False)
    micro = micro_batch(batch, batch.num_tokens)
    routes = [local_routes(micro, world.replay.layers, world.policy.shape)]
    with world.replay.replay(routes):
        found = world.run(micros=[micro])[0].split([rollout.num_tokens for rollout in made])
    for rollout, logprobs in zip(made, found, strict=True):
        with torch.no_grad(), ExitStack() as hooks:
            for column, gate in enumerate(gates):
                chosen = torch.as_tensor(rollout.routed_experts[:, column]).long()  # type: ignore[index]
                hooks.enter_context(gate.register_forward_hook(_choose(chosen)))
            logits = oracle(torch.as_tensor(rollout.tokens, dtype=torch.int64)[None]).logits[0]
        labels = torch.as_tensor(rollout.tokens[1:], dtype=torch.int64)
        expected = logits[:-1].double().log_softmax(-1).gather(1, labels[:, None])[:, 0]
        torch.testing.assert_close(logprobs[1:].cpu().double(), expected, rtol=0, atol=1e-5)


BLOCKING: dict[str, Any] = {
    "moe_router_fusion": True,
    "moe_router_load_balancing_type": "sinkhorn",
    "moe_expert_capacity_factor": 1.0,
    "moe_expert_rank_capacity_factor": 1.0,
    "moe_router_force_load_balancing": True,
    "moe_router_force_biased": 0.5,
    "overlap_moe_expert_parallel_comm": True,
    "mlp_chunks_for_training": 2,
    "cuda_graph_impl": "local",
    "enable_cuda_graph": True,
    "external_cuda_graph": True,
}


@pytest.mark.parametrize("setting", [blocker.setting for blocker in REPLAY_BLOCKERS])
def test_every_setting_that_bypasses_the_hook_is_refused(setting: str, world: World) -> None:
    routers = list(_routers(world.policy))
    setattr(routers[1].config, setting, BLOCKING[setting])  # the config is shared; set after Megatron's own checks
    with pytest.raises(ReplayError, match=rf"{setting} = .* replay cannot hold"):
        RoutingReplay(world.policy.chunks)


def test_a_model_without_the_hook_is_refused(world: World) -> None:
    for router in _routers(world.policy):
        del router.router_replay
    with pytest.raises(ReplayError, match=r"no replay hook.*0\.16.*megarl patch apply"):
        RoutingReplay(world.policy.chunks)


def test_something_that_is_no_model_is_refused() -> None:
    with pytest.raises(ReplayError, match="Linear has no decoder"):
        RoutingReplay(torch.nn.Linear(2, 2))


def _expert(value: int, *place: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(experts: np.ndarray) -> np.ndarray:
        experts = experts.copy()
        experts[place] = value
        return experts

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_expert(5, 0, 1), "different ones of 0 to 7"),
        (_expert(8, 0, 1, 0), "8.*different ones of 0 to 7"),
        (lambda experts: experts[:, :2], "2 layers.*3 MoE layers"),
        (lambda experts: experts[:, :, :1], "top-1.*top-2"),
        (None, "no routed experts"),
    ],
)
def test_routes_that_cannot_be_of_this_model_are_named(change: Any, message: str, models: dict[str, Path]) -> None:
    shape = read_shape(models["base"])
    check_rollouts(rollouts(), shape)
    *others, last = rollouts()[:4]
    if change is None:
        broken = replace(last, routed_experts=None, routed_mask=None)
    else:
        broken = replace(last, routed_experts=change(last.routed_experts))
    with pytest.raises(TraceError, match=rf"group 1 sample 1.*{message}"):
        check_rollouts([*others, broken], shape)


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
