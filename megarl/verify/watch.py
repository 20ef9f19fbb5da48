"""Watches the token dispatchers of a Megatron model: the last place that knows where a token goes.

Nothing is put into a router, so the watch sees every kind of replay, fused routers, and runs without replay. A call of
a dispatcher is a recomputation if autograd is running, and else a forward pass. The n-th forward pass of a layer is
micro-batch n. A recomputation repeats the hidden states of its forward pass, and a few of them tell which one it was.
"""

import inspect
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.moe_layer import BaseMoELayer

from megarl.errors import ReplayError, refuse_if
from megarl.files.hf_config import MoeShape
from megarl.replay.checks import fitting_shape
from megarl.replay.layout import local_rows
from megarl.replay.megatron_state import Replaced, cp_position, split_position, unwrap
from megarl.replay.records import MicroRoutes
from megarl.verify.expert_sets import ExpertSets
from megarl.verify.report import RoutingReport, compare_routes

FINGERPRINT = 64
"""Hidden values that identify a pass, evenly spaced."""


@dataclass(frozen=True, slots=True)
class _Call:
    """What one call of a dispatcher showed. Tensors are on its device."""

    num_rows: int
    width: int
    """Sequences beside each other: b of hidden states [s, b, h]."""
    stride: int
    bits: torch.Tensor
    """uint8 [R, B], the experts of every ``stride``-th row."""
    num_zero_gates: torch.Tensor
    """int64 [], pairs of these rows and their experts with a gate weight of exactly 0."""
    fingerprint: torch.Tensor
    """float32 [FINGERPRINT], 0 behind the end."""


class RoutingWatch(AbstractContextManager["RoutingWatch"]):
    """Notes the experts of every forward pass and recomputation inside its ``with`` block, whoever chooses them.

        with RoutingWatch(model_chunks) as watch:
            forward_and_backward()
        report = watch.report(expected)  # one MicroRoutes for each micro-batch

    ``on=False`` watches nothing and costs nothing; the report then compares no row. At most ``most_rows`` rows of a
    call are noted, evenly spaced, as ceil(E / 8) bytes each (None: all). shape: as in ``RoutingReplay``. Only
    ``report`` waits for the device.

    The experts of exempt layers are compared with each other: rows of one token must have the experts of its first row.
    ReplayError for modules without a decoder, for most_rows below 1, and on entering while another watch is open.
    """

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module] | torch.nn.Module,
        on: bool = True,
        most_rows: int | None = 1024,
        shape: MoeShape | None = None,
    ) -> None:
        refuse_if(most_rows is not None and most_rows < 1, ReplayError, "most_rows", most_rows=most_rows)
        self._on, self._most_rows = on, most_rows
        model_chunks = [model_chunks] if isinstance(model_chunks, torch.nn.Module) else model_chunks
        decoders = [chunk.decoder for chunk in map(unwrap, model_chunks) if getattr(chunk, "decoder", None) is not None]
        refuse_if(not decoders, ReplayError, "no_decoder")
        self._config = decoders[0].config
        self.shape = fitting_shape(self._config, shape)
        of_decoder = [layer for decoder in decoders for layer in _moe_layers(decoder)]
        self._exempt_layers = [layer for layer in of_decoder if _number(layer) in self.shape.exempt_layers]
        self._replayed_layers = [layer for layer in of_decoder if layer not in self._exempt_layers]
        self._decoder_layers = self._replayed_layers + self._exempt_layers
        every = [layer for chunk in model_chunks for layer in _moe_layers(chunk)]
        self._draft_layers = [layer for layer in every if layer not in of_decoder]
        self._calls: dict[BaseMoELayer, tuple[list[_Call], list[_Call]]] = {}
        """By layer: forward passes, recomputations."""
        self._restore = ExitStack()

    @property
    def layers(self) -> list[int]:
        """0-based numbers of the MoE layers of the decoder on this rank: the columns of the expected routes."""
        return [_number(layer) for layer in self._replayed_layers]

    def rows(self, experts: torch.Tensor, *columns: torch.Tensor | None, **masks: torch.Tensor | None) -> MicroRoutes:
        """Cut the rows of this rank out of a whole micro-batch: ``RoutingReplay.rows``, with the same arguments.
        experts: [b, s, L, K], or packed [T, L, K].
        """
        tp = split_position(self._config)
        return local_rows(self.shape, self.layers, tp, cp_position(), experts, *columns, **masks)

    def __enter__(self) -> "RoutingWatch":
        layers = self._decoder_layers + self._draft_layers if self._on else []
        every = {layer: (list[_Call](), list[_Call]()) for layer in layers}
        with ExitStack() as restore:
            for layer, calls in every.items():
                dispatcher, name = layer.token_dispatcher, _entrance(layer)
                original = getattr(dispatcher, name)
                refuse_if(isinstance(original, partial), ReplayError, "watched_twice", layer=layer)
                signature = inspect.signature(getattr(type(dispatcher), name))  # another tool may have wrapped it
                dispatch = partial(self._dispatch, original, signature, calls)
                restore.enter_context(Replaced(dispatcher, **{name: dispatch}))
            self._calls, self._restore = every, restore.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._restore.close()

    def _dispatch(self, original: Any, signature: Any, calls: Any, *positional: Any, **keywords: Any) -> Any:
        arguments = signature.bind(None, *positional, **keywords).arguments
        routing_map, gates = arguments["routing_map"].detach(), arguments["probs"].detach()
        hidden = [*arguments.values()][1].detach()  # its name differs between dispatchers
        width = hidden.size(1) if hidden.dim() == 3 else 1
        hidden = hidden.reshape(-1)
        stride = 1 if self._most_rows is None else max(1, -(-len(routing_map) // self._most_rows))
        rows, gates = routing_map[::stride].bool(), gates[::stride]
        fingerprint = hidden[:: max(1, len(hidden) // FINGERPRINT)][:FINGERPRINT].float()
        fingerprint = torch.nn.functional.pad(fingerprint, (0, FINGERPRINT - len(fingerprint)))  # a copy
        is_recomputation = torch._C._current_graph_task_id() != -1
        call = _Call(len(routing_map), width, stride, pack_bits(rows), (rows & (gates == 0)).sum(), fingerprint)
        calls[is_recomputation].append(call)
        return original(*positional, **keywords)

    def report(self, expected: Sequence[MicroRoutes]) -> RoutingReport:
        """Compare the forward passes with ``expected``, and every recomputation with its forward pass.

        expected: one for each forward micro-batch, in order; experts [T, L, K] with the columns of ``layers``. For
        several passes over the same micro-batches in one block, repeat the list. A rank without MoE layers compares
        nothing. ReplayError for other columns.
        """
        has_tokens = all(routes.token_ids is not None for routes in expected)
        if not self._on or not (self._replayed_layers or (self._exempt_layers and has_tokens)):
            return compare_routes([], [], self.layers)
        for micro, routes in enumerate(expected):
            facts = {"shape": (shape := [*routes.experts.shape]), "num": len(self.layers), "layers": self.layers}
            is_wrong = len(shape) != 3 or shape[1] != len(self.layers)
            refuse_if(is_wrong, ReplayError, "other_columns", micro=micro, **facts)
        calls = [self._calls.get(layer, ([], [])) for layer in self._decoder_layers]
        passes = _by_micro_batch([forward for forward, _ in calls])
        sets = [_sets_of(routes, self.shape.num_experts) for routes in expected]
        exempt = tuple(map(_number, self._exempt_layers))
        report = compare_routes(
            passes,
            _with_tables(sets, passes, expected, len(exempt)) if exempt else sets,
            [*self.layers, *exempt],
            recomputed=_by_micro_batch([_in_order_of(*passes) for passes in calls]),
            draft=_by_micro_batch([self._calls[layer][0] for layer in self._draft_layers if layer in self._calls]),
            num_zero_gates=int(sum(call.num_zero_gates for passes in calls for call in itertools.chain(*passes))),
        )
        report.exempt_layers = exempt
        return report


def _number(layer: BaseMoELayer) -> int:
    return (layer.layer_number or 0) - 1


def _moe_layers(module: torch.nn.Module) -> list[BaseMoELayer]:
    return [submodule for submodule in module.modules() if isinstance(submodule, BaseMoELayer)]


def _entrance(layer: BaseMoELayer) -> str:
    """The method of the layer's dispatcher that is given tokens and experts; until 0.13 one does all."""
    return "dispatch_preprocess" if hasattr(layer.token_dispatcher, "dispatch_preprocess") else "token_permutation"


def _sets_of(routes: MicroRoutes, num_experts: int) -> ExpertSets:
    present = np.ones(len(routes.experts), bool) if routes.present is None else routes.present.cpu().numpy()
    return ExpertSets.of_experts(routes.experts.cpu().numpy(), num_experts, present)


def _with_tables(
    sets: Sequence[ExpertSets], passes: Sequence[ExpertSets], expected: Sequence[MicroRoutes], num_exempt: int
) -> list[ExpertSets]:
    """Add the columns of exempt layers to the expected sets: the experts of the first present row of the same token."""
    first, whole = dict[int, np.ndarray](), list[ExpertSets]()
    for used, target, routes in itertools.zip_longest(passes[: len(sets)], sets, expected):
        bits = np.pad(target.bits, ((0, 0), (0, num_exempt), (0, 0)))
        known = np.pad(target.known, ((0, 0), (0, num_exempt)))
        if used is not None and used.num_rows == target.num_rows and routes.token_ids is not None:
            ids, present = routes.token_ids.tolist(), None if routes.present is None else routes.present.tolist()
            for row, its_bits in zip(used.rows.tolist(), used.bits[:, -num_exempt:], strict=True):
                known[row, -num_exempt:] = present is None or present[row]
                if known[row, -1]:
                    bits[row, -num_exempt:] = first.setdefault(ids[row], its_bits)
        whole.append(ExpertSets(bits, target.rows, known, target.num_rows))
    return whole


def _in_order_of(forward: Sequence[_Call], recomputed: Sequence[_Call]) -> list[_Call | None]:
    """Return the recomputations of one layer in the order of their forward passes; None for a pass without one."""
    ordered: list[_Call | None] = [None] * len(forward)
    if not forward or not recomputed:
        return ordered
    firsts, repeats = (torch.stack([call.fingerprint for call in calls]).cpu() for calls in (forward, recomputed))
    for call, fingerprint in zip(recomputed, repeats, strict=True):
        gaps = (firsts - fingerprint).abs().sum(1).tolist()
        order = [(forward[n].num_rows != call.num_rows, gap, ordered[n] is not None) for n, gap in enumerate(gaps)]
        best = min(order)
        nearest = [micro for micro, place in enumerate(order) if place == best]
        if len(nearest) > 1:  # equal tokens, which may have other routes: those of equal routes come first
            nearest.sort(key=lambda micro: not torch.equal(forward[micro].bits, call.bits))
        ordered[nearest[0]] = call
    return ordered


def _by_micro_batch(calls: Sequence[Sequence[_Call | None]]) -> list[ExpertSets]:
    """Stack the calls of the layers for each micro-batch; a layer without a call is not known."""
    stacked = []
    for by_layer in itertools.zip_longest(*calls):
        first = next((call for call in by_layer if call is not None), None)
        if first is None:
            stacked.append(ExpertSets.unknown(len(by_layer)))
            continue
        same = [call if call is not None and call.num_rows == first.num_rows else None for call in by_layer]
        bits = [torch.zeros_like(first.bits) if call is None else call.bits for call in same]
        rows = np.arange(0, first.num_rows, first.stride)
        is_known = np.broadcast_to([call is not None for call in same], (len(rows), len(same)))
        stacked.append(ExpertSets(torch.stack(bits, 1).cpu().numpy(), rows, is_known, first.num_rows, first.width))
    return stacked


def pack_bits(routing_map: torch.Tensor) -> torch.Tensor:
    """Return uint8 [R, B] of a routing map, bool [R, E], on its device."""
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=routing_map.device)
    whole = torch.nn.functional.pad(routing_map, (0, -routing_map.size(1) % 8))
    return (whole.unflatten(1, (-1, 8)) * weights).sum(2, dtype=torch.uint8)
