"""Each recomputation finds its own first pass, in random programs of checkpoints and backward passes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from megarl.errors import ReplayError
from megarl.megatron.replay.pass_log import KEPT_BLOCKS, Block, PassLog


@dataclass
class Router:
    """Asks a log at each call, as a router does, and remembers what it was told."""

    log: PassLog = field(default_factory=lambda: PassLog(0))
    first: list[int | None] = field(default_factory=list)
    """The micro-batch of each region's first pass; regions are numbered."""
    again: list[tuple[int, int | None]] = field(default_factory=list)
    """(region, micro-batch) of each recomputation."""

    def region(self) -> Callable[[torch.Tensor], torch.Tensor]:
        name = len(self.first)
        self.first.append(None)

        def run(x: torch.Tensor) -> torch.Tensor:
            call = self.log.identify(True)
            if call.first:
                self.first[name] = call.micro
            else:
                self.again.append((name, call.micro))
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
    router.log.open(Block())
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
    router.log.close()


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant", "both", "both the other way", "two", "hidden"])
def test_a_graph_may_go_backward_more_than_once(kind: str) -> None:
    router = Router()
    x = torch.ones(2, requires_grad=True)
    router.log.open(Block())
    a, b = forward(router, kind, x), forward(router, kind, x)
    assert a is not None
    assert b is not None
    for _ in range(2):
        (a + b).sum().backward(retain_graph=True)
    assert len(router.again) >= 4
    assert router.mistakes() == []


def test_the_node_of_a_checkpoint_may_be_the_first_of_a_block_or_follow_a_pass_without_gradients() -> None:
    router = Router()
    x = torch.ones(2, requires_grad=True)
    router.log.open(Block())
    a = forward(router, "reentrant", x)
    forward(router, "no_grad", x)
    b = forward(router, "reentrant", x)
    for graph in (b, a):
        assert graph is not None
        graph.sum().backward()
    assert router.again == [(2, 2), (0, 0)]


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_blocks_that_have_closed_are_refused_and_passes_between_them_are_native(kind: str) -> None:
    router = Router()
    x = torch.ones(2, requires_grad=True)
    graphs = []
    for _ in range(3):
        graphs.append(forward(router, kind, x))  # of no block
        router.log.open(Block())
        graphs.append(forward(router, kind, x))
        router.log.close()
    for index, graph in enumerate(graphs):
        assert graph is not None
        if index % 2:
            with pytest.raises(ReplayError, match=r"layer 0: .* the block of its forward pass has closed"):
                graph.sum().backward()
        else:
            graph.sum().backward()
    assert [micro for _, micro in router.again] == [None, None, None]


def test_a_graph_that_is_older_than_the_blocks_that_are_remembered_is_refused() -> None:
    router = Router()
    x = torch.ones(2, requires_grad=True)
    native = forward(router, "reentrant", x)
    for _ in range(KEPT_BLOCKS):
        router.log.open(Block())
        forward(router, "reentrant", x)
        router.log.close()
    recent = forward(router, "reentrant", x)
    assert native is not None
    assert recent is not None
    native.sum().backward(retain_graph=True)
    router.log.open(Block())
    router.log.close()
    recent.sum().backward()
    with pytest.raises(ReplayError, match="has closed"):
        native.sum().backward()


def test_more_calls_than_in_the_first_pass_are_refused() -> None:
    log, calls = PassLog(3), [1]

    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(calls[0]):
            log.identify(True)
        return (x * x).sin()

    for reentrant in (True, False):
        log.open(Block())
        calls[0] = 1
        graph = checkpoint(run, torch.ones(2, requires_grad=True), use_reentrant=reentrant)
        calls[0] = 2
        with pytest.raises(ReplayError, match=r"layer 3: .* called more often than in the first pass"):
            graph.sum().backward()
        log.close()


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


@pytest.mark.parametrize("hooked", [False, True])
def test_a_checkpoint_of_ones_own_is_identified_by_its_run_function(hooked: bool) -> None:
    router = Router()
    x = torch.ones(2, requires_grad=True)
    router.log.open(Block())
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t) if hooked else nullcontext()
    graphs = [_Checkpoint.apply(router.region(), x, "run_function", False) for _ in range(2)]
    with hooks:
        for graph in graphs:
            graph.sum().backward()
    assert router.mistakes() == []
    assert len(router.again) == 2


@pytest.mark.parametrize(
    ("name", "graph", "message"),
    [
        ("function", False, "no known checkpoint started it .an autograd function with run_function"),
        ("run_function", True, "its checkpoint has no first pass without a graph"),
    ],
)
def test_a_checkpoint_that_cannot_be_identified_is_refused(name: str, graph: bool, message: str) -> None:
    """Another pass without a graph stands behind its own, and must not be taken for it."""
    router = Router()
    x = torch.ones(2, requires_grad=True)
    router.log.open(Block())
    loss = _Checkpoint.apply(router.region(), x, name, graph).sum()
    forward(router, "no_grad", x)
    with pytest.raises(ReplayError, match=message):
        loss.backward()


def test_a_block_closes_on_the_thread_that_opened_it() -> None:
    router, raised = Router(), []
    x = torch.ones(2, requires_grad=True)
    block = Block()
    router.log.open(block)
    loss = forward(router, "reentrant", x)
    assert loss is not None

    def close() -> None:
        router.log.close()
        with pytest.raises(ReplayError, match="closes on another thread than it was opened on"):
            block.check_thread()
        raised.append(True)

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert raised
    with pytest.raises(ReplayError, match="has closed"):
        loss.sum().backward()


def test_hooks_for_saved_tensors_do_not_hide_the_checkpoints_of_torch() -> None:
    router = Router()
    x = torch.ones(2, requires_grad=True)
    router.log.open(Block())
    with torch.autograd.graph.save_on_cpu():
        graphs = [forward(router, kind, x) for kind in KINDS if kind != "no_grad"]
        for graph in reversed(graphs):
            assert graph is not None
            graph.sum().backward()
    assert router.mistakes() == []
    assert len(router.again) >= 4
