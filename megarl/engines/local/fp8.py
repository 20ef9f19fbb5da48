"""FP8 as an engine with FP8 kernels computes, in float32 on any device: products of weights, and the cache.

The model is SGLang 0.5.23 with block FP8 on a Hopper GPU (``--kv-cache-dtype fp8_e4m3`` for the cache).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401 # defines grouped_mm_fallback; loaded late up to transformers 5.6
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, PreTrainedModel

from megarl.core.fp8 import is_fp8_weight, is_known_precision, round_activations, round_to_e4m3
from megarl.errors import RolloutError

_PRODUCTS = {F.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm}
"""Functions that multiply activations [..., K] (first) with a weight (second)."""
_GROUPED = ((F, "grouped_mm"), (torch, "_grouped_mm"), (torch.ops.transformers, "grouped_mm_fallback"))
_PRODUCTS |= {getattr(place, name) for place, name in _GROUPED if hasattr(place, name)}


class FP8Products(TorchFunctionMode):
    """While active, products with FP8 weights are as in an FP8 engine.

        y = dtype(sum over k of (q_x s_x)[k] (q_w s_w)[k]) + bias,    summed in float32

    ``q_x s_x`` are ``round_activations``; the weights arrive rounded. Weights are recognised by their memory, in any
    product: linear layers, the stacked experts of a layer, or experts one by one. RolloutError for another use.
    """

    def __init__(self, views: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        """``views``: the tensors of the checkpoint in the model's memory; ``dtype`` of the results."""
        super().__init__()
        self._names = {_memory(view): name for name, view in views.items() if is_fp8_weight(name)}
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        weight = next(filter(None, map(self._weight, _flat((*args, *kwargs.values())))), None)
        if weight is None:
            return func(*args, **kwargs)
        if func in _PRODUCTS and len(args) > 1 and self._weight(args[1]) and not self._weight(args[0]):
            activations, matrix, *extra = args
            bias = next((argument for argument in (*extra, kwargs.pop("bias", None)) if argument is not None), None)
            product = func(round_activations(activations), matrix, **kwargs).to(self._dtype)
            return product if bias is None else product + bias
        result = func(*args, **kwargs)
        if any(
            isinstance(output, torch.Tensor) and not self._weight(output) for output in _flat([result])
        ):  # more than a view
            raise RolloutError(
                f"rollout.fp8_activations: the model uses {weight} in {getattr(func, '__name__', func)}, expected a "
                "product as of a linear layer; another experts implementation may help, or set it to false"
            )
        return result

    def _weight(self, value: Any) -> str | None:
        """The name of the FP8 weight of a tensor, or of a view."""
        return self._names.get(_memory(value)) if isinstance(value, torch.Tensor) else None


class FP8Cache(DynamicCache):
    """Keys and values in e4m3 with a scale of 1, also for tokens of the current pass; queries unchanged."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Append keys and values [B, heads, T, width]; return all keys and values, as ``DynamicCache`` does."""
        return super().update(round_to_e4m3(key_states), round_to_e4m3(value_states), *args, **kwargs)


def hold_in_fp32(model: PreTrainedModel, views: Mapping[str, torch.Tensor]) -> None:
    """Give FP8 weights [rows, columns] room for e4m3 times a float32 scale; bfloat16 would round a second time."""
    memory = {_memory(view) for name, view in views.items() if is_fp8_weight(name)}
    for parameter in model.parameters():
        if _memory(parameter) in memory:
            parameter.data = parameter.data.float()


def require_known_precision(views: Mapping[str, torch.Tensor]) -> None:
    """RolloutError for a matrix [rows, columns] with an unknown precision in FP8 engines."""
    unknown = [name for name, view in views.items() if view.dim() > 1 and not is_known_precision(name)]
    if unknown:
        raise RolloutError(
            f"rollout.fp8_rounding: {len(unknown)} matrices, such as {unknown[0]}, are neither projections that FP8 "
            "engines hold in FP8 nor embeddings, heads or router gates; set it to false for this architecture"
        )


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, (tuple, list)) else (value,)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
