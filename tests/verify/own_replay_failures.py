"""Silent failures of Megatron's own ``RouterReplay`` (``moe_enable_routing_replay``), on a real tiny model.

Each function trains ``World`` as a stack did that had the bug: its passes, in its order, with the class's own methods.
``FAILURES`` says what goes wrong, and which patch of patches/upstream mends it. Queues in a class, as slime has them,
and gates gathered after the scatter are in ``fifo_replay``: Megatron's own class has neither.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest import mock

import torch
from matrix_world import NUM_EXPERTS, VOCAB, Variant, build_bare
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch.distributed import ProcessGroup

FORWARD, BACKWARD = RouterReplayAction.REPLAY_FORWARD, RouterReplayAction.REPLAY_BACKWARD
B, S, L, K, MICROS = 2, 6, 4, 2, 3
RECOMPUTED, NOT_RECOMPUTED = Variant("uniform"), Variant()
GATHERED = Variant("uniform", "allgather")
"""From 0.17 on, the all-to-all dispatcher counts tokens, and raises an error of torch where there are not T K."""


class World:
    """A model with Megatron's own replay, as a rule with every layer recomputed; micro-batches and random routes."""

    micro: ClassVar[int] = -1
    """Of the running or last forward pass."""

    def __init__(
        self, prediction_layers: int = 0, models_before: int = 0, variant: Variant = RECOMPUTED, **fields: Any
    ) -> None:
        RouterReplay.clear_global_router_replay_instances()
        for _ in range(1 + models_before):  # the last one stays
            self.model = build_bare(variant, prediction_layers, moe_enable_routing_replay=True, **fields).train()
            gc.collect()
        self.layers = list(self.model.decoder.layers)
        if prediction_layers:
            self.layers += [
                getattr(layer, "mtp_model_layer", None) or layer.transformer_layer for layer in self.model.mtp.layers
            ]  # under another name up to 0.16
        source = torch.Generator().manual_seed(0)
        self.tokens = [torch.randint(0, VOCAB, (B, S), generator=source) for _ in range(MICROS)]
        self.routes = [torch.rand(S * B, L, NUM_EXPERTS, generator=source).topk(K, 2).indices for _ in range(MICROS)]

    def forward(self, micro: int) -> torch.Tensor:
        """The summed loss of a micro-batch."""
        World.micro, tokens = micro, self.tokens[micro]
        return self.model(tokens, torch.arange(S).expand(B, S), None, labels=tokens).sum()

    def set_routes(self, micro: int) -> None:
        RouterReplay.set_replay_data([*self.routes[micro].unbind(1)])

    def replay(self, micro: int) -> torch.Tensor:
        """A forward pass as Megatron's guide has it."""
        self.set_routes(micro)
        RouterReplay.set_global_router_replay_action(FORWARD)
        return self.forward(micro)


def as_documented(world: World) -> None:
    """Forward pass and backward pass in turn: right."""
    for micro in range(MICROS):
        loss = world.replay(micro)
        RouterReplay.set_global_router_replay_action(BACKWARD)
        loss.backward()


def joint_backward(world: World) -> None:
    """Autograd recomputes the last pass first; the queue gives the first routes first."""
    losses = [world.replay(micro) for micro in range(MICROS)]
    RouterReplay.set_global_router_replay_action(BACKWARD)
    torch.stack(losses).sum().backward()


def last_in_first_out(world: World) -> None:
    losses = [world.replay(micro) for micro in range(MICROS)]
    RouterReplay.set_global_router_replay_action(BACKWARD)
    for loss in reversed(losses):
        loss.backward()


def scored_before(world: World) -> None:
    """A pass for log-probabilities puts its routes into the queue too, and has no backward pass that takes them out."""
    with torch.no_grad():
        for micro in reversed(range(MICROS)):
            world.replay(micro)
    as_documented(world)


def cleared_early(world: World) -> None:
    """The step is over for the caller after the forward passes; pipeline stages still have to recompute."""
    losses = [world.replay(micro) for micro in range(MICROS)]
    RouterReplay.clear_global_indices()
    RouterReplay.clear_global_router_replay_action()
    torch.stack(losses).sum().backward()


def forward_action_kept(world: World) -> None:
    """REPLAY_FORWARD stays set: every recomputation uses the routes of the last forward pass."""
    losses = [world.replay(micro) for micro in range(MICROS)]
    torch.stack(losses).sum().backward()


def reference_in_between(world: World) -> None:
    """A reference pass through the same routers (weights swapped in) takes an entry of the policy's queue.

    Not silent to the end: the last recomputation finds an empty queue.
    """
    losses = [world.replay(micro) for micro in range(MICROS)]
    RouterReplay.set_global_router_replay_action(BACKWARD)
    with torch.no_grad():
        world.forward(0)
    with contextlib.suppress(IndexError):
        for loss in losses:
            loss.backward()


def native_recomputed_in_replay(world: World) -> None:
    """A native pass, whose backward pass comes when replay of another one is on."""
    loss = world.forward(0)
    world.set_routes(1)
    RouterReplay.set_global_router_replay_action(FORWARD)
    loss.backward()


def left_on_record(world: World) -> None:
    """Routes are set, but the action still is RECORD."""
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    for micro in range(MICROS):
        world.set_routes(micro)
        world.forward(micro).backward()


def some_instances(world: World) -> None:
    """Only the first pipeline or virtual stage was given routes and an action."""
    for micro in range(MICROS):
        for layer, replay in enumerate(RouterReplay.global_router_replay_instances[: L // 2]):
            replay.set_target_indices(world.routes[micro][:, layer])
            replay.set_router_replay_action(FORWARD)
        world.forward(micro).backward()


def addressed_by_position(world: World) -> None:
    """Routes go to the first L instances of the global list; a model that is gone was there before."""
    for micro in range(MICROS):
        pairs = zip(RouterReplay.global_router_replay_instances, world.routes[micro].unbind(1), strict=False)
        for replay, experts in pairs:
            replay.set_target_indices(experts)
            replay.set_router_replay_action(FORWARD)
        world.forward(micro).backward()


def addressed_by_layer_number(world: World) -> None:
    """Prediction layers count from 1 as the decoder's layers do, and get routes of those."""
    numbers = [
        (module, replay_number(module)) for module in world.model.modules() if getattr(module, "router_replay", None)
    ]
    for micro in range(MICROS):
        for router, number in numbers:
            if number <= L:
                router.router_replay.set_target_indices(world.routes[micro][:, number - 1])
                router.router_replay.set_router_replay_action(FORWARD)
        world.forward(micro).backward()


def replay_number(router: Any) -> int:
    """From 0.19 on the replay object has a number too."""
    return getattr(router.router_replay, "layer_number", None) or router.layer_number


def short_routes(world: World) -> None:
    """Two rows are missing at the end, such as the rows of padding: those tokens go to no expert at all."""
    for micro in range(MICROS):
        RouterReplay.set_replay_data([rows[:-2] for rows in world.routes[micro].unbind(1)])
        RouterReplay.set_global_router_replay_action(FORWARD)
        world.forward(micro).backward()


def repeated_expert(world: World) -> None:
    """A row names an expert twice: its token goes to fewer experts."""
    for micro in range(MICROS):
        RouterReplay.set_replay_data([rows[:, :1].expand(-1, K) for rows in world.routes[micro].unbind(1)])
        RouterReplay.set_global_router_replay_action(FORWARD)
        world.forward(micro).backward()


def copied_reference(world: World) -> None:
    """A reference model is copied while replay is on. No global method reaches the copy: it replays for ever."""
    world.replay(0)
    share = mock.patch.object(ProcessGroup, "__deepcopy__", lambda group, _: group, create=True)
    with share:  # process groups cannot be copied
        reference = copy.deepcopy(world.model)
    RouterReplay.clear_global_indices()
    RouterReplay.clear_global_router_replay_action()
    world.model, world.layers = reference, list(reference.decoder.layers)
    world.forward(1)


def bypassed(world: World) -> None:
    """Sinkhorn balancing chooses experts without asking RouterReplay; as fused routers and quantile balancing do."""
    for micro in range(MICROS):
        world.replay(micro).backward()


@dataclass(frozen=True)
class Failure:
    """One silent failure."""

    run: Callable[[World], None]
    wrong: str
    """Passes with experts other than the right ones: "forward", "recomputed" or both; "" for none."""
    patch: str = ""
    """Of patches/upstream: with it, ``run`` sends every token to the right expert, or raises an error."""
    reports: str = ""
    world: Mapping[str, Any] = field(default_factory=dict)
    native: tuple[int, ...] = ()
    """Layers, counted over decoder and prediction layers, that are right when they route natively; all if -1."""
    since: tuple[int, int] = (0, 16)
    """The first release in which it goes wrong."""


EVERY = (-1,)
QUEUE = "Megatron-LM 2101, AReaL 1166"
FAILURES: dict[str, Failure] = {
    "as documented": Failure(as_documented, ""),
    "joint backward": Failure(joint_backward, "recomputed", "0001-recompute", QUEUE),
    "last in, first out": Failure(last_in_first_out, "recomputed", "0001-recompute", QUEUE),
    "scored before": Failure(scored_before, "recomputed", "0001-recompute", QUEUE),
    "cleared early": Failure(cleared_early, "recomputed", "0001-recompute", QUEUE),
    "forward action kept": Failure(forward_action_kept, "recomputed", "0001-recompute", QUEUE),
    "reference in between": Failure(reference_in_between, "recomputed", "0001-recompute", QUEUE),
    "native recomputed in replay": Failure(
        native_recomputed_in_replay, "recomputed", "0001-recompute", QUEUE, native=EVERY
    ),
    "left on record": Failure(left_on_record, "forward recomputed", "", "NeMo-RL 3327"),
    "some instances": Failure(some_instances, "forward recomputed", "", "verl 7106"),
    "by position": Failure(
        addressed_by_position, "forward recomputed", "0007-gone-models", "verl 7340, miles 2570", {"models_before": 1}
    ),
    "by layer number": Failure(
        addressed_by_layer_number, "forward", "0005-mtp-layer-number", "NeMo-RL 3903, Megatron-LM 7404",
        {"prediction_layers": 1, "variant": NOT_RECOMPUTED}, (L,), (0, 17),
    ),
    "short routes": Failure(short_routes, "forward recomputed", "0002-shape", "miles 465", {"variant": GATHERED}),
    "repeated expert": Failure(repeated_expert, "forward recomputed", "", "verl 4986", {"variant": GATHERED}),
    "copied reference": Failure(copied_reference, "forward", "0006-copies", native=EVERY),
    "bypassed": Failure(
        bypassed, "forward recomputed", "0004-bypass", "Megatron-LM 2101",
        {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0},
    ),
}  # fmt: skip
