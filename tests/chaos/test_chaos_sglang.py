"""A short run of chaos with a real SGLang server behind a lying proxy."""

from __future__ import annotations

from pathlib import Path

import pytest
from episodes import Arena, play, table
from server_episodes import SERVER_EPISODES

from megarl.engines.sglang.server import Server

pytestmark = [pytest.mark.sglang, pytest.mark.slow(minutes=1)]


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory, updated_server: Server, hostile_model: Path) -> Arena:
    arena = Arena(tmp_path_factory.mktemp("chaos"), hostile_model)
    arena.server = updated_server
    return arena


@pytest.mark.parametrize("kind", ["wire_lies", "foreign_weights"])
def test_an_episode_of_chaos_with_a_server(arena: Arena, kind: str) -> None:
    """Wrong answers are refused and counted, and an update that was not made ends the run."""
    print(table(play(arena, kind, 3, SERVER_EPISODES)))
