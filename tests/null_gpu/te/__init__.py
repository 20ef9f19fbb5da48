"""Transformer Engine with numbers on a GPU that computes nothing: ``install()`` before megarl or Megatron is imported.

TE's Python code, enumerations and checks are the real ones. Replaced by reference maths in plain torch are the kernels:
the functions of its compiled extension ``transformer_engine_torch``, its Triton kernels for permutation, and attention.
What has no reference raises. Products, norms and softmax are computed in fp32 and rounded once.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

HOST_ONLY = {
    "device_supports_multicast",
    "get_cublasLt_version",
    "get_cudnn_version",
    "get_num_cublas_streams",
    "get_stream_priority_range",
    "ubuf_built_with_mpi",
}
"""Functions of the extension that need no kernel."""


def install() -> None:
    """Replace the kernels in this process. Raises RuntimeError on a GPU that computes, or after Megatron's import."""
    if not os.environ.get("NULL_GPU"):
        raise RuntimeError("reference kernels: found a GPU that computes, expected the null GPU; use TE's own kernels")
    if "megatron.core" in sys.modules:
        raise RuntimeError("reference kernels: Megatron is imported and has taken TE's; call install() before")
    from null_gpu.te import attention, gemm, norms, optimizers, permutation, rope

    importlib.import_module("transformer_engine.pytorch")
    extension = sys.modules["transformer_engine_torch"]
    parts = (gemm, norms, optimizers, rope)
    references = {name: function for part in parts for name, function in part.REFERENCES.items()}
    _replace(extension, {name: references.get(name) or _missing(name) for name in _kernels(extension)})
    triton = importlib.import_module("transformer_engine.pytorch.triton.permutation")
    for name, function in permutation.REFERENCES.items():
        assert hasattr(triton, name), f"this TE has no {name}"
        setattr(triton, name, function)
    attention.install()


def _kernels(extension: ModuleType) -> list[str]:
    functions = (name for name, value in vars(extension).items() if callable(value) and not isinstance(value, type))
    return [name for name in functions if name not in HOST_ONLY and not name.startswith("_")]


def _replace(extension: ModuleType, functions: dict[str, Callable[..., Any]]) -> None:
    """In the extension, and in every module of TE that has imported its functions by name."""
    replaced = {id(getattr(extension, name)): function for name, function in functions.items()}
    modules = [module for name, module in sys.modules.items() if name.startswith("transformer_engine")]
    for module in modules:
        for name, value in list(vars(module).items()):
            if id(value) in replaced:
                setattr(module, name, replaced[id(value)])


def _missing(name: str) -> Callable[..., NoReturn]:
    def raise_missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"transformer_engine_torch.{name} has no reference in tests/null_gpu/te")

    return raise_missing
