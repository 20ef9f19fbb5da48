"""Odd things that callers do around replay: each is right, or ends in a ReplayError that names the cause.

The expected gradients are those of one block per micro-batch, or of no block, without recomputation.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases_loops import A, B, C, World, largest_difference
from matrix_world import NUM_EXPERTS, NUM_LAYERS, VOCAB, Variant, build_bare, gradients
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
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
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def _overwritten(lab: Lab, at: str) -> None:
    kept = [MicroRoutes(one.experts.to(torch.int32), one.present.clone()) for one in lab.routes]

    def overwrite() -> None:
        for one in kept:
            one.experts.numpy()[:] = 7
            one.present.numpy()[:] = False

    with lab.replay.replay(kept):
        if at == "before the passes":
            overwrite()
        losses = [lab.loss(micro) for micro in (A, B, C)]
        if at == "before the recomputation":
            overwrite()
        sum(losses).backward()


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
    with register(probe), lab.block(A, B):
        a = lab.loss(A)
        (lab.loss(B) + a).backward()
    assert calls[0] >= 2


def _layer_probed(lab: Lab) -> None:
    """A hook of the third layer calls the second one."""

    def probe(_: Any, args: Any, kwargs: Any, output: Any) -> None:
        with torch.no_grad():
            lab.layers[1].mlp(kwargs.get("hidden_states", output[0]))

    with lab.layers[2].register_forward_hook(probe, with_kwargs=True), lab.block(A, B):
        (lab.loss(A) + lab.loss(B)).backward()


def _layer_by_layer(lab: Lab, order: Sequence[int]) -> None:
    with lab.block(A, B):
        hidden = {micro: lab.hidden(micro) for micro in (A, B)}
        at = {A: 0, B: 0}
        for micro in order:
            hidden[micro] = lab.run_layer(at[micro], hidden[micro])
            at[micro] += 1
        sum(lab.end(hidden[micro], micro) for micro in (A, B)).backward()


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


def _recorded_on_other_threads(lab: Lab) -> None:
    with lab.replay.record():
        in_a_thread(lambda: lab.loss(A))


def _fail(lab: Lab, micro: int, place: int, error: type[BaseException] = RuntimeError) -> None:
    def fail(*_: Any) -> None:
        raise error

    with lab.layers[place].register_forward_hook(fail), pytest.raises(error):
        lab.loss(micro)


def _failed_and_tried_again(lab: Lab, place: int = 3) -> None:
    with lab.block(A, B):
        _fail(lab, A, place)
        a = lab.loss(A)
        _fail(lab, B, place)
        (a + lab.loss(B)).backward()


def _forward_itself(lab: Lab) -> None:
    """Not by calling the module, so that its hooks do not run."""
    with lab.block(A, B):
        losses = [weigh(lab.gpt.forward(ids, torch.zeros_like(ids), None), m) for m in (A, B) for ids in [lab.ids(m)]]
        sum(losses).backward()


def _whole_model_in_a_checkpoint(lab: Lab, reentrant: bool) -> None:
    scale = torch.ones((), requires_grad=True)

    def run(micro: int, by: torch.Tensor) -> torch.Tensor:
        return by * lab.loss(micro)

    with lab.block(A, B):
        a = checkpoint(run, A, scale, use_reentrant=reentrant)
        (checkpoint(run, B, scale, use_reentrant=reentrant) + a).backward()


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
        f"overwritten {at}": (partial(_overwritten, at=at), (A, B, C), ())
        for at in ("before the passes", "before the recomputation")
    },
    **{
        f"probe {when} at layer {place}, {'graph' if graph else 'no graph'}{', before it' if pre else ''}": (
            partial(_probed, place=place, graph=graph, when=when, pre=pre),
            (A, B),
            (),
        )
        for when, place, graph, pre in (
            *(("always", 0, True, False), ("always", 3, False, False), ("always", 2, True, True)),
            *((when, 2, True, pre) for when, pre in (("first", False), ("again", True))),
        )
    },
    "layers one after the other": (partial(_layer_by_layer, order=(A,) * 4 + (B,) * 4), (A, B), ()),
    "two blocks at once": (_two_blocks_at_once, (A, B), ()),
    "failed and tried again": (_failed_and_tried_again, (A, B), ()),
    "forward itself": (_forward_itself, (A, B), ()),
    "whole model, reentrant": (partial(_whole_model_in_a_checkpoint, reentrant=True), (A, B), ()),
    "whole model, not reentrant": (partial(_whole_model_in_a_checkpoint, reentrant=False), (A, B), ()),
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
    "passes on other threads": (_passes_on_other_threads, "1 forward passes .* of 2 .* passes ran on another thread"),
    "a recording of other threads": (_recorded_on_other_threads, "nothing was recorded"),
    "a checkpoint by unknown hooks": (partial(_by_hooks_of, _StrangersHook), "no known checkpoint started it"),
    "Transformer Engine's, late": (partial(_by_hooks_of, _checkpoint_hook, in_block=False), "has closed"),
}

RIGHT_NONETHELESS = (
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


@pytest.fixture
def shared_groups(monkeypatch: pytest.MonkeyPatch, one_rank: None) -> None:
    """Copies of modules share their process groups, which torch does not copy. Megatron's scale of losses is unset."""
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    monkeypatch.setattr(dist.ProcessGroup, "__deepcopy__", lambda group, _: group, raising=False)


@pytest.mark.parametrize("aux", ["none", "aux_loss", "seq_aux_loss"])
def test_a_copy_of_the_model_is_native_and_leaves_the_block_alone(aux: str, shared_groups: None) -> None:
    more = {} if aux == "none" else {"moe_router_load_balancing_type": aux, "moe_aux_loss_coeff": 0.5}
    plain, model = (build_bare(Variant("uniform"), **more) for _ in range(2))
    ids = torch.randint(0, VOCAB, (2, 6), generator=torch.Generator().manual_seed(0))

    def loss_of(gpt: Any) -> torch.Tensor:
        return weigh(gpt(ids, torch.zeros_like(ids), None), A)

    def gradients_of(gpt: Any, loss: torch.Tensor | None = None) -> dict[str, np.ndarray]:
        gpt.zero_grad()
        (loss_of(gpt) if loss is None else loss).backward()
        return {name: one.grad.numpy().copy() for name, one in gpt.named_parameters() if one.grad is not None}

    native = gradients_of(plain)
    replay = RoutingReplay(model, min_agreement=0.0)
    with replay.replay([routes_of(A)]):
        expected = gradients_of(model)
    with torch.no_grad():  # or dispatchers keep tensors with a graph, which Python does not copy
        loss_of(model)
    before = copy.deepcopy(model)
    with replay.replay([routes_of(A)]) as seen:
        inside = copy.deepcopy(model)
        assert largest_difference(gradients_of(before), native) < TOLERANCE
        loss = loss_of(model)
        assert largest_difference(gradients_of(inside), native) < TOLERANCE
        assert largest_difference(gradients_of(model, loss), expected) < TOLERANCE
    assert seen.native_rows > 0
    assert all(layer.mlp.router.router_replay is None for one in (before, inside) for layer in one.decoder.layers)
    of_copy = RoutingReplay(inside, min_agreement=0.0)
    with of_copy.replay([routes_of(A)]), replay.record() as recording:
        assert largest_difference(gradients_of(inside), expected) < TOLERANCE
        assert largest_difference(gradients_of(model), native) < TOLERANCE
    assert len(recording.routes) == 1
    with pytest.raises(ReplayError, match="a RoutingReplay is not copied"):
        copy.deepcopy(replay)
