"""What the watch sees: passes, rows, gates; what it costs nothing to leave off; and that it leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from corpus import MICROS, B, S, T, World, each_in_turn, joint_backward
from fifo_replay import FifoReplay, install
from matrix_world import Variant, build_alone, build_bare
from torch.utils.checkpoint import checkpoint

from megarl.errors import ReplayError
from megarl.replay import MicroRoutes
from megarl.verify import RoutingWatch
from megarl.verify.watch import pack_bits


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.fixture
def filled(world: World) -> Iterator[World]:
    """Right routes in the queues."""
    FifoReplay.clear()
    install(world.model)
    FifoReplay.fill([[routes[:, layer] for routes in world.routes] for layer in range(4)])
    yield world
    FifoReplay.clear()


def expected(world: World, present: torch.Tensor | None = None) -> list[MicroRoutes]:
    return [MicroRoutes(routes, present) for routes in world.routes]


def attributes(model: Any) -> list[set[str]]:
    return [set(vars(layer.mlp.token_dispatcher)) for layer in model.decoder.layers]


def test_nothing_is_left_behind_and_nothing_is_changed(filled: World) -> None:
    before = attributes(filled.model)
    plain = [filled.forward(batch) for batch in filled.batches]
    with RoutingWatch([filled.model]):
        watched = [filled.forward(batch) for batch in filled.batches]
    with pytest.raises(TypeError), RoutingWatch([filled.model]):
        filled.forward(None)  # type: ignore[arg-type]
    assert attributes(filled.model) == before
    assert plain == watched


def test_a_watch_that_is_off_sees_nothing(filled: World) -> None:
    with RoutingWatch([filled.model], on=False) as watch:
        assert attributes(filled.model)[0].isdisjoint({"dispatch_preprocess", "token_permutation"})
        each_in_turn(filled)
    report = watch.report(expected(filled))
    assert str(report) == "routing: nothing was watched"
    assert report.is_right
    assert report.compared.sum() == 0


def test_two_watches_of_one_model_are_refused_and_the_first_goes_on(filled: World) -> None:
    with RoutingWatch([filled.model]) as watch:
        with pytest.raises(ReplayError, match="watched already"), RoutingWatch([filled.model]):
            pass
        each_in_turn(filled)
        with pytest.raises(ReplayError, match="watched already"), watch:
            pass
    watch.report(expected(filled)).require()
    with watch:  # and again, from the start
        pass
    assert watch.report([]).compared.size == 0


@pytest.mark.parametrize("most_rows", [1, 7, 64, None])
def test_evenly_spaced_rows_bound_what_is_kept(filled: World, most_rows: int | None) -> None:
    with RoutingWatch([filled.model], most_rows=most_rows) as watch:
        each_in_turn(filled)
    stride = 1 if most_rows is None else -(-T // most_rows)
    rows = len(range(0, T, stride))
    wrong = [MicroRoutes(routes.clone()) for routes in filled.routes]
    wrong[1].experts[stride * (rows - 1), 2] = torch.tensor([6, 7])  # type: ignore[index]
    report = watch.report(wrong)
    assert report.compared.sum() == MICROS * 4 * rows
    assert (report.compared - report.right).sum() == report.compared[1, 2] - report.right[1, 2] == 1
    assert f"micro-batch 1, layer 2, row {stride * (rows - 1)}" in str(report)


def test_rows_that_are_not_present_are_not_compared(filled: World) -> None:
    present = torch.arange(T) % 3 == 0
    damaged = [MicroRoutes(torch.where(present[:, None, None], routes, 0), present) for routes in filled.routes]
    with RoutingWatch([filled.model]) as watch:
        each_in_turn(filled)
    report = watch.report(damaged)
    report.require()
    assert report.compared.tolist() == [[int(present.sum())] * 4] * MICROS
    nothing = watch.report([MicroRoutes(routes, torch.zeros(T, dtype=torch.bool)) for routes in filled.routes])
    assert not nothing.is_right
    assert "no row was compared" in str(nothing)


@pytest.mark.parametrize("step", [-2, -1, 1, 2])
def test_a_shift_of_the_sequences_of_a_batch_is_told_in_tokens(filled: World, step: int) -> None:
    """Hidden states are [s, b, h]: a token later is b rows later. The queue has the routes of [b, s], shifted."""
    whole = [routes.unflatten(0, (S, B)).transpose(0, 1) for routes in filled.routes]  # [b, s, L, K]
    with RoutingWatch([filled.model]) as watch:
        FifoReplay.clear()
        install(filled.model)
        queue = [watch.rows(routes.roll(step, 1)).experts for routes in whole]
        FifoReplay.fill([[routes[:, layer] for routes in queue] for layer in range(4)])
        each_in_turn(filled)
    causes = watch.report([watch.rows(routes) for routes in whole]).causes
    late = f"{abs(step)} token{'s' * (abs(step) > 1)} too {'late' if step > 0 else 'early'} in each of {B} sequences"
    assert [cause.text.partition("stand ")[2] for cause in causes if cause.kind == "shifted"] == [late] * MICROS


def test_recomputations_find_their_pass_in_any_order(filled: World) -> None:
    """The queue of recomputations is filled for autograd's order: with joint passes all is right then."""
    for replay in FifoReplay.registered:
        forward = list(replay.entries)
        replay.entries = forward + forward[::-1]
        replay.taken["backward"] = MICROS
    with RoutingWatch([filled.model]) as watch:
        joint_backward(filled)
    report = watch.report(expected(filled))
    report.require()
    assert report.recomputed.sum() == report.recomputed_right.sum() == MICROS * T * 4


def test_recomputations_of_equal_tokens_find_the_pass_with_their_routes(filled: World) -> None:
    for replay in FifoReplay.registered:
        forward = list(replay.entries)
        replay.entries = forward + forward[::-1]
        replay.taken["backward"] = MICROS
    FifoReplay.stage = "forward"
    with RoutingWatch([filled.model]) as watch:
        losses = [filled.forward(filled.batches[0]) for _ in range(MICROS)]
        FifoReplay.stage = "backward"
        torch.stack(losses).sum().backward()
    report = watch.report(expected(filled))
    report.require()
    assert report.recomputed.sum() == MICROS * T * 4


def test_a_watch_that_was_never_open_saw_nothing(filled: World) -> None:
    report = RoutingWatch([filled.model]).report(expected(filled))
    assert report.missing[0] == "0 forward passes ran, expected 3, one for each micro-batch"


def test_passes_without_recomputation_are_right_and_counted(filled: World) -> None:
    with RoutingWatch([filled.model]) as watch:
        FifoReplay.stage = "forward"
        losses = [filled.forward(batch) for batch in filled.batches]
        FifoReplay.stage = "backward"
        losses[0].backward()
    report = watch.report(expected(filled))
    report.require()
    assert "recomputed: 256 of 256 rows equal their forward pass, in 1 of 3 passes" in str(report)


def test_checkpoints_that_are_not_reentrant_are_recomputations() -> None:
    model = build_bare(Variant())
    block = model.decoder.layers[1]
    kept, block.forward = block.forward, lambda *a, **k: checkpoint(kept, *a, use_reentrant=False, **k)
    tokens = torch.arange(32).view(2, 16) % 30
    with RoutingWatch([model]) as watch:
        model(input_ids=tokens, position_ids=tokens, attention_mask=None, labels=tokens).sum().backward()
    forward, recomputed = zip(*watch._calls.values(), strict=True)
    assert [len(calls) for calls in forward] == [1, 1, 1, 1]
    assert [len(calls) for calls in recomputed] == [0, 1, 0, 0]


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_wrapped_chunks_and_both_dispatchers_are_watched(dispatcher: str) -> None:
    model = build_alone(Variant(router="dense_first", dispatcher=dispatcher, precision="bf16"))
    tokens = torch.arange(32).view(2, 16) % 30
    with RoutingWatch(model.chunks) as watch, torch.no_grad():
        model.chunks[0](input_ids=tokens, position_ids=tokens, attention_mask=None)
    assert watch.layers == [1, 2, 3]
    assert [len(forward) for forward, _ in watch._calls.values()] == [1, 1, 1]
    whole = torch.zeros(2, 16, 3, 2, dtype=torch.uint8)
    assert watch.rows(whole, token_ids=tokens).token_ids.tolist() == tokens.T.flatten().tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("routes", "text"),
    [
        ([MicroRoutes(torch.zeros(T, 3, 2, dtype=torch.uint8))], r"\[64, 3, 2\].* has 4 MoE layers"),
        ([MicroRoutes(torch.zeros(T, 2, dtype=torch.uint8))], r"\[64, 2\]"),
    ],
)
def test_routes_of_other_layers_are_refused(world: World, routes: list[MicroRoutes], text: str) -> None:
    watch = RoutingWatch([world.model])
    with watch, pytest.raises(ReplayError, match=text):
        watch.report(routes)


def test_another_number_of_rows_is_no_wrong_route(filled: World) -> None:
    with RoutingWatch([filled.model]) as watch:
        each_in_turn(filled)
    report = watch.report([MicroRoutes(routes[:-1]) for routes in filled.routes])
    assert "micro-batch 0: 64 rows ran, the routes have 63" in report.missing
    with pytest.raises(ReplayError, match="64 rows ran"):
        report.require()
    assert report.metrics()["watch/passes_wrong"] == MICROS + 1


def test_a_module_without_decoder_is_refused(world: World) -> None:
    with pytest.raises(ReplayError, match="most_rows = 0"):
        RoutingWatch([world.model], most_rows=0)
    with pytest.raises(ReplayError, match="decoder"):
        RoutingWatch([torch.nn.Linear(2, 2)])


@pytest.mark.parametrize("num_experts", [1, 7, 8, 9, 300])
def test_bits_are_those_of_numpy(num_experts: int) -> None:
    import numpy as np

    routing_map = torch.rand(5, num_experts, generator=torch.Generator().manual_seed(0)) < 0.3
    packed = np.packbits(routing_map.numpy(), axis=1, bitorder="little")
    np.testing.assert_array_equal(pack_bits(routing_map).numpy(), packed)
