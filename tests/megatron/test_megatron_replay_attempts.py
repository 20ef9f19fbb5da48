"""Odd things that callers do around replay: each is right, or ends in a ReplayError that names the cause.

The expected gradients are those of one block per micro-batch, or of no block, without recomputation.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases_loops import A, B, C, World, largest_difference
from matrix_world import NUM_EXPERTS, NUM_LAYERS, VOCAB, Variant, build_bare, gradients
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from megarl.errors import ReplayError
from megarl.replay import MicroRoutes, RoutingReplay
from megarl.replay.megatron_state import unwrap

TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def world() -> World:
    return World({})


class Lab:
    """A model of one kind of recomputation, its replay, and the gradients of what an attempt does with them."""

    def __init__(self, world: World, kind: str) -> None:
        self.world, self.kind = world, kind
        self.model, self.replay = world.model(kind)
        self.chunk: Any = self.model.chunks[0]
        self.gpt: Any = unwrap(self.chunk)
        self.layers: Any = self.gpt.decoder.layers
        self.routes = [routes_of(micro) for micro in (A, B, C)]
        self.chunk.train()
        self.chunk.zero_grad_buffer()

    def loss(self, micro: int) -> torch.Tensor:
        ids = self.ids(micro)
        logits = self.chunk(input_ids=ids, position_ids=torch.zeros_like(ids), attention_mask=None)
        return weigh(logits, micro)

    def block(self, *micros: int) -> Any:
        return self.replay.replay([self.routes[micro] for micro in micros])

    def gradients(self) -> dict[str, np.ndarray]:
        found = gradients(self.model.chunks)
        self.chunk.zero_grad_buffer()
        return found

    def ids(self, micro: int) -> torch.Tensor:
        """int64 [b, s], as long in all micro-batches."""
        return torch.randint(0, VOCAB, (2, 6), generator=torch.Generator().manual_seed(micro))

    def hidden(self, micro: int) -> torch.Tensor:
        """What goes into the first layer."""
        ids = self.ids(micro)
        return self.gpt.embedding(input_ids=ids, position_ids=torch.zeros_like(ids))

    def run_layer(self, place: int, hidden: torch.Tensor) -> torch.Tensor:
        rotary = self.gpt.rotary_pos_emb(len(hidden))
        return self.layers[place](hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary)[0]

    def end(self, hidden: torch.Tensor, micro: int) -> torch.Tensor:
        """The loss of what the last layer returns."""
        logits, _ = self.gpt.output_layer(self.gpt.decoder.final_layernorm(hidden))
        return weigh(logits.transpose(0, 1), micro)


def weigh(logits: torch.Tensor, micro: int) -> torch.Tensor:
    """A scalar that every token has a part in."""
    return (logits.float() * torch.randn(logits.shape, generator=torch.Generator().manual_seed(micro))).sum()


def routes_of(micro: int) -> MicroRoutes:
    """Random experts; every fifth row is missing."""
    experts = torch.rand(12, NUM_LAYERS, NUM_EXPERTS, generator=torch.Generator().manual_seed(micro)).argsort(2)[
        ..., :2
    ]
    return MicroRoutes(experts, torch.arange(12) % 5 > 0)


def expected(world: World, replayed: Sequence[int] = (), native: Sequence[int] = ()) -> dict[str, np.ndarray]:
    lab = Lab(world, "none")
    for micro in replayed:
        with lab.block(micro):
            lab.loss(micro).backward()
    for micro in native:
        lab.loss(micro).backward()
    return lab.gradients()


def in_a_thread(function: Callable[[], Any]) -> Any:
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


@contextmanager
def hooked(*handles: Any) -> Any:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# --- memory of the caller


def _overwritten(lab: Lab, at: str, how: str) -> None:
    kept = [MicroRoutes(one.experts.to(torch.int32), one.present.clone()) for one in lab.routes]

    def overwrite() -> None:
        for one in kept:
            if how == "numpy":
                one.experts.numpy()[:] = 7
                one.present.numpy()[:] = False
            elif how == "out":
                torch.add(one.experts, 1, out=one.experts)
            else:
                one.experts.data.zero_()
                one.present.data.fill_(False)

    with lab.replay.replay(kept):
        if at == "before the passes":
            overwrite()
        losses = [lab.loss(micro) for micro in (A, B, C)]
        if at == "before the recomputation":
            overwrite()
        sum(losses).backward()


def _recording_overwritten(lab: Lab) -> None:
    with lab.replay.record() as recording:
        for micro in (A, B):
            lab.loss(micro)
    with lab.replay.replay(recording):
        for one in recording.routes:
            one.experts.numpy()[:] = 0
        (lab.loss(A) + lab.loss(B)).backward()


# --- passes inside passes


def _probed(lab: Lab, place: int, graph: bool, when: str, pre: bool = False) -> None:
    """A hook of a layer runs the model on another micro-batch."""
    calls = [0]

    def probe(*_: Any) -> None:
        calls[0] += 1
        again = torch._C._current_graph_task_id() != -1
        if len(probing) or (when == "first" and again) or (when == "again" and not again):
            return
        probing.append(1)
        with nullcontext() if graph else torch.no_grad():
            lab.loss(C)
        probing.pop()

    probing: list[int] = []
    register = lab.layers[place].register_forward_pre_hook if pre else lab.layers[place].register_forward_hook
    with hooked(register(probe)), lab.block(A, B):
        a = lab.loss(A)
        (lab.loss(B) + a).backward()
    assert calls[0] >= 2


def _layer_probed(lab: Lab) -> None:
    """A hook of the third layer calls the second one."""

    def probe(_: Any, args: Any, kwargs: Any, output: Any) -> None:
        with torch.no_grad():
            lab.layers[1].mlp(kwargs.get("hidden_states", output[0]))

    with hooked(lab.layers[2].register_forward_hook(probe, with_kwargs=True)), lab.block(A, B):
        (lab.loss(A) + lab.loss(B)).backward()


def _backward_in_forward(lab: Lab) -> None:
    """A hook takes the gradient of an earlier pass."""
    earlier: list[torch.Tensor] = []

    def see(*_: Any) -> None:
        if earlier and torch._C._current_graph_task_id() == -1:
            earlier.pop().backward()

    with hooked(lab.layers[2].register_forward_hook(see)), lab.block(A, B):
        earlier.append(lab.loss(A))
        lab.loss(B).backward()


# --- layers run by the caller


def _layer_by_layer(lab: Lab, order: Sequence[int]) -> None:
    with lab.block(A, B):
        hidden = {micro: lab.hidden(micro) for micro in (A, B)}
        at = {A: 0, B: 0}
        for micro in order:
            hidden[micro] = lab.run_layer(at[micro], hidden[micro])
            at[micro] += 1
        sum(lab.end(hidden[micro], micro) for micro in (A, B)).backward()


# --- threads


def _threads_of_two_graphs(lab: Lab) -> None:
    """Graphs of two threads have the same numbers."""
    native = in_a_thread(lambda: lab.loss(C))
    with lab.block(A, B):
        a = lab.loss(A)
        (a + lab.loss(B)).backward()
    native.backward()


def _two_blocks_at_once(lab: Lab) -> None:
    def step() -> None:
        with lab.block(B):
            lab.loss(B).backward()

    with lab.block(A):
        a = lab.loss(A)
        in_a_thread(step)
        a.backward()


def _passes_on_other_threads(lab: Lab) -> None:
    with lab.block(A, B):
        a = in_a_thread(lambda: lab.loss(A))
        (lab.loss(B) + a).backward()


# --- errors, modes, wrappers


def _fail(lab: Lab, micro: int, place: int, error: type[BaseException] = RuntimeError) -> None:
    def fail(*_: Any) -> None:
        raise error

    with hooked(lab.layers[place].register_forward_hook(fail)), pytest.raises(error):
        lab.loss(micro)


def _failed_and_tried_again(lab: Lab, place: int) -> None:
    with lab.block(A, B):
        _fail(lab, A, place)
        a = lab.loss(A)
        _fail(lab, B, place)
        (a + lab.loss(B)).backward()


def _failed_and_left_out(lab: Lab) -> None:
    with lab.block(A, B, C):
        a = lab.loss(A)
        _fail(lab, C, 3)
        (a + lab.loss(B)).backward()


def _forward_itself(lab: Lab) -> None:
    """Not by calling the module, so that its hooks do not run."""
    with lab.block(A, B):
        losses = [weigh(lab.gpt.forward(ids, torch.zeros_like(ids), None), m) for m in (A, B) for ids in [lab.ids(m)]]
        sum(losses).backward()


def _functional(lab: Lab) -> None:
    parameters = dict(lab.gpt.named_parameters())

    def call(ids: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(lab.gpt, parameters, (ids, torch.zeros_like(ids), None))

    with lab.block(A, B):
        sum(weigh(call(lab.ids(micro)), micro) for micro in (A, B)).backward()


def _whole_model_in_a_checkpoint(lab: Lab, reentrant: bool) -> None:
    scale = torch.ones((), requires_grad=True)

    def run(micro: int, by: torch.Tensor) -> torch.Tensor:
        return by * lab.loss(micro)

    with lab.block(A, B):
        a = checkpoint(run, A, scale, use_reentrant=reentrant)
        (checkpoint(run, B, scale, use_reentrant=reentrant) + a).backward()


def _swapped_inputs(lab: Lab) -> None:
    """A hook that is set later replaces the tokens."""

    def swap(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "input_ids": lab.ids(A)}

    routes = MicroRoutes(lab.routes[A].experts, lab.routes[A].present, lab.ids(A).T.flatten())
    with hooked(lab.gpt.register_forward_pre_hook(swap, with_kwargs=True)), lab.replay.replay([routes]) as seen:
        ids = lab.ids(B)
        weigh(lab.chunk(input_ids=ids, position_ids=torch.zeros_like(ids), attention_mask=None), A).backward()
    assert seen.compared_tokens == 1


class _Hidden(torch.autograd.Function):
    """A checkpoint whose forward takes no ctx."""

    @staticmethod
    def forward(function, x):  # type: ignore[no-untyped-def, override]
        return function(x)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def, override]
        ctx.function = inputs[0]
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def, override]
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.function(x).backward(grad)
        return None, x.grad


def _checkpoint_without_ctx(lab: Lab, in_block: bool) -> None:
    layer = lab.layers[1]
    original = layer.forward

    def forward(hidden_states: torch.Tensor, **named: Any) -> Any:
        return _Hidden.apply(lambda x: original(x, **named)[0], hidden_states), None

    layer.forward = forward
    try:
        with lab.block(A) if in_block else nullcontext():
            lab.loss(A).backward()
    finally:
        del layer.forward


def _native_after_a_checkpoint_without_ctx(lab: Lab) -> None:
    """What is not known of one kind of checkpoint does not touch others."""
    with pytest.raises(ReplayError, match="no known checkpoint started it"):
        _checkpoint_without_ctx(lab, in_block=True)
    lab.chunk.zero_grad_buffer()
    lab.loss(B).backward()
    with lab.block(A):
        lab.loss(A).backward()


class _Frame(list[torch.Tensor]):
    __hash__, __eq__ = object.__hash__, object.__eq__

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()


class _recomputation_hook(torch.autograd.graph.saved_tensors_hooks):  # noqa: N801, as Transformer Engine's
    def __init__(self, frame: _Frame) -> None:
        def pack_hook(x: torch.Tensor) -> torch.Tensor:
            frame.append(x.detach())
            return x.detach()

        super().__init__(pack_hook, lambda x: x)


class _checkpoint_hook(torch.autograd.graph.saved_tensors_hooks):  # noqa: N801
    """Transformer Engine's non-reentrant checkpoint, without its random states."""

    def __init__(self, frame: _Frame, function: Callable[[], Any]) -> None:
        def pack_hook(_: torch.Tensor) -> int:
            return next(frame.numbers)

        def unpack_hook(number: int) -> torch.Tensor:
            if not frame:
                with _recomputation_hook(frame), torch.enable_grad():
                    function()
            return frame[number]

        super().__init__(pack_hook, unpack_hook)


class _StrangersHook(torch.autograd.graph.saved_tensors_hooks):
    """The same under names that nobody knows."""

    def __init__(self, frame: _Frame, function: Callable[[], Any]) -> None:
        known = _checkpoint_hook(frame, function)
        super().__init__(lambda x: known.pack_hook(x), lambda number: _recompute(frame, function)[number])


def _recompute(frame: _Frame, function: Callable[[], Any]) -> Any:
    keep = frame.append
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (keep(x.detach()), x)[1], lambda x: x), torch.enable_grad():
        function()
    return frame


def _by_hooks_of(kind: Any, lab: Lab, in_block: bool = True) -> None:
    """Layers are checkpointed by hooks for saved tensors, and recomputed on a thread of autograd's, as on a GPU."""

    def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        function = partial(original, *args, **kwargs)
        with kind(_Frame(), function):
            return function()

    for layer in lab.layers:
        layer.forward = partial(forward, layer.forward)
    with lab.block(A, B):
        loss = lab.loss(A) + lab.loss(B)
        if in_block:
            in_a_thread(loss.backward)
    if not in_block:
        loss.backward()


KINDS = ("none", "uniform", "layers not reentrant", "moe")
Attempt = Callable[[Lab], None]

RIGHT: Mapping[str, tuple[Attempt, Sequence[int], Sequence[int]]] = {
    **{
        f"overwritten by {how} {at}": (partial(_overwritten, at=at, how=how), (A, B, C), ())
        for how in ("numpy", "out", "data")
        for at in ("before the passes", "before the recomputation")
    },
    "a recording is overwritten": (_recording_overwritten, (), (A, B)),
    **{
        f"probe {when} at layer {place}, {'graph' if graph else 'no graph'}{', before it' if pre else ''}": (
            partial(_probed, place=place, graph=graph, when=when, pre=pre),
            (A, B),
            (),
        )
        for when, place, graph, pre in (
            *(("always", place, graph, False) for place in (0, 3) for graph in (True, False)),
            *((when, 2, True, pre) for when in ("always", "first", "again") for pre in (True, False)),
        )
    },
    "a backward pass in a forward pass": (_backward_in_forward, (A, B), ()),
    "layers one after the other": (partial(_layer_by_layer, order=(A,) * 4 + (B,) * 4), (A, B), ()),
    "graphs of two threads": (_threads_of_two_graphs, (A, B), (C,)),
    "two blocks at once": (_two_blocks_at_once, (A, B), ()),
    "failed early and tried again": (partial(_failed_and_tried_again, place=0), (A, B), ()),
    "failed late and tried again": (partial(_failed_and_tried_again, place=3), (A, B), ()),
    "forward itself": (_forward_itself, (A, B), ()),
    "functional call": (_functional, (A, B), ()),
    "whole model, reentrant": (partial(_whole_model_in_a_checkpoint, reentrant=True), (A, B), ()),
    "whole model, not reentrant": (partial(_whole_model_in_a_checkpoint, reentrant=False), (A, B), ()),
    "swapped inputs": (_swapped_inputs, (A,), ()),
    "Transformer Engine's, not reentrant": (partial(_by_hooks_of, _checkpoint_hook), (A, B), ()),
    "native after a checkpoint without ctx": (_native_after_a_checkpoint_without_ctx, (A,), (B,)),
    "a native checkpoint without ctx": (partial(_checkpoint_without_ctx, in_block=False), (), (A,)),
}
"""Name -> (what is done, the micro-batches whose gradients it has with replay, and natively)."""


LOUD: Mapping[str, tuple[Attempt, str]] = {
    "probe of a layer": (_layer_probed, "layer 1: its router was called twice in the forward pass of micro-batch 0"),
    "layers in turn": (
        partial(_layer_by_layer, order=(A, B) * 4),
        r"layer \d: called outside of a forward pass .* 2 micro-batches",
    ),
    "passes on other threads": (_passes_on_other_threads, "1 forward passes ran on other threads"),
    "failed and left out": (_failed_and_left_out, "2 forward passes used the routes of 3 micro-batches"),
    "a checkpoint without ctx": (partial(_checkpoint_without_ctx, in_block=True), "no known checkpoint started it"),
    "a checkpoint by unknown hooks": (partial(_by_hooks_of, _StrangersHook), "no known checkpoint started it"),
    "Transformer Engine's, late": (partial(_by_hooks_of, _checkpoint_hook, in_block=False), "has closed"),
}

RIGHT_NONETHELESS = (
    ("probe of a layer", "none"),
    ("a checkpoint by unknown hooks", "uniform"),  # inside a region that is known
)


@pytest.mark.parametrize("kind", ["none", "uniform", "moe"])
@pytest.mark.parametrize("name", LOUD)
def test_an_attempt_is_refused_with_its_cause(name: str, kind: str, world: World, one_rank: None) -> None:
    attempt, message = LOUD[name]
    try:
        with nullcontext() if (name, kind) in RIGHT_NONETHELESS else pytest.raises(ReplayError, match=message):
            attempt(Lab(world, kind))
    finally:
        world.forget(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RIGHT)
def test_an_attempt_has_the_gradients_of_plain_blocks(name: str, kind: str, world: World, one_rank: None) -> None:
    attempt, replayed, native = RIGHT[name]
    lab = Lab(world, kind)
    try:
        attempt(lab)
        found = lab.gradients()
        assert largest_difference(found, expected(world, replayed, native)) < TOLERANCE
    finally:
        world.forget(kind)


COPIES: Mapping[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "average": lambda model: AveragedModel(model).module,
}


@pytest.fixture
def shared_groups(monkeypatch: pytest.MonkeyPatch, one_rank: None) -> None:
    """Copies of modules share their process groups, which torch does not copy. Megatron's scale of losses is unset."""
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    monkeypatch.setattr(dist.ProcessGroup, "__deepcopy__", lambda group, _: group, raising=False)


class Copied:
    """A model, its replay, and what training passes of it and of its copies give."""

    def __init__(self, aux: str) -> None:
        more = {} if aux == "none" else {"moe_router_load_balancing_type": aux, "moe_aux_loss_coeff": 0.5}
        self.gpt = build_bare(Variant("uniform"), **more)
        self.ids = torch.randint(0, VOCAB, (2, 6), generator=torch.Generator().manual_seed(0))

    def loss(self, gpt: Any) -> torch.Tensor:
        return weigh(gpt(self.ids, torch.zeros_like(self.ids), None), A)

    def gradients(self, gpt: Any, loss: torch.Tensor | None = None) -> dict[str, np.ndarray]:
        gpt.zero_grad()
        (self.loss(gpt) if loss is None else loss).backward()
        return {name: one.grad.numpy().copy() for name, one in gpt.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("aux", ["none", "aux_loss", "seq_aux_loss"])
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_the_model_is_native_and_leaves_the_block_alone(way: str, aux: str, shared_groups: None) -> None:
    make = COPIES[way]
    plain, lab = Copied(aux), Copied(aux)
    native = plain.gradients(plain.gpt)
    replay = RoutingReplay(lab.gpt, min_agreement=0.0)
    with replay.replay([routes_of(A)]):
        expected = lab.gradients(lab.gpt)
    with torch.no_grad():  # or dispatchers keep tensors with a graph, which Python does not copy
        lab.loss(lab.gpt)
    before = make(lab.gpt)
    with replay.replay([routes_of(A)]) as seen:
        inside = make(lab.gpt)
        assert largest_difference(lab.gradients(before), native) < TOLERANCE
        loss = lab.loss(lab.gpt)
        assert largest_difference(lab.gradients(inside), native) < TOLERANCE
        assert largest_difference(lab.gradients(lab.gpt, loss), expected) < TOLERANCE
    assert seen.native_rows > 0
    assert all(layer.mlp.router.router_replay is None for one in (before, inside) for layer in one.decoder.layers)
    of_copy = RoutingReplay(inside, min_agreement=0.0)
    with of_copy.replay([routes_of(A)]), replay.record() as recording:
        assert largest_difference(lab.gradients(inside), expected) < TOLERANCE
        assert largest_difference(lab.gradients(lab.gpt), native) < TOLERANCE
    assert len(recording.routes) == 1
    with pytest.raises(ReplayError, match="a RoutingReplay is not copied"):
        copy.deepcopy(replay)
