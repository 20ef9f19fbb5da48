"""A plugin of pytest: tests that were written for a CPU run on the null GPU (``-p null_gpu.everywhere``).

The tests of selection.txt are the same files that `make test-fast` runs. megarl finds a CUDA device here, so models and
steps live there, and process groups use NCCL. ``compute_here`` gives values to their operations in this process and
in its threads. NULL_GPU_WITHOUT_TE hides Transformer Engine, so that Megatron's local layers run.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from null_gpu.computing import computing

HERE = Path(__file__).parent
_entered = contextlib.ExitStack()
atexit.register(_entered.close)  # while modules can still be imported, which leaving needs
os.environ.setdefault("NULL_GPU_DEVICES", "4")  # one for each rank of a test


@functools.cache
def compute_here() -> None:
    """Compute values in this thread from now on, and in the threads that it starts."""
    run = threading.Thread.run

    def run_computing(thread: threading.Thread) -> None:
        with computing():
            run(thread)

    threading.Thread.run = run_computing  # type: ignore[method-assign]
    _entered.enter_context(computing())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if HERE not in item.path.parents:
        compute_here()
    return (yield)
