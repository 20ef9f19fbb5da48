"""Silent failures of routing replay, in miniature on real Megatron: each is a stack that trains with wrong experts.

``FAILURES`` is the table: a damage of the routes that a stack puts into its queues, another order of passes, or a
mistake of the stack itself. ``play`` plays one with ``FifoReplay`` under the watch.

    python tests/verify/corpus.py    # prints the table of docs/verify.md, with what the watch says
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from fifo_replay import FifoReplay, install
from matrix_world import VOCAB, Variant, build_bare

from megarl.replay import MicroRoutes
from megarl.verify import RoutingReport, RoutingWatch

B, S, MICROS = 4, 16, 3
T = B * S
Routes = list[torch.Tensor]
"""One [T, L, K] for each micro-batch."""


class World:
    """A tiny MoE, three micro-batches, and the routes that an engine with slightly other weights chose for them."""

    def __init__(self, experts: int = 8, prediction_layers: int = 0) -> None:
        variant = Variant(recompute="uniform")
        self.model = build_bare(variant, prediction_layers, num_moe_experts=experts)
        source = torch.Generator().manual_seed(0)
        self.batches = [torch.randint(0, VOCAB, (B, S), generator=source) for _ in range(MICROS)]
        weights = list(self.model.parameters())
        kept = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            for weight in weights:
                weight.mul_(1 + 0.02 * torch.randn(weight.shape, generator=source))
            FifoReplay.clear()
            self.routes = self._chosen()
            for weight, old in zip(weights, kept, strict=True):
                weight.copy_(old)

    def _chosen(self) -> Routes:
        """What the routers choose by themselves."""
        seen: Routes = []
        for batch in self.batches:
            by_layer: list[torch.Tensor] = []
            handles = [
                layer.mlp.router.register_forward_hook(lambda _, __, out, kept=by_layer: kept.append(_numbers(out[1])))
                for layer in self.model.decoder.layers
            ]
            self.forward(batch)
            for handle in handles:
                handle.remove()
            seen.append(torch.stack(by_layer, 1))
        return seen

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(
            input_ids=batch, position_ids=torch.arange(S).expand(B, S), attention_mask=None, labels=batch
        ).sum()


def _numbers(routing_map: torch.Tensor) -> torch.Tensor:
    return routing_map.nonzero()[:, 1].view(len(routing_map), -1)


def train(world: World, index: int, forward: str = "forward", backward: str = "backward") -> None:
    """Forward and backward pass of one micro-batch, with these stages."""
    FifoReplay.stage = forward
    loss = world.forward(world.batches[index])
    FifoReplay.stage = backward
    loss.backward()


def each_in_turn(world: World, forward: str = "forward", backward: str = "backward") -> None:
    for index in range(MICROS):
        train(world, index, forward, backward)


natively = partial(each_in_turn, forward="native", backward="native")
cleared_too_early = partial(each_in_turn, backward="native")


def joint_backward(world: World) -> None:
    """All forward passes, then one backward pass through them all: autograd goes backwards, the queue does not."""
    FifoReplay.stage = "forward"
    losses = [world.forward(batch) for batch in world.batches]
    FifoReplay.stage = "backward"
    torch.stack(losses).sum().backward()


def switched_off_at_the_end(world: World) -> None:
    """An exception handler, or a retry, has reset the stage before the last micro-batch."""
    for index in range(MICROS - 1):
        train(world, index)
    train(world, MICROS - 1, "native", "native")


def warmed_up(world: World) -> None:
    """A pass outside of the training step, such as a warm-up, has taken the first entries."""
    for replay in FifoReplay.registered:
        replay.taken["forward"] = 1
    each_in_turn(world)


def evaluated_between(world: World) -> None:
    """A pass over another batch runs inside the stage."""
    train(world, 0)
    FifoReplay.stage = "forward"
    with torch.no_grad():
        world.forward(world.batches[0].flip(1))
    train(world, 1)
    train(world, 2)


def dropped_micro_batch(world: World) -> None:
    train(world, 0)
    train(world, 1)


def skipped_layer(world: World) -> None:
    """A layer of the last pass does not reach its dispatcher."""
    train(world, 0)
    train(world, 1)
    layer = world.model.decoder.layers[2]
    kept, layer.forward = layer.forward, lambda hidden_states, **_: (hidden_states, None)
    train(world, 2)
    layer.forward = kept


@dataclass(frozen=True)
class Failure:
    """One silent failure, and what the watch must call it."""

    name: str
    reports: str
    """Public reports of the kind."""
    kind: str
    """Of ``Cause``; or "passes" (missing or too many), "gates" (weights of exactly 0)."""
    routes: Callable[[Routes], Routes] = list
    """What the stack puts into its queues in place of the engine's routes."""
    passes: Callable[[World], None] = each_in_turn
    queues: Callable[[list[Routes]], list[Routes]] = list
    """The queues by layer, from the right ones."""
    experts: int = 8
    prediction_layers: int = 0
    gates_after_scatter: bool = False
    where: str = "micro-batch"
    """Beginning of the text of the cause: micro-batch or recomputation."""


def rows(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Routes], Routes]:
    """The same damage in every micro-batch."""
    return lambda routes: [change(one) for one in routes]


def put(where: slice, what: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Routes], Routes]:
    """Rows ``where`` are replaced."""

    def damage(one: torch.Tensor) -> torch.Tensor:
        damaged = one.clone()
        damaged[where] = what(one)
        return damaged

    return rows(damage)


def by_sequence(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Routes], Routes]:
    """``change`` gets [B, S, L, K]; rows are [s, b]."""
    return rows(lambda one: change(one.unflatten(0, (S, B)).transpose(0, 1)).transpose(0, 1).flatten(0, 1))


def stolen(routes: Routes) -> Routes:
    """Rows 20 to 39 of each micro-batch are rows 4 to 23 of the next one."""
    return [torch.cat([a[:20], b[4:24], a[40:]]) for a, b in zip(routes, routes[1:] + routes[:1], strict=True)]


def left_padded(one: torch.Tensor) -> torch.Tensor:
    """Sequences are padded on the left for routes, and on the right for tokens, by one place."""
    return torch.cat([one[:, -1:], one[:, :-1]], 1)


def later_turn_first(one: torch.Tensor) -> torch.Tensor:
    """The rows of the second turn, 6 tokens, stand at the beginning of the conversation too."""
    return torch.cat([one[:, -6:], one[:, 6:]], 1)


def zeros(one: torch.Tensor) -> torch.Tensor:
    return torch.arange(one.size(-1))


def random_rows(one: torch.Tensor) -> torch.Tensor:
    return torch.rand(*one.shape[:2], 8, generator=torch.Generator().manual_seed(0)).argsort(2)[..., : one.size(2)]


def without_layer_2(queues: list[Routes]) -> list[Routes]:
    return [*queues[:2], [], queues[3]]


FAILURES = (
    Failure("nothing was captured: zeros", "vllm 33013", "zeros", rows(lambda one: zeros(one).expand_as(one))),
    Failure("prompt rows are zeros (cached or hybrid)", "tpu-inference 3583", "zeros", put(slice(0, 24), zeros)),
    Failure("last token has no row: zeros", "prime-rl 1807, twinkle 240", "zeros", put(slice(-B, None), zeros)),
    Failure("prefill and decode apart: zeros", "sglang 39146", "zeros", put(slice(0, 40), zeros)),
    Failure("one stale row after a chunk boundary", "sglang 36404", "constant", put(slice(24, 44), lambda one: one[3])),
    Failure("one buffer for all tokens", "vllm 39568", "constant", rows(lambda one: one[:1].expand_as(one))),
    Failure("chunks written at row 0", "TensorRT-LLM 18397", "shifted", put(slice(0, 32), lambda one: one[32:])),
    Failure("slot's earlier owner", "vllm 39568", "run", stolen),
    Failure("rows of another turn", "strands-sglang 72", "shifted", by_sequence(later_turn_first)),
    Failure("routes of the next token", "vllm 37094", "shifted", by_sequence(lambda one: one.roll(-1, 1))),
    Failure("left against right padding", "tunix 2046, SkyRL 1908", "shifted", by_sequence(left_padded)),
    Failure(
        "[b, s] flattened as [s, b]", "SkyRL 2091", "transposed",
        rows(lambda one: one.unflatten(0, (S, B)).transpose(0, 1).flatten(0, 1)),
    ),
    Failure("physical expert ids", "vllm 33013, vllm-ascend 13882", "renumbered", rows(lambda one: (one * 3 + 1) % 8)),
    Failure("ids local to an expert-parallel rank", "none known", "renumbered", rows(lambda one: one % 4)),
    Failure("8 bits for 300 experts", "prime-rl 3350", "low_byte", rows(lambda one: one & 255), experts=300),
    Failure("micro-batches in another order", "none known", "micro_batch", lambda routes: routes[::-1]),
    Failure("first routes are never replaced", "SkyRL 1908", "micro_batch", lambda routes: routes[:1] * MICROS),
    Failure("another pass took the first entry", "verl 7106", "micro_batch", passes=warmed_up),
    Failure("dense layers are counted", "verl 5037, verl 5452", "layer", rows(lambda one: one.roll(1, 1))),
    Failure("layers of another pipeline stage", "verl 5452", "layer", rows(lambda one: one[:, [2, 3, 0, 1]])),
    Failure(
        "wrong router of a global list", "verl 7340", "layer", queues=lambda queues: [*queues[1:], queues[0]]
    ),
    Failure("prediction layer borrows routes", "NeMo-RL 3903, miles 619", "draft", prediction_layers=1),
    Failure("a run without routes", "NeMo-RL 3327, slime 1909", "native", passes=natively),
    Failure("one layer is not replayed", "Megatron-LM 6699", "native", queues=without_layer_2),
    Failure("replay ends before the last micro-batch", "miles 3277", "native", passes=switched_off_at_the_end),
    Failure(
        "cleared before the backward pass", "Megatron-LM 2693", "native", passes=cleared_too_early,
        where="recomputation",
    ),
    Failure(
        "joint backward against a queue", "Megatron-LM 2693", "micro_batch", passes=joint_backward,
        where="recomputation",
    ),
    Failure("routes of another model or rank", "sglang 31100", "other", rows(random_rows)),
    Failure("top-k of 1 in place of 2", "none known", "fewer", rows(lambda one: one[..., :1].expand_as(one))),
    Failure("gate weights gathered after the scatter", "ISEEKYAN/Megatron-LM 79", "gates", gates_after_scatter=True),
    Failure("evaluation inside the stage", "verl 7106", "passes", passes=evaluated_between),
    Failure("a micro-batch never ran", "none known", "passes", passes=dropped_micro_batch),
    Failure("a layer never reached its dispatcher", "none known", "passes", passes=skipped_layer),
)  # fmt: skip


def play(failure: Failure) -> tuple[RoutingReport, bool]:
    """What the watch says of a stack that makes this mistake, and whether the stack's queues were all consumed."""
    world = world_of(failure.experts, failure.prediction_layers)
    expected = [MicroRoutes(routes) for routes in world.routes]
    put_in = failure.routes(world.routes)
    queues = failure.queues([[routes[:, layer] for routes in put_in] for layer in range(4)])
    queues += [queues[0]] * failure.prediction_layers
    FifoReplay.clear()
    FifoReplay.after_scatter = failure.gates_after_scatter
    install(world.model)
    FifoReplay.fill(queues)
    try:
        with RoutingWatch([world.model]) as watch:
            failure.passes(world)
        consumed = FifoReplay.all_consumed()
    finally:
        FifoReplay.clear()
    return watch.report(expected), consumed


@cache
def world_of(experts: int, prediction_layers: int) -> World:
    return World(experts, prediction_layers)


def verdict(report: RoutingReport) -> str:
    """The kind of the failure, by the report alone."""
    if report.missing:
        return "passes"
    if report.causes:
        return report.causes[0].kind
    return "gates" if report.num_zero_gates else "right"


RIGHT = Failure("nothing wrong", "", "right")


if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29773", "RANK": "0", "WORLD_SIZE": "1"}
    columns = "| what goes wrong | public reports | the watch says | right rows: forward, recomputed | the queue says |"
    print(columns, "|---|---|---|---|---|", sep="\n")
    for failure in FAILURES:
        report, consumed = play(failure)
        again = f"{report.recomputed_right.sum() / report.recomputed.sum():.0%}"
        print(
            f"| {failure.name} | {failure.reports} | `{verdict(report)}` | {report.right_share:.0%}, {again} |", end=""
        )
        print(f" {'all consumed' if consumed else 'entries left'} |")
