"""The tests of this folder run with tests/null_gpu/python: on the null GPU, or on a real one (`make test-null-gpu`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "megatron"))  # ranks.py, and the cases that several ranks run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("null_gpu")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if HERE in item.path.parents and not torch.cuda.is_available():
        pytest.fail("no CUDA device: run `make test-null-gpu`, or tests/null_gpu/python -m pytest", pytrace=False)


@pytest.fixture
def computing() -> Iterator[None]:
    """Operations on CUDA tensors have values."""
    from null_gpu.computing import computing

    with computing():
        yield
