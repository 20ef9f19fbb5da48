from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from train_world import World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A tiny model, its task, and rollouts of a whole step; made once."""
    from train_world import make_world

    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(autouse=True)
def no_process_groups_left() -> Iterator[None]:
    """A test that fails inside a group must not take the next one with it."""
    yield
    if "megarl.megatron.distributed" in sys.modules:
        from megarl.megatron import distributed

        distributed.shutdown()
