"""Records to which experts tokens are sent, at Megatron's token dispatcher, and compares them with the replayed ones.

It knows nothing of replay: it wraps the dispatcher of every MoE layer and reads the routing map that arrives there.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import toy
from megatron.core import parallel_state


@dataclass(frozen=True)
class Dispatch:
    """One call of one layer's dispatcher."""

    tokens: torch.Tensor
    """The input_ids [b, s] of the micro-batch, which identify it."""
    training: bool
    layer: int
    hidden: torch.Tensor
    """[T_local, h]."""
    experts: torch.Tensor
    """bool [T_local, E], where the tokens went."""
    native: torch.Tensor
    """bool [T_local, E], where the router would have sent them without replay."""


class DispatchWatch:
    """Collects all dispatches of a model's chunks on this rank, recomputations included."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._seen: list[Dispatch] = []
        for chunk in chunks:
            gpt: Any = chunk.module
            running: list[torch.Tensor] = []  # the micro-batch in its forward pass; empty while autograd recomputes
            gpt.register_forward_pre_hook(
                lambda _, __, inputs, running=running: running.append(inputs["input_ids"]), with_kwargs=True
            )
            gpt.register_forward_hook(lambda *_, running=running: running.clear())
            for layer in gpt.decoder.layers:
                if hasattr(layer.mlp, "token_dispatcher"):
                    self._wrap(layer, running)

    def _wrap(self, layer: Any, running: list[torch.Tensor]) -> None:
        dispatcher, router, number = layer.mlp.token_dispatcher, layer.mlp.router, layer.layer_number - 1
        name = "dispatch_preprocess" if hasattr(dispatcher, "dispatch_preprocess") else "token_permutation"  # in 0.12
        original = getattr(dispatcher, name)
        signature = inspect.signature(original)

        def dispatch(*arguments: Any) -> Any:
            given = signature.bind(*arguments).arguments
            hidden, routing_map = given["hidden_states"], given["routing_map"]
            rows = hidden.detach().reshape(-1, hidden.size(-1)).clone()
            tokens = running[0] if running else self._find_recomputed(number, rows)
            chosen = (rows.float() @ router.weight.detach().float().T).topk(toy.TOPK).indices
            native = torch.zeros_like(routing_map, dtype=torch.bool).scatter(1, chosen, True)
            sent = routing_map.bool().clone()
            self._seen.append(Dispatch(tokens, layer.training, number, rows, sent.cpu(), native.cpu()))
            return original(*arguments)

        setattr(dispatcher, name, dispatch)

    def _find_recomputed(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Find the micro-batch by its input, because activation checkpointing repeats a layer on the same input."""
        for one in reversed(self._seen):
            if one.training and one.layer == layer and torch.equal(one.hidden, rows):
                return one.tokens
        raise RuntimeError(f"layer {layer} was recomputed on an input that it has not seen")

    def report(self, batches: Iterable[toy.Batch], must_hold: str | None = None) -> int:
        """Print the share of (token, layer) pairs sent to each choice; 1 if ``must_hold`` (r2 or r3) failed, else 0."""
        by_tokens = {id(batch["tokens"]): batch for batch in batches}
        before = {(id(one.tokens), one.layer): one.experts for one in self._seen if not one.training}
        counts = torch.zeros(2, 3, dtype=torch.int64)  # (r3, r2) x (pairs, sent as wanted, left alone)
        for one in self._seen:
            batch = by_tokens[id(one.tokens)]
            expected, recorded, is_token = _rows_seen_here(batch, one)
            counts[0] += _agreement(expected, one, recorded)
            if one.training:
                counts[1] += _agreement(before[id(one.tokens), one.layer], one, is_token)
        counts = counts.to(torch.cuda.current_device())
        dist.all_reduce(counts)
        shares = dict(zip(("r3", "r2"), counts.tolist(), strict=True))
        if dist.get_rank() == 0:
            for mode, choice in (("r3", "the rollout's"), ("r2", "the old-log-prob pass's")):
                pairs, sent, alone = shares[mode]
                print(
                    f"of {pairs} (token, layer) pairs {sent / pairs:.1%} were sent to {choice} experts; "
                    f"routers left alone: {alone / pairs:.1%}"
                )
        if must_hold is None:
            return 0
        pairs, sent, _ = shares[must_hold]
        if dist.get_rank() == 0:
            print(f"{must_hold} " + ("held" if pairs == sent > 0 else f"DID NOT HOLD for {pairs - sent} pairs"))
        return int(not pairs == sent > 0)


def _rows_seen_here(batch: toy.Batch, one: Dispatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(recorded experts bool [T_local, E], where they exist, where there is a token), counted out row by row."""
    b, total = batch["tokens"].size(0), one.hidden.size(0)
    row = torch.arange(total)
    sequence, position = row % b, row // b + parallel_state.get_tensor_model_parallel_rank() * (total // b)
    recorded = batch["routed_experts"][sequence, position, toy.MOE_LAYERS.index(one.layer)].long()
    expected = torch.zeros(one.experts.shape, dtype=torch.bool).scatter(1, recorded, True)
    return expected, batch["routed_mask"][sequence, position], batch["is_token"].cpu()[sequence, position]


def _agreement(expected: torch.Tensor, one: Dispatch, rows: torch.Tensor) -> torch.Tensor:
    """Of the given rows: how many, how many were sent to the expected experts, how many would have been natively."""
    same = [(expected == found).all(1)[rows].sum() for found in (one.experts, one.native)]
    return torch.stack([rows.sum(), *same])
