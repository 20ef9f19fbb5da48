"""Runs an example as it stands, but with one row of its routes altered before replay, and the order of rows verified.

python example_driver.py PATH/plugged_in.py [its arguments]
"""

from __future__ import annotations

import runpy
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook

from megarl import plugin, replay
from megarl.replay import MicroRoutes, Recording


class TamperedReplay(replay.RoutingReplay):
    """Sends the first token of the first layer of every mini-batch to another expert."""

    def replay(self, routes: Any, **options: Any) -> AbstractContextManager[Recording]:  # type: ignore[override]
        return super().replay([self._altered(routes[0]), *routes[1:]], **options)

    def _altered(self, routes: MicroRoutes) -> MicroRoutes:
        experts = routes.experts.clone()
        experts[0, 0, 0] = next(expert for expert in range(8) if expert not in experts[0, 0])
        return MicroRoutes(experts, routes.present)


def verify_order(module: torch.nn.Module, _: Any, named: dict[str, Any], hidden: torch.Tensor) -> None:
    """Embedded tokens, which later layers and routers see in the same order, have the position before the sequence."""
    if type(module).__name__ != "LanguageModelEmbedding":
        return
    for row, state in enumerate(hidden.flatten(0, 1)):
        position, sequence = divmod(row, named["input_ids"].size(0))
        embedded = module.word_embeddings.weight[named["input_ids"][sequence, position]]  # type: ignore[index, union-attr]
        assert torch.equal(state, embedded), f"row {row} is another token than position {position} of {sequence}"
    print("order of rows verified")


if __name__ == "__main__":
    EXAMPLE = Path(sys.argv[1])
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(EXAMPLE.parent))
    register_module_forward_hook(verify_order, with_kwargs=True)
    plugin.RoutingReplay = TamperedReplay  # type: ignore[misc]
    runpy.run_path(str(EXAMPLE), run_name="__main__")
