"""Reads off which experts a transformers MoE model uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from megarl.core.routing.trace import narrow_dtype
from megarl.errors import TraceError


class RouteRecorder:
    """Records the expert ids that each MoE layer of a transformers model is called with.

    The hooks sit on the modules that hold the experts, not on the routers: some routers return logits only and leave
    the choice to the block around them, but every block calls ``experts(hidden_states, top_k_index, top_k_weights)``.
    Dense layers have no such module and so no place in the trace.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(name, module) for name, module in model.named_modules() if _num_experts(module)]
        self._seen: dict[int, torch.Tensor] = {}
        num_experts = max((_num_experts(module) for _, module in self._modules), default=0)
        self._dtype = narrow_dtype(num_experts)
        self._sent: torch.dtype = getattr(torch, narrow_dtype(num_experts, signed=True).__name__)

    @property
    def num_layers(self) -> int:
        """Number of MoE layers, L."""
        return len(self._modules)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the forward passes that run inside, to be taken one by one; outside of it the model has no hooks."""
        self._seen.clear()
        handles = [
            module.register_forward_pre_hook(self._hook(layer), with_kwargs=True)
            for layer, (_, module) in enumerate(self._modules)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def take(self, batch: int, length: int) -> np.ndarray:
        """Returns what was recorded, uint8 (E <= 256) or uint16 [batch, length, L, K], and forgets it.

        Raises TraceError if a layer did not see exactly one row per token of the [batch, length] input.
        """
        for layer, (name, _) in enumerate(self._modules):
            found = self._seen.get(layer)
            if found is None or found.dim() != 2 or len(found) != batch * length:
                shape = None if found is None else tuple(found.shape)
                raise TraceError(f"{name} routed {shape}, expected [{batch * length}, top-k]: one row per token")
        stacked = torch.stack([self._seen[layer] for layer in range(self.num_layers)], dim=1)
        self._seen.clear()
        routes = stacked.to(self._sent).cpu().numpy().view(self._dtype)
        return routes.reshape(batch, length, *routes.shape[1:])

    def _hook(self, layer: int) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if layer in self._seen:
                raise TraceError(f"{self._modules[layer][0]} ran twice in one forward pass")
            self._seen[layer] = args[1] if len(args) > 1 else kwargs["top_k_index"]

        return record


def _num_experts(module: nn.Module) -> int:
    """E for a module with the stacked weights [E, ., .] of all experts of a layer, else 0."""
    number = getattr(module, "num_experts", None)
    return number if isinstance(number, int) and any(p.dim() == 3 for p in module.parameters(recurse=False)) else 0
