"""Prints as JSON what importing megarl changes in a process: run by test_lean_imports.py.

``python import_snapshot.py others`` prints the names of the modules that are imported with megarl's. Without a word,
these alone are imported first; then all of megarl's are, between two snapshots.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import multiprocessing
import pkgutil
import signal
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any

WATCHED = ("torch", "torch.cuda", "torch.cuda.random", "torch.distributed", "torch.distributed.distributed_c10d")
WATCHED_PACKAGES = ("megatron", "transformer_engine")
NOT_FOR_THIS_PROCESS = (
    "megarl.adapters.trl",
    "megarl.adapters.verl",
    "megarl.engines.sglang.plugin.megarl_routes_plugin",
    "megarl.engines.sglang.cpu.sitecustomize",
    "megarl.megatron.passes.logprob_kernels",
)
"""verl's plugin; parts of SGLang's servers (Python's start-up there imports the last one for its effect); kernels of
Triton, which comes with torch for GPUs."""


def import_megarl() -> list[str]:
    megarl = importlib.import_module("megarl")
    found = pkgutil.walk_packages(megarl.__path__, "megarl.")
    names = [each.name for each in found if each.name not in NOT_FOR_THIS_PROCESS]
    for name in names:
        importlib.import_module(name)
    return names


def watched_attributes() -> Iterator[tuple[str, Any]]:
    """Attributes of the watched modules and of their classes; a function is there with its code."""
    import torch

    modules = [sys.modules[name] for name in WATCHED]
    modules += [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in WATCHED_PACKAGES]
    for owner in [*(module for module in modules if module is not None), torch.Tensor]:
        for name, value in list(vars(owner).items()):
            if isinstance(value, types.ModuleType) or name == "__builtins__":
                continue
            label = f"{owner.__name__}.{name}"
            yield from with_code(label, value)
            if isinstance(value, type) and value.__module__ == owner.__name__:
                for member, inner in list(vars(value).items()):
                    if not member.startswith("__abc") and member not in ("__weakref__", "_abc_impl"):
                        yield from with_code(f"{label}.{member}", inner)


def with_code(label: str, value: Any) -> Iterator[tuple[str, Any]]:
    yield label, value
    function = getattr(value, "__func__", getattr(value, "fget", value))
    if isinstance(function, types.FunctionType):
        yield f"{label}.__code__", function.__code__


def settings() -> dict[str, Any]:
    import os

    import torch

    loggers = {"": logging.root} | {
        name: logger for name, logger in logging.root.manager.loggerDict.items() if isinstance(logger, logging.Logger)
    }
    return {
        "os.environ": dict(os.environ),
        "sys.path": [*sys.path],
        "sys.meta_path": [*sys.meta_path],
        "warnings.filters": [*warnings.filters],
        "warnings.showwarning": warnings.showwarning,
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "hooks of exceptions": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "logging": {
            name: (logger.level, [*logger.handlers], [*logger.filters], logger.propagate, logger.disabled)
            for name, logger in loggers.items()
            if name.partition(".")[0] != "megarl" and (logger.handlers or logger.level or not name)
        },
        "multiprocessing": multiprocessing.get_start_method(allow_none=True),
        "torch defaults": (
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_rng_state().sum().item(),
        ),
        "sys.modules that are None": sorted(name for name, module in sys.modules.items() if module is None),
    }


class Snapshot:
    def __init__(self) -> None:
        self.attributes = dict(watched_attributes())
        self.settings = settings()
        self.modules = dict(sys.modules)

    def differences(self, later: Snapshot) -> list[str]:
        changed = [name for name, value in self.attributes.items() if later.attributes.get(name, self) is not value]
        loaded = tuple(f"{name}." for name in later.modules.keys() - self.modules.keys())
        more = later.attributes.keys() - self.attributes.keys()
        changed += [name for name in more if not name.startswith(loaded or ("\0",))]
        changed += [name for name, value in self.settings.items() if later.settings[name] != value]
        gone = [name for name, module in self.modules.items() if later.modules.get(name) is not module]
        return changed + [f"sys.modules[{name!r}]" for name in gone]


def main() -> None:
    warnings.filterwarnings("ignore", message=".*reduce_op", category=FutureWarning)
    if sys.argv[1:] == ["others"]:
        import_megarl()
        loaded = [name for name, module in sys.modules.items() if module is not None]
        print("OTHERS" + json.dumps([name for name in loaded if not name.startswith("megarl")]))
        return
    words = [sys.executable, "-W", "ignore", __file__, "others"]
    output = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
    for name in json.loads(output.rpartition("OTHERS")[2]):
        with contextlib.suppress(ImportError):  # parts of packages that cannot be imported by themselves
            importlib.import_module(name)
    assert not any(name.startswith("megarl") for name in sys.modules)
    before = Snapshot()
    names = import_megarl()
    after = Snapshot()
    importlib.import_module("megarl").enable_cpu()
    print("CHANGES" + json.dumps([before.differences(after), names, after.differences(Snapshot())]))


if __name__ == "__main__":
    main()
