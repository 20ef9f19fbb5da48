"""Megatron's own RouterReplay sends tokens to wrong experts without an error, and patches/upstream mends it."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import megatron.core
import pytest
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher
from own_replay_failures import FAILURES, NUM_EXPERTS, Failure, K, World

from megarl.replay import MicroRoutes
from megarl.verify import RoutingWatch

APPLIED = os.environ.get("UPSTREAM_PATCHES", "").split()
"""Names of the patches that the Megatron-Core of this process has (test_upstream_patches.py)."""
RELEASE = tuple(map(int, megatron.core.__version__.split(".")[:2]))
Dispatched = tuple[Any, int, bool, torch.Tensor, torch.Tensor]
"""Dispatcher, micro-batch of the last forward pass, whether autograd runs, hidden states [T, H], map [T, E]."""


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[Dispatched]:
    """What every dispatcher is told, in order."""
    seen: list[Dispatched] = []

    def look_at(dispatcher: Any) -> None:
        original = dispatcher.dispatch_preprocess

        def dispatch(self: Any, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor) -> Any:
            recomputes = torch._C._current_graph_task_id() != -1
            hidden = hidden_states.detach().view(-1, hidden_states.size(-1)).clone()
            seen.append((self, World.micro, recomputes, hidden, routing_map.detach().bool().clone()))
            return original(self, hidden_states, routing_map, probs)

        monkeypatch.setattr(dispatcher, "dispatch_preprocess", dispatch)

    look_at(MoEAlltoAllTokenDispatcher)
    look_at(MoEAllGatherTokenDispatcher)
    return seen


def wrong_passes(world: World, failure: Failure, dispatched: list[Dispatched]) -> Counter[str]:
    """How many calls of dispatchers got other experts than they should, by kind of pass."""
    found: Counter[str] = Counter()
    for number, layer in enumerate(world.layers):
        calls = [call for call in dispatched if call[0] is layer.mlp.token_dispatcher]
        micros = [(call[3], call[1]) for call in calls if not call[2]]
        for _, micro, recomputes, hidden, routing_map in calls:
            if recomputes:  # of the forward pass with the same hidden states
                micro = next(one for states, one in micros if torch.equal(states, hidden))
            native = (hidden @ layer.mlp.router.weight.T).topk(K).indices
            is_native = failure.native == (-1,) or number in failure.native
            experts = native if is_native else world.routes[micro][:, number]
            expected = torch.zeros(len(hidden), NUM_EXPERTS).scatter(1, experts, 1.0).bool()
            found["recomputed" if recomputes else "forward"] += not torch.equal(routing_map, expected)
    return found


@pytest.mark.parametrize("name", FAILURES)
def test_tokens_go_to_wrong_experts_without_an_error(name: str, dispatched: list[Dispatched]) -> None:
    failure = FAILURES[name]
    mended = failure.patch in APPLIED or failure.since > RELEASE
    try:
        world = World(**failure.world)
        with RoutingWatch(world.model) as watch:
            failure.run(world)
    except ValueError:  # refused: no longer silent
        if not mended:
            raise
        return
    finally:
        RouterReplay.clear_global_router_replay_instances()
    assert dispatched
    wrong = wrong_passes(world, failure, dispatched)
    assert {kind for kind, calls in wrong.items() if calls} == set(() if mended else failure.wrong.split()), wrong
    if not failure.native:
        first = world.layers[0].mlp.token_dispatcher
        micros = [micro for dispatcher, micro, recomputes, *_ in dispatched if dispatcher is first and not recomputes]
        report = watch.report([MicroRoutes(world.routes[micro]) for micro in micros])
        assert bool(report.causes) == any(wrong.values()), str(report)
