"""Reads off which experts a transformers MoE model uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from megarl.errors import TraceError
from megarl.routes.trace import narrow_dtype


class RouteRecorder:
    """Records the expert ids in the calls of each MoE layer of a transformers model.

    The hooks sit on the modules that hold the experts, not on the routers: some routers return logits only and leave
    the choice to the block around them, but every block calls ``experts(hidden_states, top_k_index, top_k_weights)``.
    Dense layers have no such module and so no place in the trace.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(name, module) for name, module in model.named_modules() if _num_experts(module)]
        self._begin()
        num_experts = max((_num_experts(module) for _, module in self._modules), default=0)
        self._dtype = narrow_dtype(num_experts)
        self._narrow: torch.dtype = getattr(torch, narrow_dtype(num_experts, signed=True).__name__)

    @property
    def num_layers(self) -> int:
        """Number of MoE layers, L."""
        return len(self._modules)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the forward passes inside; outside the model has no hooks."""
        self._begin()
        handles = [
            module.register_forward_pre_hook(self._hook(layer), with_kwargs=True)
            for layer, (_, module) in enumerate(self._modules)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def end_pass(self, num_tokens: int) -> None:
        """End a forward pass; TraceError if a layer did not see exactly one row per input token."""
        for (name, _), passes in zip(self._modules, self._seen, strict=True):
            shape = tuple(passes[-1].shape) if len(passes) > self._num_passes else None
            if shape is None or len(shape) != 2 or shape[0] != num_tokens:
                raise TraceError(f"{name} routed {shape}, expected [{num_tokens}, top-k]: one row per token")
        self._num_passes += 1
        self._num_rows += num_tokens

    def take(self) -> np.ndarray:
        """Returns the rows of all passes, one after the other: uint8 (E <= 256) or uint16 [rows, L, K]; once."""
        rows = torch.cat([ids for passes in self._seen for ids in passes]).to(self._narrow).cpu().numpy()
        routes = rows.view(self._dtype).reshape(self.num_layers, self._num_rows, -1)
        self._begin()
        return routes.transpose(1, 0, 2)

    def _begin(self) -> None:
        self._seen: list[list[torch.Tensor]] = [[] for _ in self._modules]  # by layer, pass after pass
        self._num_passes = self._num_rows = 0

    def _hook(self, layer: int) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if len(self._seen[layer]) > self._num_passes:
                raise TraceError(f"{self._modules[layer][0]} ran twice in one forward pass")
            self._seen[layer].append(args[1] if len(args) > 1 else kwargs["top_k_index"])

        return record


def _num_experts(module: nn.Module) -> int:
    """E for a module with the stacked weights [E, ., .] of all experts of a layer, else 0."""
    number = getattr(module, "num_experts", None)
    return number if isinstance(number, int) and any(p.dim() == 3 for p in module.parameters(recurse=False)) else 0
