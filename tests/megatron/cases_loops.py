"""Loops that people write around a model: orders of backward passes, mixed passes, frozen parts, kinds of checkpoints.

At each point the gradients of a loop with recomputation must be those of the same loop without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from matrix_world import MatrixModel, Variant, build, gradients, settings_of
from megatron.core.distributed import finalize_model_grads
from tiny_world import join, local_routes, micro_batches, pack_own, rollouts
from torch.utils.checkpoint import checkpoint

from megarl.megatron.passes.micro_batches import MicroBatch, split_micro_batches
from megarl.replay import MicroRoutes, RoutingReplay
from megarl.replay.megatron_state import RELEASE, unwrap

A, B, C = range(3)
"""Micro-batches."""


class Passes:
    """Forward passes of a model, and the routes that a block around them needs."""

    def __init__(self, model: MatrixModel, micros: Sequence[MicroBatch]) -> None:
        self.micros = micros
        self.chunk = model.chunks[0]
        self.forwarded: list[int] = []

    def loss(self, micro: int) -> torch.Tensor:
        """A scalar with its graph, which every token has a part in."""
        self.forwarded.append(micro)
        given = self.micros[micro]
        logits = self.chunk(
            input_ids=given.input_ids,
            position_ids=torch.zeros_like(given.input_ids),
            attention_mask=None,
            packed_seq_params=given.packing,
        )
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(micro))
        return (logits.float() * weights).sum()

    def score(self, micro: int, training: bool = True) -> None:
        """A pass that nobody asks gradients of."""
        self.chunk.train(training)
        with torch.no_grad():
            self.loss(micro)
        self.chunk.train()


Loop = Callable[[Passes], None]


def each_at_once(passes: Passes) -> None:
    for micro in (A, B, C):
        passes.loss(micro).backward()


def fifo(passes: Passes) -> None:
    for loss in [passes.loss(micro) for micro in (A, B, C)]:
        loss.backward()


def lifo(passes: Passes) -> None:
    for loss in reversed([passes.loss(micro) for micro in (A, B, C)]):
        loss.backward()


def joint(passes: Passes) -> None:
    (passes.loss(A) - 2.0 * passes.loss(B) + passes.loss(C)).backward()


def interleaved(passes: Passes) -> None:
    a, b = passes.loss(A), passes.loss(B)
    a.backward()
    c = passes.loss(C)
    b.backward()
    c.backward()


def no_grad_first(passes: Passes) -> None:
    passes.score(A)
    passes.score(C)
    (passes.loss(B) + passes.loss(A)).backward()


def no_grad_between(passes: Passes) -> None:
    a = passes.loss(A)
    passes.score(B)
    (a + passes.loss(C)).backward()


def eval_first(passes: Passes) -> None:
    passes.score(C, training=False)
    (passes.loss(A) + passes.loss(B)).backward()


def eval_with_gradients(passes: Passes) -> None:
    passes.chunk.eval()
    a = passes.loss(A)
    passes.chunk.train()
    (passes.loss(B) + a).backward()


def dropped(passes: Passes) -> None:
    passes.loss(C)
    (passes.loss(A) + passes.loss(B)).backward()


def twice(passes: Passes) -> None:
    a, b = passes.loss(A), passes.loss(B)
    (a + b).backward(retain_graph=True)
    b.backward()
    a.backward()


def same_micro_batch_twice(passes: Passes) -> None:
    (passes.loss(A) * passes.loss(A) * 1e-3 + passes.loss(B)).backward()


def partial_gradients(passes: Passes) -> None:
    a, b = passes.loss(A), passes.loss(B)
    weight = unwrap(passes.chunk).decoder.layers[0].mlp.router.weight
    torch.autograd.grad(b, [weight], retain_graph=True)
    (a + b).backward()


ORDERS: Mapping[str, Loop] = {
    loop.__name__: loop
    for loop in (
        *(each_at_once, fifo, lifo, joint, interleaved),
        *(no_grad_first, no_grad_between, eval_first, eval_with_gradients, dropped),
        *(twice, same_micro_batch_twice, partial_gradients),
    )
}


def _wrap(part: Callable[[Any], Any], reentrant: bool, chunk: torch.nn.Module) -> None:
    """Checkpoint a part of every layer by torch's own means."""
    for layer in unwrap(chunk).decoder.layers:
        module = part(layer)
        forward = module.forward
        module.forward = partial(_checkpointed, forward, reentrant)


def _checkpointed(forward: Callable[..., Any], reentrant: bool, *given: Any, **named: Any) -> Any:
    if not given:  # a reentrant checkpoint sees the gradients of what it is given by position
        given = (named.pop("hidden_states"),)
    return checkpoint(partial(forward, **named), *given, use_reentrant=reentrant)


def _layer(layer: Any) -> Any:
    return layer


def _moe(layer: Any) -> Any:
    return layer.mlp


CHECKPOINTS: Mapping[str, tuple[str, Callable[[torch.nn.Module], None] | None]] = {
    "uniform": ("uniform", None),
    "block": ("block", None),
    "moe": ("moe", None),
    "layers not reentrant": ("none", partial(_wrap, _layer, False)),
    "experts not reentrant": ("none", partial(_wrap, _moe, False)),
    "experts reentrant": ("none", partial(_wrap, _moe, True)),
    "moe in layers not reentrant": ("moe", partial(_wrap, _layer, False)),
    "uniform, experts reentrant": ("uniform", partial(_wrap, _moe, True)),
}
"""Megarl's name of Megatron's recomputation, and what is wrapped besides."""

NESTED: Mapping[str, tuple[str, Callable[[torch.nn.Module], None] | None]] = {
    "moe in layers reentrant": ("moe", partial(_wrap, _layer, True)),
}
"""For passes in evaluation mode alone; not in ``all_points``."""

FROZEN: Mapping[str, Callable[[str], bool]] = {
    "nothing": lambda name: False,
    "first layers": lambda name: "embedding" in name or "layers.0." in name or "layers.1." in name,
    "all but the last layer": lambda name: "layers.3." not in name,
    "routers": lambda name: "router" in name,
    "experts": lambda name: "experts" in name,
}
"""Parts of the model without gradients."""

CHECKPOINTS_IN_EVALUATION = tuple(map(int, RELEASE.split(".")[:2])) < (0, 17)
"""Whether Megatron's MoE layers are checkpointed in evaluation mode too. Where they are not, a layer that is recomputed
in another mode than that of its forward pass saves other tensors, which torch's checkpoints may refuse."""

NOTHING_IN_FRONT = ("first layers", "all but the last layer")
"""Where the input of the first layers needs no gradient, reentrant checkpoints of whole layers carry none further on,
with megarl or without."""

MODES = ("replay", "record", "outside")


class World:
    """Models with the same weights on a layout, one per kind of checkpoint, and three micro-batches."""

    def __init__(self, layout: Mapping[str, Any]) -> None:
        self._layout = dict(layout)
        self._models: dict[str, tuple[MatrixModel, RoutingReplay]] = {}
        self._expected: dict[tuple[str, str, str], dict[str, np.ndarray]] = {}
        self._orders: dict[str, list[int]] = {}
        """The micro-batches of a loop's forward passes, by its name."""
        settings = settings_of(self._layout, Variant())
        join(settings)
        batch = pack_own(rollouts(30, 4, 8, 2))
        micros = micro_batches(settings, batch)
        self.micros = (micros if len(micros) > 2 else split_micro_batches(batch, int(batch.cu_seqlens.diff().max())))[
            :3
        ]

    def model(self, kind: str) -> tuple[MatrixModel, RoutingReplay]:
        if kind not in self._models:
            recompute, wrap = {**CHECKPOINTS, **NESTED}.get(kind, ("none", None))
            variant = Variant(recompute)
            model = build(settings_of(self._layout, variant), variant)
            if wrap is not None:
                wrap(model.chunks[0])
            self._models[kind] = model, RoutingReplay(model.chunks, min_agreement=0.0)  # the routes are random
        return self._models[kind]

    def forget(self, kind: str) -> None:
        """Build this kind's model anew when it is next asked for."""
        self._models.pop(kind, None)

    def error(self, order: str, kind: str, mode: str, frozen: str) -> float:
        """The largest relative difference of a parameter's gradient from that without recomputation."""
        key = order, mode, frozen
        if key not in self._expected:
            self._expected[key] = self.gradients(ORDERS[order], "none", mode, frozen)
        found = self.gradients(ORDERS[order], kind, mode, frozen)
        return largest_difference(found, self._expected[key])

    def gradients(self, loop: Loop, kind: str, mode: str, frozen: str = "nothing") -> dict[str, np.ndarray]:
        model, replay = self.model(kind)
        if loop.__name__ not in self._orders:
            rehearsal = Passes(self.model("none")[0], self.micros)
            loop(rehearsal)
            self._orders[loop.__name__] = rehearsal.forwarded
        with _frozen(model, frozen):
            for chunk in model.chunks:
                chunk.zero_grad_buffer()
                chunk.train()
            passes = Passes(model, self.micros)
            with self._block(loop, model, replay, mode):
                loop(passes)
            finalize_model_grads(model.chunks)
            return gradients(model.chunks)

    def _block(self, loop: Loop, model: MatrixModel, replay: RoutingReplay, mode: str) -> Any:
        if mode == "replay":
            return replay.replay([self.routes(model, replay)[micro] for micro in self._orders[loop.__name__]])
        return replay.record() if mode == "record" else nullcontext()

    def routes(self, model: MatrixModel, replay: RoutingReplay) -> list[MicroRoutes]:
        return [local_routes(micro, replay.layers, model.shape) for micro in self.micros]


@contextmanager
def _frozen(model: MatrixModel, which: str) -> Iterator[None]:
    frozen = [p for name, p in model.chunks[0].named_parameters() if FROZEN[which](name)]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def largest_difference(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """Over all parameters ||a - b|| / ||b||, with ||a - b|| where b is 0."""
    assert found.keys() == expected.keys()
    assert sum(float(np.abs(one).max()) > 0 for one in expected.values()) > 3
    differences = {key: float(np.linalg.norm(found[key] - one)) for key, one in expected.items()}
    return max(value / (float(np.linalg.norm(expected[key])) or 1.0) for key, value in differences.items())


def loops(layout: dict[str, Any], points: Sequence[tuple[str, str, str, str]]) -> dict[str, float]:
    """(order, kind, mode, frozen) joined by | -> error; for several ranks."""
    world, found = World(layout), {}
    for point in points:
        found["|".join(point)] = world.error(*point)
    return found


def all_points() -> list[tuple[str, str, str, str]]:
    """Every order with every kind of checkpoint and mode; every frozen part with every kind, in two orders."""
    orders = [
        (order, kind, mode, "nothing")
        for order in ORDERS
        for kind in CHECKPOINTS
        for mode in MODES
        if order != "partial_gradients"
        or kind in ("layers not reentrant", "experts not reentrant")  # torch's own limit
        if CHECKPOINTS_IN_EVALUATION or (order, kind) != ("eval_with_gradients", "moe in layers not reentrant")
    ]
    frozen = [
        (order, kind, mode, part)
        for order in ("joint", "lifo")
        for kind in CHECKPOINTS
        for mode in MODES
        for part in FROZEN
        if part != "nothing" and not (kind.startswith("uniform") and part in NOTHING_IN_FRONT)
    ]
    return orders + frozen
