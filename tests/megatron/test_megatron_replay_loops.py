"""Replay holds in loops of any order: each recomputation uses the experts of its own first pass, or raises."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from cases_loops import (
    CHECKPOINTS,
    MODES,
    NESTED,
    ORDERS,
    A,
    B,
    Passes,
    World,
    all_points,
    largest_difference,
)
from matrix_world import gradients
from ranks import Case, case
from torch.utils.checkpoint import checkpoint

from megarl.errors import ReplayError
from megarl.replay import MicroRoutes, pass_log
from megarl.replay.megatron_state import unwrap

TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def world() -> World:
    return World({})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_acceptance_gradients_are_those_without_recomputation(
    kind: str, mode: str, world: World, one_rank: None
) -> None:
    errors = {point: world.error(*point) for point in all_points() if point[1:3] == (kind, mode)}
    assert len(errors) >= len(ORDERS) - 1
    assert {point: error for point, error in errors.items() if not error < TOLERANCE} == {}


def whole_in_evaluation(passes: Passes) -> None:
    passes.chunk.eval()
    (passes.loss(A) - 2.0 * passes.loss(B)).backward()
    passes.chunk.train()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [*CHECKPOINTS, *NESTED])
def test_gradients_of_evaluation_are_those_without_recomputation(
    kind: str, mode: str, world: World, one_rank: None
) -> None:
    expected = world.gradients(whole_in_evaluation, "none", mode)
    assert largest_difference(world.gradients(whole_in_evaluation, kind, mode), expected) < TOLERANCE
    if kind in NESTED:  # replay follows into checkpoints that the forward pass had not
        assert world.error("eval_with_gradients", kind, mode, "nothing") < TOLERANCE


POINTS = tuple(
    (order, kind, mode, frozen)
    for order, frozen in (("joint", "nothing"), ("lifo", "nothing"), ("no_grad_first", "nothing"), ("fifo", "routers"))
    for kind in ("uniform", "moe", "layers not reentrant")
    for mode in MODES
)
CASES = [case(2, "cases_loops:loops", layout, points=POINTS) for layout in ("ep2", "tp2 ep2 etp1")]


@pytest.mark.multirank
@pytest.mark.parametrize("case", CASES, ids=["ep2", "tp2-ep2-etp1"])
def test_acceptance_gradients_are_those_without_recomputation_on_two_ranks(
    case: Case, outcome: dict[str, float]
) -> None:
    assert len(outcome) == len(POINTS)
    assert {point: error for point, error in outcome.items() if not error < TOLERANCE} == {}


class Graphs:
    """Gradients of graphs that were made at one time and go backward at another."""

    def __init__(self, world: World, kind: str) -> None:
        self.model, self.replay = world.model(kind)
        self.passes = Passes(self.model, world.micros)
        self.routes = world.routes(self.model, self.replay)

    def gradients(self, loss: torch.Tensor) -> dict[str, np.ndarray]:
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()
        loss.backward()
        return gradients(self.model.chunks)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_region_with_two_passes_of_a_router(reentrant: bool, world: World, one_rank: None) -> None:
    graphs = Graphs(world, "none")

    def both(scale: torch.Tensor) -> torch.Tensor:
        return scale * (graphs.passes.loss(A) - 2.0 * graphs.passes.loss(B))

    scale = torch.ones((), requires_grad=True)
    with graphs.replay.replay(graphs.routes[:2]):
        expected = graphs.gradients(both(scale))
    with graphs.replay.replay([graphs.routes[B], *graphs.routes[:2]]):
        graphs.passes.score(B)  # the checkpoint's node is the next that is made
        found = graphs.gradients(checkpoint(both, scale, use_reentrant=reentrant))
    assert largest_difference(found, expected) < TOLERANCE


def test_a_pass_that_a_backward_hook_starts_is_refused_in_a_block_and_native_outside(
    world: World, one_rank: None
) -> None:
    graphs = Graphs(world, "none")

    def starting_a_pass() -> torch.Tensor:
        loss = graphs.passes.loss(A)
        scaled = loss * 2.0
        scaled.register_hook(lambda _: graphs.passes.score(B))
        return scaled

    starting_a_pass().backward()
    with graphs.replay.record(), pytest.raises(ReplayError, match="no known checkpoint started it"):
        starting_a_pass().backward()


@pytest.mark.parametrize("again", ["after a pass in evaluation mode", "twice"])
def test_missing_rows_keep_the_experts_of_the_first_pass(again: str, world: World, one_rank: None) -> None:
    """Also where the routers would choose others by then, as they may where sums are not deterministic."""
    graphs = Graphs(world, "experts reentrant")
    routes = [MicroRoutes(graphs.routes[A].experts, torch.arange(len(graphs.routes[A].experts)) % 3 > 0)]
    used: list[torch.Tensor] = []
    routers = [layer.mlp.router for layer in unwrap(graphs.model.chunks[0]).decoder.layers]
    taps = [router.register_forward_hook(lambda _, __, out: used.append(out[1].clone())) for router in routers]
    chunk = graphs.model.chunks[0]
    chunk.train(again == "twice")
    try:
        with graphs.replay.replay(routes):
            loss = graphs.passes.loss(A)
            chunk.train()
            for times in (1, 2) if again == "twice" else (1,):
                with torch.no_grad():
                    for router in routers:
                        router.weight.neg_()
                loss.backward(retain_graph=times == 1)
                assert len(used) == 4 * (times + 1)
                assert all(torch.equal(a, b) for a, b in zip(used[:4], reversed(used[-4:]), strict=True))
    finally:
        chunk.train()
        for tap in taps:
            tap.remove()
        world.forget("experts reentrant")


def test_hooks_are_not_taken_away_inside_of_a_block(world: World, one_rank: None) -> None:
    graphs = Graphs(world, "none")
    with graphs.replay.record() as recording:
        with pytest.raises(ReplayError, match="recording or replaying; detach after"):
            graphs.replay.detach()
        graphs.passes.score(A)
    assert len(recording.routes) == 1


def test_frames_of_graphs_that_are_gone_are_not_kept(world: World, one_rank: None) -> None:
    graphs, held = Graphs(world, "layers not reentrant"), []
    for _ in range(3):
        with graphs.replay.record():
            graphs.passes.loss(A)
        gc.collect()
        held.append(sum(type(one).__module__ == pass_log.__name__ for one in gc.get_objects()))
    assert held[0] == held[2]
