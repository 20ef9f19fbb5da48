from __future__ import annotations

from pathlib import Path

import pytest
from launch_world import Launch, World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A tiny model and task."""
    return World.made(tmp_path_factory.mktemp("launch"))


@pytest.fixture(scope="session")
def reference(world: World) -> Path:
    """The folder of a run that nothing happens to."""
    run = Launch(world, world.config("reference"), fresh=True)
    assert run.code() == 0, run.log.read_text()[-3000:]
    return run.folder
