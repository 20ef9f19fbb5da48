"""Settings that every test shares."""

from __future__ import annotations

import os

# Before torch is imported: one thread per process (see the Makefile), and no look at a model hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import HealthCheck, settings
from patch_trees import core_tree  # noqa: F401 (pytest finds it here)
from sglang_fixtures import (  # noqa: F401 (pytest finds them here)
    hostile_model,
    sglang_model,
    sglang_python,
    sglang_server,
    sglang_spec,
    updated_server,
)

# The same examples on every machine and no time limits: a busy machine must not fail a test.
settings.register_profile(
    "megarl", deadline=None, derandomize=True, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("megarl")


LONG = (
    "test_sglang_kills.py",
    "test_launch_slurm.py",
    "test_sglang_releases.py",
    "test_sglang_training.py",
    "test_launch_local.py",
    "test_sglang_faults.py",
    "test_tool_use.py",
    "test_sglang_down.py",
)
"""Files of several minutes. They begin first, so that no worker is left alone with one at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first. Tests marked gpu are skipped where there is no CUDA device."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
