"""What a router call under replay asks of a device: few operations, no copy to it but one per micro-batch, no waiting.

Tensors are on the meta device, which computes nothing, so the operations are those that a GPU would be given.
"""

from __future__ import annotations

from collections import Counter
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.replay import MicroRoutes, Recording
from megarl.replay.hooks import Hook
from megarl.replay.pass_log import PassBlock, PassLog, RouterCall
from megarl.replay.sessions import Recorder, Replayer

T, L, K, E = 12, 3, 2, 8
WAITING = ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "equal", "masked_select", "unique", "bincount")
"""Operations whose result the host must know."""
VIEWS = ("empty", "select", "slice", "transpose", "detach", "unsqueeze", "view", "alias", "_unsafe_view")
"""Operations that launch nothing."""


class Operations(TorchDispatchMode):
    """Counts operations on the device, copies to it, and waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()
        self.copied = self.waited = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        found = func(*args, **(kwargs or {}))
        given = [one for one in args if isinstance(one, torch.Tensor)]
        results = [
            one for one in (found if isinstance(found, (tuple, list)) else [found]) if isinstance(one, torch.Tensor)
        ]
        here = any(one.is_meta for one in given)
        there = any(one.is_meta for one in results)
        if there and given and not here:
            self.copied += 1
        elif here and (not there or name in WAITING):
            self.waited += 1
        elif there and name not in VIEWS:
            self.launched[name] += 1
        return found


class Routers:
    """The hooks of L routers, as Megatron asks them."""

    def __init__(self) -> None:
        config = SimpleNamespace(num_moe_experts=E, sequence_parallel=False)
        self.log = PassLog()
        self.hooks = [
            Hook(SimpleNamespace(layer_number=layer + 1, topk=K, config=config), layer, self.log, 0, layer == 0)
            for layer in range(L)
        ]

    def open(self, session: Recorder | Replayer) -> PassBlock:
        return self.log.open(session)

    def call(self, hook: Hook) -> Operations:
        scores = torch.empty(T, E, device="meta")
        with Operations() as counted:
            hook.get_replay_topk(scores, K, None, None, lambda s, k, *_: torch.topk(s, k, dim=1))
        return counted


def routes_of(missing: bool) -> list[MicroRoutes]:
    """Two micro-batches; with ``missing`` the last row of a sequence is absent, as engines leave it."""
    experts = torch.arange(K).expand(T, L, K).to(torch.uint8)
    present = torch.arange(T) % 6 < 5 if missing else None
    return [MicroRoutes(experts, present), MicroRoutes(experts, present)]


BUDGET: dict[tuple[str, bool, bool], dict[str, int]] = {
    # (pass, missing rows, agreement): kernels of one router call
    ("first", False, False): {"_to_copy": 1, "gather": 1},
    ("first", True, False): {"_to_copy": 2, "gather": 1, "index_select": 1, "topk": 1, "index_copy_": 1},
    ("first", False, True): {"_to_copy": 2, "gather": 1, "index_select": 1, "topk": 1},
    ("first", True, True): {"_to_copy": 2, "gather": 1, "index_select": 1, "topk": 1, "index_copy_": 1},
    ("recomputation", False, False): {"_to_copy": 1, "gather": 1},
    ("recomputation", True, False): {"_to_copy": 1, "gather": 1},
    ("recomputation", True, True): {"_to_copy": 1, "gather": 1},
}


@pytest.mark.parametrize(("which", "missing", "agreement"), BUDGET)
def test_a_router_call_keeps_to_its_budget(which: str, missing: bool, agreement: bool) -> None:
    routers = Routers()
    routers.open(Replayer(routes_of(missing), routers.hooks, False, None, 0.5 if agreement else 0.0))
    uploads = 2 if missing or agreement else 1  # the rows, and which of them the router is asked for
    for micro in range(2):
        first = [_called(routers, hook, micro, first=True) for hook in routers.hooks]
        assert [one.copied for one in first] == [uploads, 0, 0], f"micro-batch {micro}"
        assert sum(one.waited for one in first) == 0
        if which == "first":
            for one in first:
                assert dict(one.launched) == BUDGET[which, missing, agreement]
    if which == "recomputation":
        again = [_called(routers, hook, 0, first=False) for hook in routers.hooks]
        for one in again:
            assert (one.copied, one.waited) == (0, 0)  # what was uploaded for the first pass is still there
            assert dict(one.launched) == BUDGET[which, missing, agreement]


def _called(routers: Routers, hook: Hook, micro: int, first: bool) -> Operations:
    """The call of a router in a checkpoint: the first pass of a micro-batch, or its recomputation."""
    block = routers.log._blocks[get_ident()]
    assert block.session is not None
    call = RouterCall(block.session, micro, first, checkpointed=True)
    routers.log.identify = lambda _: call  # type: ignore[method-assign]
    try:
        return routers.call(hook)
    finally:
        del routers.log.identify


def test_recording_keeps_to_its_budget() -> None:
    routers = Routers()
    routers.open(Recorder(routers.hooks, True, None))
    for hook in routers.hooks:
        counted = routers.call(hook)
        assert (counted.copied, counted.waited) == (0, 0)
        assert dict(counted.launched) == {"topk": 1, "_to_copy": 1, "gather": 1}


def test_routes_on_the_device_are_not_uploaded() -> None:
    routers = Routers()
    on_device = [MicroRoutes(one.experts.to("meta")) for one in routes_of(False)]
    routers.open(Replayer(on_device, routers.hooks, False, None, 0.0))
    for hook in routers.hooks:
        counted = routers.call(hook)
        assert (counted.copied, counted.waited) == (0, 0)
        assert dict(counted.launched) == {"_to_copy": 1, "gather": 1, **({"copy_": 1} if hook.column == 0 else {})}


def test_tables_go_when_their_last_use_is_over() -> None:
    """Without recomputation a micro-batch's rows leave the device when its last router has used them."""
    routers = Routers()
    session = Replayer(routes_of(True), routers.hooks, False, None, 0.5)
    routers.open(session)
    held = session._rows._tables
    for micro in range(2):
        for hook in routers.hooks:
            assert set(held) <= {micro}
            routers.call(hook)
        assert not held
    routers = Routers()
    session = Replayer(routes_of(True), routers.hooks, False, None, 0.5)
    routers.open(session)
    for micro in range(2):  # checkpoints may come back
        for hook in routers.hooks:
            _called(routers, hook, micro, first=True)
    assert set(session._rows._tables) == {0, 1}
    for hook in routers.hooks:
        _called(routers, hook, 0, first=False)
    assert set(session._rows._tables) == {1}


@pytest.mark.parametrize("recorded", [False, True])
def test_closing_reads_the_device_once(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many micro-batches and routers: one read for agreement, one for the model's token ids, and one each for
    routes and their ids if these are on the device too."""
    reads = []
    original = torch.Tensor.cpu

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            reads.append(tuple(tensor.shape))
            return torch.arange(tensor.shape[-1], dtype=tensor.dtype).expand(tensor.shape)
        return original(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    routers = Routers()
    device = "meta" if recorded else "cpu"
    ids = torch.arange(2 * T, device=device)  # both micro-batches in one, as they are read
    routes = [
        MicroRoutes(one.experts.to(device), None, part)
        for one, part in zip(routes_of(False), ids.split(T), strict=True)
    ]
    session = Replayer(routes, routers.hooks, False, None, 0.01)
    block = routers.open(session)
    for micro in range(2):
        session.tokens[micro] = torch.empty(T, dtype=torch.int32, device="meta")
        for hook in routers.hooks:
            routers.call(hook)
    session.close(routers.hooks, block, Recording())
    assert reads == ([(2 * T,), (2 * T,)] + 2 * [(2 * T, L, K)] if recorded else [(2 * T,), (2 * T, L, K)])
