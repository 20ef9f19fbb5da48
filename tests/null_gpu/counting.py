"""What the host asks of the device: launches, copies, and how often it waits."""

from __future__ import annotations

import contextlib
import ctypes
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

NOT_THE_CALLER = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent / "computing.py"),
    warnings.__file__,
    __file__,
)


@dataclass(frozen=True)
class Counts:
    """Calls of CUDA since the process began (null GPU only). ``pageable``: copies of host memory that is not pinned."""

    launches: int
    synchronizations: int
    host_to_device: int
    device_to_host: int
    device_to_device: int
    pageable: int

    @classmethod
    def now(cls) -> Counts:
        read = ctypes.CDLL(None).null_gpu_counters
        read.restype = ctypes.POINTER(ctypes.c_uint64)
        return cls(*read()[: len(cls.__dataclass_fields__)])

    def __sub__(self, before: Counts) -> Counts:
        return Counts(*(getattr(self, name) - getattr(before, name) for name in self.__dataclass_fields__))


@contextlib.contextmanager
def host_waits() -> Iterator[list[str]]:
    """List each time that the host waits for the device, as ``path:line`` of the innermost line outside torch."""
    waits: list[str] = []

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "called a synchronizing CUDA operation" in str(message):
            stack = [f for f in traceback.extract_stack() if not f.filename.startswith(NOT_THE_CALLER)]
            waits.append(f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "?")

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(before)
