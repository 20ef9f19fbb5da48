"""Watches which experts tokens are really sent to, at the token dispatcher, without asking the code under test.

What was a forward pass and what its recomputation is told by content: activation checkpointing repeats a layer on
exactly the same hidden states. Which micro-batch it was is told by the token ids that the model was called with.
"""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state

from megarl.core.types import Rollout
from megarl.megatron.passes.micro_batches import MicroBatch
from megarl.replay.megatron_state import unwrap


@dataclass(frozen=True)
class Dispatch:
    """One call of the token dispatcher of one layer."""

    layer: int
    micro: int
    is_recomputation: bool
    hidden: torch.Tensor
    """[T_local, H]."""
    experts: torch.Tensor
    """bool [T_local, E], what the dispatcher was told."""
    gates: torch.Tensor
    """[T_local, E], the weights of the experts' outputs."""
    logits: torch.Tensor
    """fp32 [T_local, E], of the router, computed here."""


def _entrance(dispatcher: Any) -> str:
    """The method that a dispatcher is given tokens by; 0.12 has one for all that it does."""
    return "dispatch_preprocess" if hasattr(dispatcher, "dispatch_preprocess") else "token_permutation"


def tap(dispatcher: Any, see: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]) -> None:
    """Let ``see(hidden states, routing map, gates)`` look at every call of one dispatcher."""
    original = getattr(dispatcher, _entrance(dispatcher))
    signature = inspect.signature(original)

    def dispatch(*positional: Any, **named: Any) -> Any:
        given = signature.bind(*positional, **named).arguments
        see(given["hidden_states"], given["routing_map"], given["probs"])
        return original(*positional, **named)

    setattr(dispatcher, _entrance(dispatcher), dispatch)


def untap(dispatcher: Any) -> None:
    delattr(dispatcher, _entrance(dispatcher))


class TopTwo:
    """What a router of these tests does by itself: softmax over the two largest logits."""

    def choose(self, layer: int, logits: torch.Tensor) -> torch.Tensor:
        """Experts [T, K] of logits fp32 [T, E]; ``layer`` is 0-based."""
        del layer
        return logits.topk(2, dim=1).indices

    def gates(self, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Weights [T, E] of chosen experts bool [T, E], 0 elsewhere."""
        return logits.masked_fill(~experts, float("-inf")).softmax(1)


class DispatchProbe:
    """Wraps the dispatchers of a model's chunks until ``remove``; ``seen`` fills with every call."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], micro_batches: Sequence[MicroBatch], router: TopTwo | None = None
    ) -> None:
        self.seen: list[Dispatch] = []
        self._micro_batches = micro_batches
        self._router = TopTwo() if router is None else router
        self._handles: list[Any] = []
        self._wrapped: list[Any] = []
        for chunk in map(unwrap, chunks):
            current: dict[str, int] = {}
            hook = self._note_micro_batch(current)
            self._handles.append(chunk.register_forward_pre_hook(hook, with_kwargs=True))
            for layer in chunk.decoder.layers:
                if hasattr(layer.mlp, "token_dispatcher"):
                    self._wrap(layer, current)

    def _note_micro_batch(self, current: dict[str, int]) -> Any:
        def hook(_: Any, __: Any, arguments: dict[str, Any]) -> None:
            same = [torch.equal(arguments["input_ids"], micro.input_ids) for micro in self._micro_batches]
            assert sum(same) == 1, "micro-batches of the probe must differ"
            current["micro"] = same.index(True)

        return hook

    def _wrap(self, layer: Any, current: dict[str, int]) -> None:
        dispatcher, router, number = layer.mlp.token_dispatcher, layer.mlp.router, layer.layer_number - 1

        def see(hidden: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor) -> None:
            flat = hidden.detach().reshape(-1, hidden.size(-1)).clone()
            earlier = [one for one in self.seen if one.layer == number and torch.equal(one.hidden, flat)]
            bias = getattr(router, "bias", None)
            logits = flat.float() @ router.weight.detach().float().T + (0.0 if bias is None else bias.detach().float())
            micro = earlier[0].micro if earlier else current["micro"]
            found = routing_map.detach().bool().clone()
            self.seen.append(Dispatch(number, micro, bool(earlier), flat, found, probs.detach().clone(), logits))

        tap(dispatcher, see)
        self._wrapped.append(dispatcher)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for dispatcher in self._wrapped:
            untap(dispatcher)

    def counts(self) -> Counter[tuple[int, int, bool]]:
        """(layer, micro-batch, is_recomputation) -> calls."""
        return Counter((one.layer, one.micro, one.is_recomputation) for one in self.seen)

    def violations(self, rollouts: Sequence[Rollout], moe_layers: Sequence[int]) -> list[str]:
        """Tokens that were not sent to the experts of their rollout, or, where that has no row, of the router."""
        by_tokens = {tuple(rollout.tokens.tolist()): rollout for rollout in rollouts}
        found = []
        for one in self.seen:
            expected = self._expected(one, by_tokens, moe_layers.index(one.layer))
            for row in (expected != one.experts).any(1).nonzero()[:, 0].tolist():
                kind = "recomputation" if one.is_recomputation else "forward"
                sent, wanted = one.experts[row].nonzero()[:, 0].tolist(), expected[row].nonzero()[:, 0].tolist()
                found.append(f"layer {one.layer} micro {one.micro} {kind} row {row}: sent to {sent}, expected {wanted}")
        return found

    def _expected(self, one: Dispatch, by_tokens: dict[Any, Rollout], column: int) -> torch.Tensor:
        """bool [T_local, E], built from the rollouts themselves."""
        micro = self._micro_batches[one.micro]
        chosen = self._router.choose(one.layer, one.logits).clone()
        share = one.hidden.size(0)
        first = share * parallel_state.get_tensor_model_parallel_rank()
        held = tokens_held(micro, parallel_state.get_context_parallel_rank())
        assert share * parallel_state.get_tensor_model_parallel_world_size() == len(held)
        for row, place in enumerate(held[first : first + share]):
            if place is None:
                continue
            tokens, offset = place
            rollout = by_tokens[tokens]
            if rollout.routed_mask is None or rollout.routed_mask[offset]:
                assert rollout.routed_experts is not None
                chosen[row] = torch.as_tensor(rollout.routed_experts[offset, column]).long()
        return torch.zeros_like(one.experts).scatter(1, chosen, True)

    def largest_gate_error(self) -> float:
        """Gate weights against those of the router's logits at the experts that were used."""
        worst = 0.0
        for one in self.seen:
            expected = self._router.gates(one.logits, one.experts)
            worst = max(worst, float((expected - one.gates.float()).abs().max()))
        return worst


def tokens_held(micro: MicroBatch, rank: int) -> list[tuple[tuple[int, ...], int] | None]:
    """(tokens of the sequence, offset) in the order in which a context-parallel rank holds them; None for padding."""
    size = parallel_state.get_context_parallel_world_size()
    held: list[tuple[tuple[int, ...], int] | None] = []
    total = 0
    for start, stop in itertools.pairwise(micro.batch.cu_seqlens.tolist()):
        tokens = tuple(micro.batch.tokens[start:stop].tolist())
        length = stop - start
        while size > 1 and length % (2 * size):
            length += 1
        total += length
        chunk = length // (2 * size) if size > 1 else length
        for piece in (rank, 2 * size - 1 - rank) if size > 1 else (0,):
            offsets = range(piece * chunk, (piece + 1) * chunk)
            held += [(tokens, offset) if offset < len(tokens) else None for offset in offsets]
    return held + [None] * ((micro.num_slots - total) // size)
