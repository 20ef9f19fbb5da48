"""Routing replay as slime and its kin do it, rebuilt in a few lines: a list in the class, and two queues per router.

Nothing here knows a micro-batch: the n-th call of a router takes the n-th entry. What the watch has to catch is written
as a change of what is put into the queues, or of when they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch


class FifoReplay:
    """The object in ``router.router_replay``; all of a process register themselves in the class."""

    registered: ClassVar[list[FifoReplay]] = []
    stage: ClassVar[str] = "native"
    """native, forward (replay, next forward entry), backward (replay, next entry of recomputations)."""

    def __init__(self) -> None:
        self.entries: list[torch.Tensor] = []
        self.taken = {"forward": 0, "backward": 0}
        self.registered.append(self)

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: Any = None,
        group_topk: Any = None,
        compute: Any = None,
        **more: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        compute = more.get("default_compute_topk", compute)
        if self.stage == "native" or self.taken[self.stage] >= len(self.entries):
            return compute(scores, topk, num_groups, group_topk)
        experts = self.entries[self.taken[self.stage]].to(scores.device, torch.int64)
        self.taken[self.stage] += 1
        return scores.gather(1, experts), experts

    @classmethod
    def fill(cls, by_layer: Sequence[Sequence[torch.Tensor]]) -> None:
        """by_layer: for each router in the order of registration, its entries [T, K]."""
        for replay, entries in zip(cls.registered, by_layer, strict=True):
            replay.entries, replay.taken = list(entries), {"forward": 0, "backward": 0}

    @classmethod
    def clear(cls) -> None:
        cls.registered.clear()
        cls.stage = "native"


def install(model: torch.nn.Module) -> None:
    """One object for every router of the model, in the order of its modules: prediction layers too."""
    for module in model.modules():
        if hasattr(module, "router_replay"):
            module.router_replay = FifoReplay()
