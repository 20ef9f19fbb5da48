"""Layers whose routers take experts from a table of token ids, on real Megatron: a user's own router, left alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from dispatch_probe import DispatchProbe
from matrix_world import MatrixModel, Variant, build, settings_of
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from tiny_world import fixed_coefficients, gather_sequences, join, local_routes, micro_batches, pack_own, rollouts

from megarl.files.hf_config import MoeShape
from megarl.megatron.passes.forward import run
from megarl.replay import RoutingReplay
from megarl.replay.megatron_state import unwrap
from megarl.verify import RoutingWatch

SHAPE = MoeShape(4, (2, 3), 8, 2, exempt_layers=(0, 1))


class TableRouter(TopKRouter):
    """Experts of token id ``i`` in layer ``n``: i + n and i + n + 3, of eight. Gate weights are of the logits.

    A recomputation repeats the logits of its pass bit for bit, and so finds its token ids, unless ``forgets``: then it
    has those of the latest pass, as a router that reads a global variable.
    """

    forgets = False

    def note(self, ids: torch.Tensor) -> None:
        rows = ids.flatten()
        if self.config.sequence_parallel:
            size = parallel_state.get_tensor_model_parallel_world_size()
            rows = rows.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
        self.ids = rows

    def routing(self, logits: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.view(-1, self.config.num_moe_experts)
        passes = vars(self).setdefault("passes", {})
        key = logits.detach().numpy().tobytes()
        if torch._C._current_graph_task_id() == -1:
            passes[key] = self.ids
        ids = self.ids if self.forgets else passes[key]
        experts = (ids[:, None] + self.layer_number - 1 + torch.tensor([0, 3])) % 8
        gates = logits.gather(1, experts).softmax(1)
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
        return torch.zeros_like(logits).scatter(1, experts, gates), routing_map


def with_tables(model: MatrixModel, kind: type[TopKRouter] = TableRouter) -> MatrixModel:
    """The model with this router in the layers 0 and 1."""
    for chunk in map(unwrap, model.chunks):
        for layer in chunk.decoder.layers:
            if layer.layer_number <= 2:
                layer.mlp.router.__class__ = kind
                note = vars(kind).get("note") or TableRouter.note
                chunk.register_forward_pre_hook(
                    lambda _, __, named, note=note, router=layer.mlp.router: note(router, named["input_ids"]),
                    with_kwargs=True,
                )
    return model


def replayed(layout: dict[str, int], recompute: str, forgets: bool = False) -> dict[str, Any]:
    """A training pass under replay and watch. Of all ranks: what the watch says, and what the probe saw."""
    settings = settings_of(layout, Variant(recompute))
    join(settings)
    TableRouter.forgets = forgets
    model = with_tables(build(settings, Variant(recompute)))
    made = rollouts(30, len(SHAPE.moe_layers), SHAPE.num_experts, SHAPE.topk)
    micros = micro_batches(settings, pack_own(made))
    replay = RoutingReplay(model.chunks, min_agreement=0.0, shape=SHAPE)  # the routes are random
    routes = [local_routes(micro, replay.layers, SHAPE) for micro in micros]  # type: ignore[arg-type]
    probe = DispatchProbe(model.chunks, micros)
    with RoutingWatch(model.chunks, shape=SHAPE) as watch, replay.replay(routes):
        outputs = run(model.chunks, micros, temperature=1.0, vocab_size=32, coefficients=fixed_coefficients)
    probe.remove()
    report = watch.report(routes)
    wrong = [
        (one.layer, one.micro)
        for one in probe.seen
        if one.layer in replay.layers
        and not torch.equal(
            torch.zeros_like(one.experts).scatter(
                1, routes[one.micro].experts[:, replay.layers.index(one.layer)].long(), True
            )[_present(routes[one.micro])],
            one.experts[_present(routes[one.micro])],
        )
    ]
    columns = [(micro.batch, output.logprobs) for micro, output in zip(micros, outputs, strict=bool(outputs))]
    mine = {
        "layers": replay.layers,
        "exempt": replay.exempt_layers,
        "report": str(report),
        "is_right": report.is_right,
        "compared": report.compared.sum(0).tolist(),
        "recomputed": int(report.recomputed.sum()),
        "kinds": [cause.kind for cause in report.causes],
        "wrong": wrong,
    }
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    return {"ranks": everywhere, "logprobs": gather_sequences(columns)}


def _present(routes: Any) -> torch.Tensor:
    return torch.ones(len(routes.experts), dtype=torch.bool) if routes.present is None else routes.present
