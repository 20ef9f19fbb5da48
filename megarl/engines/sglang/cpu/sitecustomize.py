"""Lets SGLang import and capture routes with a torch that was built without CUDA.

Python imports this module at the start of every process with the directory on its PYTHONPATH. The repairs need torch,
and run right after the import of torch: helper processes without torch stay cheap.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

_kept: list[object] = []
"""Keeps the libraries alive: a collected library takes its operators along."""


def _declare_torchvision_operators(torch: ModuleType) -> object:
    """Declare the operators of torchvision's compiled library, which was built for CUDA and cannot be loaded here.

    torchvision attaches shapes and gradients by name on import, transformers imports torchvision, and both would fail.
    The schemas stay empty: no operator of torchvision ever runs, a text model has no pictures.
    """
    backward = ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
    names = ("nms", "qnms", *backward, *(f"_{name}_backward" for name in backward))
    library = torch.library.Library("torchvision", "DEF")
    for name in names:
        library.define(f"{name}() -> ()")
    return library


def _do_not_pin_memory(torch: Any) -> None:
    """Let ``torch.zeros(pin_memory=True)`` return plain memory: the route buffer of SGLang before 0.5.21 is pinned."""
    zeros = torch.zeros
    torch.zeros = lambda *args, pin_memory=False, **kwargs: zeros(*args, **kwargs)


class _AfterTorch(MetaPathFinder):
    """Finds torch by the normal path, and applies the repairs after the import."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module
        runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)

        def run_and_repair(module: ModuleType) -> None:
            run(module)
            if not module.cuda.is_available():
                _kept.append(_declare_torchvision_operators(module))
                # SGLang's route capturer pins its buffer for copies from a GPU: the registration succeeds.
                module.cuda.cudart = lambda: runtime
                _do_not_pin_memory(module)

        spec.loader.exec_module = run_and_repair
        return spec


sys.meta_path.insert(0, _AfterTorch())
