"""A CPU that takes the path of a GPU with real numbers, and refuses what a GPU refuses."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class SaysCuda(TorchFunctionMode):
    """Inside, ``is_cuda`` of every tensor is true, so that code takes the path of a GPU with real numbers."""

    def __init__(self, says: bool = True) -> None:
        super().__init__()
        self._says = says

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if getattr(function, "__self__", None) is torch.Tensor.is_cuda and self._says:
            return True
        return function(*arguments, **(named or {}))


class RefusesAsCuda(TorchDispatchMode):
    """Matrix products as CUDA has them, and an error for what makes the host wait for the device."""

    WAITS = ("aten.nonzero.default", "aten._local_scalar_dense.default", "aten.masked_select.default")

    def __init__(self) -> None:
        super().__init__()
        self.operands: set[torch.dtype] = set()
        """Of the products that add 16-bit numbers up in fp32."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        by_index = str(function).startswith(("aten.index.", "aten.index_put"))
        indices = [index for index in arguments[1] if index is not None] if by_index else []
        if str(function) in self.WAITS or any(index.dtype == torch.bool for index in indices):
            raise AssertionError(f"{function} makes the host wait for the GPU")
        if str(function).startswith("aten.mm."):
            left, right = arguments[:2]
            if left.dtype != right.dtype:
                raise RuntimeError(f"expected m1 and m2 to have the same dtype: {left.dtype} != {right.dtype}")
            if str(function) in ("aten.mm.dtype", "aten.mm.dtype_out"):
                self.operands.add(left.dtype)
                assert arguments[2] == torch.float32
                return torch.mm(left.float(), right.float(), **named)
        if str(function) == "aten.addmm.dtype_out":
            assert arguments[1].dtype == arguments[2].dtype
            total, left, right = arguments[:3]
            assert (total.dtype, arguments[3]) == (torch.float32, torch.float32)
            return torch.addmm(total, left.float(), right.float(), **named)
        return function(*arguments, **named)
