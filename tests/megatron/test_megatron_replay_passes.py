"""Each recomputation finds its own first pass, in random programs of checkpoints and backward passes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from megarl.errors import ReplayError
from megarl.replay.pass_log import PassBlock, PassLog


@dataclass
class Router:
    """Asks a log at each call, as the only router of a model does, and remembers what it was told."""

    log: PassLog = field(default_factory=PassLog)
    first: list[int | None] = field(default_factory=list)
    """The micro-batch of each region's first pass; regions are numbered."""
    again: list[tuple[int, int | None]] = field(default_factory=list)
    """(region, micro-batch) of each recomputation."""

    def open(self) -> PassBlock:
        return self.log.open(SimpleNamespace())  # type: ignore[arg-type]

    def ask(self) -> int | None:
        """The micro-batch of a call."""
        call = self.log.identify(SimpleNamespace(layer=3, column=0, chunk=0, is_first=True))  # type: ignore[arg-type]
        return None if call is None else call.micro

    def region(self) -> Callable[[torch.Tensor], torch.Tensor]:
        name, calls = len(self.first), [0]
        self.first.append(None)

        def run(x: torch.Tensor) -> torch.Tensor:
            micro = self.ask()
            if calls[0] == 0:
                self.first[name] = micro
            else:
                self.again.append((name, micro))
            calls[0] += 1
            return (x * x).sin()

        return run

    def mistakes(self) -> list[tuple[int, int | None]]:
        return [(name, micro) for name, micro in self.again if micro != self.first[name]]


KINDS = ("plain", "no_grad", "reentrant", "not reentrant", "both", "both the other way", "two", "three", "hidden")


def _squared_in_a_checkpoint(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """What follows the region needs tensors of it, so that recomputation cannot stop early."""

    def square(y: torch.Tensor) -> torch.Tensor:
        z = run(y)
        return (z * z).cos()

    return checkpoint(square, x, use_reentrant=False)


def _offloaded(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Other hooks for saved tensors lie above those of the checkpoint."""
    with torch.autograd.graph.save_on_cpu():
        y = run(x)
    return (y * y).cos()


def forward(router: Router, kind: str, x: torch.Tensor) -> torch.Tensor | None:
    """One pass of the router in a region of this kind."""
    run = router.region()
    if kind == "no_grad":
        with torch.no_grad():
            run(x)
        return None
    if kind == "plain":
        return run(x)
    if kind == "both":
        return checkpoint(lambda y: checkpoint(run, y, use_reentrant=True), x, use_reentrant=False)
    if kind == "both the other way":
        return checkpoint(lambda y: checkpoint(run, y, use_reentrant=False), x, use_reentrant=True)
    if kind in ("two", "three"):  # none of them reentrant
        for _ in range(2 if kind == "two" else 3):
            run = partial(_squared_in_a_checkpoint, run)
        return run(x)
    if kind == "hidden":
        return checkpoint(partial(_offloaded, run), x, use_reentrant=False)
    return checkpoint(run, x, use_reentrant=kind == "reentrant")


@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=8),
    order=st.randoms(use_true_random=False),
    early=st.integers(0, 3),
    joint=st.booleans(),
)
def test_every_recomputation_finds_its_first_pass(kinds: list[str], order: object, early: int, joint: bool) -> None:
    """Some passes before the block, some in it; backward passes in any order, one by one or in one."""
    router = Router()
    x = torch.ones(2, requires_grad=True)
    graphs = [forward(router, kind, x) for kind in kinds[:early]]
    block = router.open()
    graphs += [forward(router, kind, x) for kind in kinds[early:]]
    assert router.first == [None] * len(kinds[:early]) + list(range(len(kinds[early:])))
    ready = [graph for graph in graphs if graph is not None]
    order.shuffle(ready)  # type: ignore[attr-defined]
    if joint and ready:
        torch.stack(ready).sum().backward()
    else:
        for graph in ready:
            graph.sum().backward()
    assert router.mistakes() == []
    assert {name for name, _ in router.again} == {
        name for name, kind in enumerate(kinds) if kind not in ("plain", "no_grad")
    }
    router.log.close(block)


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant", "both", "both the other way", "two", "hidden"])
def test_a_graph_may_go_backward_more_than_once(kind: str) -> None:
    router = Router()
    x = torch.ones(2, requires_grad=True)
    router.open()
    a, b = forward(router, kind, x), forward(router, kind, x)
    assert a is not None
    assert b is not None
    for _ in range(2):
        (a + b).sum().backward(retain_graph=True)
    assert len(router.again) >= 4
    assert router.mistakes() == []


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_blocks_that_have_closed_are_refused_and_passes_between_them_are_native(kind: str) -> None:
    router = Router()
    x = torch.ones(2, requires_grad=True)
    graphs = []
    for _ in range(3):
        graphs.append(forward(router, kind, x))  # of no block
        block = router.open()
        graphs.append(forward(router, kind, x))
        router.log.close(block)
    for index, graph in enumerate(graphs):
        assert graph is not None
        if index % 2:
            with pytest.raises(ReplayError, match=r"layer 3: .* the block of its forward pass has closed"):
                graph.sum().backward()
        else:
            graph.sum().backward()
    assert [micro for _, micro in router.again] == [None, None, None]


class _Checkpoint(torch.autograd.Function):
    """Somebody's own checkpoint, which keeps its function under the name that torch uses, or another."""

    @staticmethod
    def forward(ctx, function, x, name, graph):  # type: ignore[no-untyped-def, override]
        setattr(ctx, name, function)
        ctx.name = name
        ctx.save_for_backward(x)
        with torch.set_grad_enabled(graph):
            return function(x).detach()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def, override]
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            getattr(ctx, ctx.name)(x).backward(grad)
        return None, x.grad, None, None


@pytest.mark.parametrize("name", ["run_function", "function"])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_checkpoint_of_ones_own_is_identified_by_its_context(hooked: bool, graph: bool, name: str) -> None:
    """Another pass without a graph stands behind each, and is not taken for it."""
    router = Router()
    x = torch.ones(2, requires_grad=True)
    router.open()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t) if hooked else nullcontext()
    graphs = []
    for _ in range(2):
        graphs.append(_Checkpoint.apply(router.region(), x, name, graph))
        forward(router, "no_grad", x)
    with hooks:
        for one in graphs:
            one.sum().backward()
    assert router.mistakes() == []
    assert len(router.again) == 2


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("plain", "no_grad")])
def test_threads_do_not_mix_their_graphs(kind: str) -> None:
    """Each has its own numbers of autograd, and its own block; backward passes run on the other's thread."""
    router, graphs = Router(), {}
    x = torch.ones(2, requires_grad=True)
    barrier = threading.Barrier(2)

    def run(place: int) -> None:
        block = router.open()
        for number in range(2 + place):
            barrier.wait(60) if number < 2 else None
            graphs[place, number] = forward(router, kind, x)
        barrier.wait(60)
        for (other, _), graph in graphs.items():
            if other != place:
                graph.sum().backward()
        barrier.wait(60)
        router.log.close(block)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert router.mistakes() == []
    assert len(router.again) >= 5
    assert sorted(router.first) == [0, 0, 1, 1, 2]


def test_a_pass_of_no_block_on_another_thread_is_native() -> None:
    router = Router()
    x = torch.ones(2, requires_grad=True)
    router.open()
    thread = threading.Thread(target=lambda: forward(router, "reentrant", x).sum().backward())  # type: ignore[union-attr]
    thread.start()
    thread.join()
    forward(router, "reentrant", x)
    assert router.first == [None, 0]
    assert router.again == [(0, None)]
