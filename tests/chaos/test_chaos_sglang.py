"""A short run of chaos with a real SGLang server behind a lying proxy, and with a run's own servers."""

from __future__ import annotations

from pathlib import Path

import pytest
from episodes import Arena, play, table
from server_episodes import SERVER_EPISODES

from megarl.rollout.sglang.server import Server

pytestmark = [pytest.mark.sglang, pytest.mark.slow(minutes=2)]


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory, updated_server: Server, hostile_model: Path) -> Arena:
    arena = Arena(tmp_path_factory.mktemp("chaos"), hostile_model)
    arena.server = updated_server
    return arena


@pytest.mark.parametrize("kind", ["wire_lies"])
def test_an_episode_of_chaos_with_a_server(arena: Arena, kind: str) -> None:
    """Every wrong answer is refused and counted: the proxy's ledger has as many as the run."""
    print(table(play(arena, kind, 3, SERVER_EPISODES)))
