"""Prints as JSON what importing each module of megarl changes in a process: run by test_imports_change_nothing.py.

``python import_snapshot.py`` finds out which other packages megarl's modules import, imports these packages alone, and
then forks a process for each room of megarl. There it takes a snapshot around the import of each module of the room.
``python import_snapshot.py others`` prints the names of these packages.
"""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import os
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
NOT_FOR_THIS_PROCESS = ("megarl.engines.sglang.plugin.megarl_routes_plugin", "megarl.engines.sglang.cpu.sitecustomize")
"""Parts of SGLang's servers: Python's start-up there imports the second for its effect."""


def module_names() -> list[str]:
    import megarl

    found = pkgutil.walk_packages(megarl.__path__, "megarl.")
    return ["megarl", *(each.name for each in found if each.name not in NOT_FOR_THIS_PROCESS)]


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
            yield label, value
            if isinstance(value, type) and value.__module__ == owner.__name__:
                for member, inner in list(vars(value).items()):
                    if not member.startswith("__abc") and member not in ("__weakref__", "_abc_impl"):
                        yield f"{label}.{member}", inner
                        yield from codes(f"{label}.{member}", inner)
            yield from codes(label, value)


def codes(label: str, value: Any) -> Iterator[tuple[str, Any]]:
    function = getattr(value, "__func__", getattr(value, "fget", value))
    if isinstance(function, types.FunctionType):
        yield f"{label}.__code__", function.__code__


def settings() -> dict[str, Any]:
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
        changed = [
            name
            for name, value in self.attributes.items()
            if name not in later.attributes or later.attributes[name] is not value
        ]
        loaded = tuple(f"{name}." for name in later.modules.keys() - self.modules.keys())
        changed += [
            name for name in later.attributes if name not in self.attributes and not name.startswith(loaded or ("\0",))
        ]
        changed += [name for name, value in self.settings.items() if later.settings[name] != value]
        changed += [
            f"sys.modules[{name!r}]" for name, module in self.modules.items() if later.modules.get(name) is not module
        ]
        return changed


def others() -> list[str]:
    """Names of the modules that are not of megarl, in the order of their imports."""
    for name in module_names():
        importlib.import_module(name)
    return [name for name, module in sys.modules.items() if module is not None and not name.startswith("megarl")]


def changes_of(names: list[str]) -> dict[str, list[str]]:
    changes = {}
    before = Snapshot()
    for name in names:
        importlib.import_module(name)
        after = Snapshot()
        if different := before.differences(after):
            changes[name] = different
        before = after
    return changes


def in_a_fork(names: list[str], call: str = "") -> dict[str, list[str]]:
    """``changes_of``, or what ``megarl.CALL()`` changes."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if call:
                megarl = importlib.import_module("megarl")
                before = Snapshot()
                getattr(megarl, call)()
                answer = {call: before.differences(Snapshot())}
            else:
                answer = changes_of(names)
        except BaseException as error:
            answer = {"error": [repr(error)]}
        with os.fdopen(write, "w") as file:
            json.dump(answer, file)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        answer = json.load(file)
    os.waitpid(pid, 0)
    return answer


def main() -> None:
    warnings.filterwarnings("ignore", message=".*reduce_op", category=FutureWarning)
    if sys.argv[1:] == ["others"]:
        print("OTHERS" + json.dumps([others(), module_names()]))
        return
    words = [sys.executable, "-W", "ignore", __file__, "others"]
    output = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
    foreign, names = json.loads(output.rpartition("OTHERS")[2])
    for name in foreign:
        try:
            importlib.import_module(name)
        except ImportError:  # parts of packages that cannot be imported by themselves
            continue
    assert not any(name.startswith("megarl") for name in sys.modules)
    rooms: dict[str, list[str]] = {}
    for name in names:
        rooms.setdefault(".".join(name.split(".")[:2]), []).append(name)
    changes: dict[str, list[str]] = {}
    for room in rooms.values():
        changes |= in_a_fork(room)
    print("CHANGES" + json.dumps([changes, names, in_a_fork([], "enable_cpu")]))


if __name__ == "__main__":
    main()
