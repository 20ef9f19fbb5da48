"""Lets SGLang import and capture routes beside a torch that was built without CUDA.

Python imports this module by itself at the start of every process that has the directory on its PYTHONPATH. The repairs
need torch, so they run right after torch has been imported: helper processes without torch stay cheap.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

_kept: list[object] = []
"""A library that is collected takes its operators along."""


def _declare_torchvision_operators(torch: ModuleType) -> object:
    """Declares the operators whose compiled library was built for CUDA and so cannot be loaded here.

    torchvision attaches shapes and gradients to them by name when it is imported, transformers imports torchvision, and
    both would fail. The schemas stay empty: no operator of torchvision ever runs, a text model has no pictures.
    """
    backward = ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
    names = ("nms", "qnms", *backward, *(f"_{name}_backward" for name in backward))
    library = torch.library.Library("torchvision", "DEF")
    for name in names:
        library.define(f"{name}() -> ()")
    return library


def _stand_in_for_cudart(torch: ModuleType) -> None:
    """Makes the registration of host memory succeed: SGLang's route capturer pins its buffer for copies from a GPU."""
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    torch.cuda.cudart = lambda: runtime


def _do_not_pin_memory(torch: Any) -> None:
    """Lets ``torch.zeros(pin_memory=True)`` return plain memory: SGLang before 0.5.21 makes its route buffer so."""
    zeros = torch.zeros
    torch.zeros = lambda *args, pin_memory=False, **kwargs: zeros(*args, **kwargs)


class _AfterTorch(MetaPathFinder):
    """Finds torch like everybody else, and applies the repairs once its module has run."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_repair(module: ModuleType) -> None:
            run(module)
            if not module.cuda.is_available():
                _kept.append(_declare_torchvision_operators(module))
                _stand_in_for_cudart(module)
                _do_not_pin_memory(module)

        spec.loader.exec_module = run_and_repair
        return spec


sys.meta_path.insert(0, _AfterTorch())
